"""Loggers write what the libraries' own files hold; each is read back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import trireme as tr
from tests.integration.planted_model import Linear, bce, loader
from tests.jobs import Job
from trireme.errors import BadRequest, ResourceExhausted, Stopped
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded


def fit(cluster: Cluster, *callbacks: tr.Callback, epochs: int = 2) -> dict[str, float]:
    model = Linear()
    trainer = tr.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=tr.Strategy("sync"),
        loss=bce,
        metrics=["auc"],
        callbacks=callbacks,
        progress=False,
        cluster=cluster,
    )
    return trainer.fit(loader(500), epochs=epochs, valid=loader(200, seed=1))


class EndsAt(tr.Callback):
    """Ends a fit at a step, by a signal or an error."""

    def __init__(self, step: int, number: signal.Signals | None) -> None:
        self.at, self.number = step, number

    def step(self, fit: tr.FitState) -> None:
        if fit.step == self.at and self.number is not None:
            os.kill(os.getpid(), self.number)
        elif fit.step == self.at:
            raise ArithmeticError("of the test")


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_reads_the_figures_of_worker_0(tmp_path: Path) -> None:
    def work(cluster: Cluster) -> dict[str, float]:
        return fit(cluster, tr.TensorBoard(tmp_path, every_steps=2))

    with Job(1) as job:
        fitted, _ = job.run(2, work)
    assert len(list(tmp_path.iterdir())) == 1
    scalars = read_tensorboard(tmp_path)
    steps = scalars["epoch"][-1][0]
    assert scalars["epoch"] == [(steps // 2, 1.0), (steps, 2.0)]
    assert scalars["valid/loss"][1] == (steps, pytest.approx(fitted["valid_loss"]))
    assert scalars["train/auc"][1] == (steps, pytest.approx(fitted["auc"]))
    assert [step for step, _ in scalars["step/loss"]] == list(range(2, steps + 1, 2))
    rates = [value for _, value in scalars["step/lr/dense"]]
    assert rates == pytest.approx([0.1] * len(rates))
    assert all(rate > 0 for _, rate in scalars["step/examples_per_s"])


# TensorBoard writes in a thread, which the error ends.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboards_full_disk_ends_the_fit_with_a_typed_error(small_disk: Path) -> None:
    folder = small_disk / "runs"

    class Fills(tr.Callback):
        def epoch(self, fit: tr.FitState) -> None:
            with contextlib.suppress(OSError), open(small_disk / "rest", "wb", buffering=0) as rest:
                while True:
                    rest.write(bytes(4096))

    logger = tr.TensorBoard(folder, every_steps=1)
    expected = f"TensorBoard: cannot write {folder}: No space left"
    with embedded() as cluster, pytest.raises(ResourceExhausted, match=expected):
        fit(cluster, logger, Fills(), epochs=200)


def test_a_resumed_fit_hides_steps_after_its_checkpoint(tmp_path: Path) -> None:
    model_folder, events = tmp_path / "saved", tmp_path / "events"

    def train(*others: tr.Callback) -> None:
        with embedded() as cluster:
            model = Linear()
            trainer = tr.Trainer(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                strategy=tr.Strategy("sync"),
                loss=bce,
                callbacks=[tr.TensorBoard(events, every_steps=1), *others],
                progress=False,
                cluster=cluster,
            )
            checkpoints = tr.Checkpoints(model_folder, every_steps=4)
            trainer.fit(loader(500), epochs=2, checkpoints=checkpoints, resume=True)

    with pytest.raises(ArithmeticError):
        train(EndsAt(7, None))
    train()
    assert [step for step, _ in read_tensorboard(events)["step/loss"]] == list(range(1, 21))


@pytest.mark.parametrize(("number", "raised"), [(None, ArithmeticError), (signal.SIGTERM, Stopped)])
def test_what_was_logged_before_an_end_is_in_the_file(
    number: signal.Signals | None, raised: type[BaseException], tmp_path: Path
) -> None:
    with embedded() as cluster, pytest.raises(raised):
        fit(cluster, tr.TensorBoard(tmp_path, every_steps=1), EndsAt(3, number))
    steps = [step for step, _ in read_tensorboard(tmp_path)["step/loss"]]
    assert steps in ([1, 2, 3], [1, 2, 3, 4])


def records_of(path: Path) -> list[bytes]:
    """The records of a file of Weights & Biases: a header, then blocks of 32 KiB of chunks."""
    data, records, place = path.read_bytes(), [], 7
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        chunk = data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 2):  # whole, first
            records.append(chunk)
        else:  # middle, last
            records[-1] += chunk
    return records


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_wandb_writes_the_figures_offline(
    number: signal.Signals | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = tr.WandB(
        every_steps=4, project="p", config={"dim": 4}, mode="offline", dir=str(tmp_path)
    )
    fitted: dict[str, float] = {}
    with embedded() as cluster:
        if number is None:
            fitted = fit(cluster, logger)
        else:
            with pytest.raises(Stopped):
                fit(cluster, logger, EndsAt(5, number))
    wandb.teardown()  # its own process has written everything then
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows, exits = [], []
    for data in records_of(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({".".join(i.nested_key) or i.key: float(i.value_json) for i in items})
        elif record.WhichOneof("record_type") == "exit":
            exits.append(record.exit.exit_code)
    assert exits == [0 if number is None else 1]
    assert [row["_step"] for row in rows if "step/loss" in row][:1] == [4]
    if number is None:
        assert rows[-1]["valid/auc"] == fitted["valid_auc"]
        assert rows[-1]["_step"] == 20


@pytest.mark.parametrize(
    ("number", "status"), [(0, "FINISHED"), (signal.SIGTERM, "KILLED"), (None, "FAILED")]
)
def test_mlflow_reads_the_run(
    number: Any, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    uri = (tmp_path / "runs").as_uri()
    logger = tr.MLflow("clicks", tracking_uri=uri, params={"dim": 4}, every_steps=4)
    with embedded() as cluster:
        if number == 0:
            fitted = fit(cluster, logger)
        else:
            with pytest.raises((Stopped, ArithmeticError)):
                fit(cluster, logger, EndsAt(15, number))
    client = MlflowClient(tracking_uri=uri)
    assert logger.run_id is not None
    run = client.get_run(logger.run_id)
    assert run.info.status == status
    assert run.data.params == {"dim": "4"}
    assert client.get_experiment(run.info.experiment_id).name == "clicks"
    history = client.get_metric_history(logger.run_id, "valid/loss")
    assert [point.step for point in history] == ([10, 20] if number == 0 else [10])
    if number == 0:
        assert history[-1].value == fitted["valid_loss"]


def test_a_server_of_mlflow_that_is_silent_is_waited_for_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow.exceptions import MlflowException

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr("trireme.rpc.notices.FIRST_S", 0.05)
    with embedded() as cluster, socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(MlflowException):
            fit(cluster, tr.MLflow("clicks", tracking_uri=uri))
    assert "MLflow: no answer for 0 s; fit waits: MLFLOW_HTTP_REQUEST_TIMEOUT" in caplog.text


@pytest.mark.parametrize("required", [True, False])
def test_a_server_that_dies_is_asked_once_and_ends_a_fit_that_requires_it(
    required: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = tr.MLflow("clicks", tracking_uri=tmp_path.as_uri(), every_steps=3, required=required)
    calls: list[str] = []

    class Dies(tr.Callback):
        def begin_fit(self, fit: tr.FitState) -> None:
            logger._client = self

        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            raise ConnectionError("refused")

    with embedded() as cluster:
        if required:
            with pytest.raises(ConnectionError, match="refused"):
                fit(cluster, logger, Dies())
        else:
            assert "valid_auc" in fit(cluster, logger, Dies())
    assert calls == ["log_batch"]
    goes_on = "MLflow: logs no more of this fit, which goes on (required=False): refused"
    assert caplog.text.count(goes_on) == (not required)


@pytest.mark.parametrize(
    ("make", "module", "extra"),
    [
        (lambda: tr.TensorBoard("x"), "torch.utils.tensorboard", "tensorboard"),
        (lambda: tr.WandB(), "wandb", "wandb"),
        (lambda: tr.MLflow(), "mlflow", "mlflow"),
    ],
)
def test_a_missing_library_is_named(
    make: Any, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BadRequest, match=rf"pip install trireme-ps\[{extra}\]"):
        make()


def test_every_steps_is_checked() -> None:
    with pytest.raises(
        BadRequest, match="TensorBoard: expected every_steps as an integer >= 1, found 0"
    ):
        tr.TensorBoard("x", every_steps=0)
