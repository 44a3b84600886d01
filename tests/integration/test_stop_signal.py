"""SIGTERM to one process that trains embedded."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trireme as tr
from tests.conditions import WAIT_S, wait_until
from tests.integration.test_predecessor import STRATEGIES
from tests.jobs import Job
from trireme.errors import BadRequest, Stopped
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.train.loop.pipeline import Pipeline
from trireme.train.modes.collective.mode import Collective
from trireme.train.modes.geo.window import Window
from trireme.train.modes.hybrid.replicated_dense import ReplicatedDense
from trireme.train.modes.on_servers.push_stream import Pusher
from trireme.train.online.train_passes import PassReport
from trireme.worker.client import WorkerClient

NUM_BATCHES, TOLD_AT = 500, 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = tr.nn.EmbeddingBag(
            tr.Table("rows", dim=2, optimizer=tr.optim.Adagrad(lr=0.1)), features=["a"]
        )
        self.head = nn.Linear(2, 1)
        self.heeded: set[Any] = set()
        self.num_steps = 0

    def forward(self, batch: tr.data.Batch) -> torch.Tensor:
        self.heeded.add(signal.getsignal(signal.SIGTERM))
        self.num_steps += 1
        if self.num_steps == TOLD_AT and self.training:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.head(self.rows(batch).flatten(1)).squeeze(1)


def batches(num: int) -> list[dict[str, torch.Tensor]]:
    return [{"a": torch.tensor([i % 7, 1]), "label": torch.tensor([0.0, 1.0])} for i in range(num)]


def trainer_on(cluster: Cluster, model: Model, mode: str = "async") -> tr.Trainer:
    assert threading.current_thread() is threading.main_thread()  # or SIGTERM would end the tests
    return tr.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=nn.functional.binary_cross_entropy_with_logits,
        strategy=STRATEGIES[mode],
        progress=False,
        cluster=cluster,
    )


@contextmanager
def trainer() -> Iterator[tr.Trainer]:
    with embedded(threads=1) as cluster:
        yield trainer_on(cluster, Model())


def wait_for_heartbeats(cluster: Cluster, num: int) -> None:
    """Returns when so many more have been answered."""
    heartbeat, answered = cluster._heartbeat, threading.Semaphore(0)
    assert heartbeat is not None
    report = heartbeat._log_silence
    heartbeat._log_silence = lambda attendance: (report(attendance), answered.release())
    for _ in range(num):
        assert answered.acquire(timeout=WAIT_S)


class HeardModel(Model):
    """Goes on when servers have heard of the signal."""

    cluster: Cluster

    def forward(self, batch: tr.data.Batch) -> torch.Tensor:
        outputs = super().forward(batch)
        if self.num_steps == TOLD_AT:
            wait_until(self._servers_have_heard)
        return outputs

    def _servers_have_heard(self) -> bool:
        servers = self.cluster.client.servers
        (reply,) = servers.everywhere("server.attendance", {"within_s": 9.0})
        return bool(reply.body["stops"])


def test_a_fit_without_checkpoints_says_that_nothing_was_saved(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with trainer() as fitting:
        fitting.shows_progress = True
        with pytest.raises(Stopped) as stopped:
            fitting.fit(batches(NUM_BATCHES), epochs=2)
        assert capsys.readouterr().out.startswith("train 1/2: ")  # not 100%
        assert fitting.model.num_steps == TOLD_AT
        assert fitting.optimizer.num_steps == TOLD_AT
    assert stopped.value.code == 0
    assert "worker 0 has got SIGTERM: training has stopped after a step; nothing was" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_says_before_the_step_ends_what_follows_and_a_second_one_interrupts(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []

    def interrupt(_: torch.Tensor) -> None:  # in the backward pass of a step
        os.kill(os.getpid(), number)
        lines.append(capfd.readouterr().err)
        os.kill(os.getpid(), signal.SIGINT)

    with trainer() as fitting:
        fitting.model.head.bias.register_hook(interrupt)
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Stopped):
            fitting.fit(batches(2))
        assert fitting.optimizer.num_steps == (number == signal.SIGTERM)
    line = "training ends after this step; Ctrl-C again interrupts it at once, and saves nothing\n"
    assert lines == ([line] if number == signal.SIGINT else [""])
    assert "training ends" not in capfd.readouterr().err


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_only_worker_of_servers_trains_on_in_the_next_cell(mode: str) -> None:
    with Job(1) as job, job.join(0, 1, timeout_s=2.0) as cluster:
        model = HeardModel()
        model.cluster = cluster
        fitting = trainer_on(cluster, model, mode)
        with pytest.raises(Stopped):
            fitting.fit(batches(NUM_BATCHES))
        wait_for_heartbeats(cluster, 2)  # which bring what the servers have heard
        fitting.fit(batches(2 * TOLD_AT))
        assert fitting.optimizer.num_steps == 3 * TOLD_AT


def test_passes_without_a_place_to_save_say_that_nothing_was_saved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = tr.Pass(day="20190720", number=1, open=lambda: batches(NUM_BATCHES))
    with trainer() as training, pytest.raises(Stopped):
        list(tr.train_passes(training, [one], evaluate=False))
    assert training.model.num_steps == TOLD_AT
    assert "stopped; nothing was saved: train_passes takes publishing=" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.parametrize("when", ["is_ready", "open", "the loop's body"])
def test_a_signal_beside_the_steps_of_passes_ends_the_script(
    when: str, number: signal.Signals, code: int
) -> None:
    def told(place: str) -> None:
        if place == when:
            os.kill(os.getpid(), number)

    def is_ready() -> bool:
        told("is_ready")
        return when != "is_ready"

    def read() -> list[dict[str, torch.Tensor]]:
        told("open")
        return batches(TOLD_AT - 1)

    one = tr.Pass(day="20190720", number=1, open=read, is_ready=is_ready)
    with trainer() as training:
        reports = tr.train_passes(training, [one], evaluate=False)
        with pytest.raises(Stopped) as stopped:
            [told("the loop's body") for _ in reports]
        assert training.optimizer.num_steps == (TOLD_AT - 1 if when == "the loop's body" else 0)
    assert stopped.value.code == code


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.parametrize("when", ["evaluation", "callback", "end_fit"])
def test_a_signal_after_the_last_step_ends_the_script_with_a_checkpoint(
    when: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    class Told(tr.Callback):
        def epoch(self, _: tr.FitState) -> None:
            if when == "callback":
                os.kill(os.getpid(), number)

        def end_fit(self, _: tr.FitState, error: BaseException | None) -> None:
            errors.append(error)
            if when == "end_fit":
                os.kill(os.getpid(), number)

    def evaluated(*_: Any) -> None:
        if when == "evaluation" and not fitting.model.training:
            os.kill(os.getpid(), number)

    errors: list[BaseException | None] = []
    saves = tr.Checkpoints(tmp_path, every_s=600)
    with trainer() as fitting:
        fitting.callbacks = (Told(),)
        fitting.model.register_forward_hook(evaluated)
        with pytest.raises(Stopped) as stopped:
            fitting.fit(batches(TOLD_AT - 1), valid=batches(1), checkpoints=saves)
        assert (stopped.value.code, fitting.num_epochs) == (code, 1)
    assert errors == [None if when == "end_fit" else stopped.value]
    with trainer() as again:
        assert again.resume(tmp_path) is not None
        assert again.num_epochs == 1


def test_a_stopped_pass_of_data_without_streams_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> list[PassReport]:
        return list(tr.train_passes(training, passes, publishing=publishing, evaluate=False))

    caplog.set_level("INFO", "trireme")
    publishing = tr.Publishing(path=str(tmp_path))
    num = 2 * TOLD_AT
    passes = [tr.Pass(day="20190720", number=n, open=lambda: batches(num)) for n in (1, 2)]
    with trainer() as training, pytest.raises(Stopped):
        run()
    with trainer() as training:
        training.model.num_steps = TOLD_AT  # no second signal
        first, second = run()
        assert training.optimizer.num_steps == 2 * num
    assert f"reading {TOLD_AT} batches again" in caplog.text
    assert (first.trained["examples"], second.trained["examples"]) == (2 * (num - TOLD_AT), 2 * num)


def test_a_script_with_its_own_sigterm_handler_keeps_it() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with trainer() as fitting:
            fitting.fit(batches(2 * TOLD_AT))
            assert fitting.model.num_steps == 2 * TOLD_AT
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert heard == [signal.SIGTERM]


def test_outside_of_a_fit_sigterm_ends_the_process() -> None:
    with trainer() as fitting:
        fitting.fit(batches(TOLD_AT - 1))
        assert signal.SIG_DFL not in fitting.model.heeded
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        fitting.model.heeded.clear()
        fitting.evaluate(batches(TOLD_AT))
        assert fitting.model.heeded == {signal.SIG_DFL}


class SlowRelease:
    """A lock; who releases it goes on when whoever had to wait waits again, or has ended."""

    def __init__(self, has_ended: Callable[[], bool]) -> None:
        self._lock, self._has_ended = threading.Lock(), has_ended
        self.num_waits = 0

    def acquire(self) -> None:
        self.num_waits += 1
        self._lock.acquire()

    def release(self) -> None:
        before = self.num_waits
        self._lock.release()
        wait_until(lambda: self.num_waits > before or self._has_ended())


def test_a_loop_that_is_interrupted_while_it_takes_a_batch_ends_its_threads() -> None:
    with trainer() as training:
        source, cluster = batches(NUM_BATCHES), training.cluster
        pipeline = Pipeline(source, training.model, training=True, cluster=cluster)
        pipeline._may_pull = SlowRelease(lambda: pipeline._ahead.join(0))
        with pipeline:
            next(pipeline._ahead)  # Ctrl-C comes before it permits the next pull
            pipeline.stop()
            assert pipeline._ahead.join(0)


@pytest.mark.parametrize(
    ("mode", "kind", "method"),
    [
        ("sync", WorkerClient, "push"),
        ("bounded", Pusher, "submit"),
        ("async", Pusher, "submit"),
        ("collective", Collective, "step"),
        ("geo", Window, "step"),
        ("hybrid", ReplicatedDense, "step"),
    ],
)
@pytest.mark.parametrize("goes_on", ["with a load", "with a new model"])
def test_a_step_that_ctrl_c_left_half_made_is_no_other_batch(
    mode: str,
    kind: type,
    method: str,
    goes_on: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_part: Callable[..., None] = getattr(kind, method)

    def interrupted(self: Any, *step: Any, **options: Any) -> None:
        make_part(self, *step, **options)
        raise KeyboardInterrupt

    def loop(training: tr.Trainer) -> None:
        for batch in tr.prefetch(batches(4), training.model, cluster=training.cluster):
            training.model(batch).sum().backward()
            training.optimizer.step()

    def make() -> tr.Trainer:
        model = Model()
        model.num_steps = TOLD_AT  # no signal
        return trainer_on(cluster, model, mode)

    with embedded(threads=1, timeout_s=8.0) as cluster:
        training = make()
        loop(training)
        training.save(tmp_path / "saved")
        with monkeypatch.context() as patched:
            patched.setattr(kind, method, interrupted)
            with pytest.raises(KeyboardInterrupt):
                loop(training)
        with pytest.raises(BadRequest, match="as a whole, found one that was interrupted"):
            loop(training)
        if goes_on == "with a load":
            training.load(tmp_path / "saved")
        else:
            training = make()
        loop(training)
        training.optimizer.flush()


def wait_for_signal(parent: Connection) -> None:
    parent.send("runs")
    while True:  # a signal just before a longer wait would not end it
        parent.poll(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_child_that_is_forked_during_fit_ends_it_alone(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    def data() -> Iterator[dict[str, torch.Tensor]]:
        yield batches(1)[0]
        receiver, sender = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=wait_for_signal, args=(sender,))
        child.start()
        assert child.pid is not None
        assert receiver.recv() == "runs"
        os.kill(child.pid, number)
        if number == signal.SIGINT:  # the first Ctrl-C leaves a loader's processes to the parent
            child.join(0.5)
            assert child.is_alive()
            os.kill(child.pid, number)
        child.join(WAIT_S)
        codes.append(child.exitcode)
        child.kill()

    codes: list[int | None] = []
    with trainer() as fitting:
        fitting.fit(data())
        assert fitting.optimizer.num_steps == 1
    assert codes == [-number if number == signal.SIGTERM else 1]
    assert "training ends" not in capfd.readouterr().err
