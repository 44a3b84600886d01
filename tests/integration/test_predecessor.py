"""A restarted worker continues where its predecessor was killed, in loops of all kinds, and refuses
what it cannot continue with.
"""

from __future__ import annotations

import logging
import queue
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.jobs import Job, in_threads
from tests.tables import T_ROWS
from trireme import _core
from trireme.coordinator import meetings
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.nn.session import session_of

NUM_KEYS, BATCH = 60, 4
STRATEGIES = {
    "sync": tr.Strategy("sync"),
    "bounded": tr.Strategy("bounded", staleness=1),
    "async": tr.Strategy("async"),
    "geo": tr.Strategy("geo", k=2),
    "hybrid": tr.Strategy("hybrid"),
    "collective": tr.Strategy("collective"),
}
MODES = pytest.mark.parametrize("mode", ["sync", "bounded", "async"])


class Killed(Exception):
    """Stands for the end of a process."""


class Model(nn.Module):
    """kill_at: dies in the forward pass of the n-th batch that it trains on."""

    def __init__(self, kill_at: int = 0) -> None:
        super().__init__()
        start = tr.initializer.Constant(0.0)
        table = tr.Table("t", dim=1, optimizer=tr.optim.Count(), initializer=start)
        self.rows = tr.nn.EmbeddingBag(table, features=["a"])
        self.head = nn.Linear(1, 1)
        self._to_live = kill_at

    def forward(self, batch: Any) -> torch.Tensor:
        if self.training:
            self._to_live -= 1
            if self._to_live == 0:
                raise Killed
        return self.head(self.rows(batch).flatten(1)).squeeze(1)


def batches(num: int = 8, seed: int = 1) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {"a": torch.from_numpy(rng.integers(0, NUM_KEYS, BATCH)), "label": torch.ones(BATCH)}
        for _ in range(num)
    ]


def times(num: int, data: list[dict[str, Any]]) -> dict[int, int]:
    """How often each key counts if each batch is trained on so often."""
    actual = Counter[int]()
    for batch in data:
        for key in set(batch["a"].tolist()):
            actual[key] += num
    return dict(actual)


def counts(cluster: Cluster) -> dict[int, int]:
    keys = _core.unique(np.arange(NUM_KEYS, dtype=np.uint64), cluster.pool)[0]
    rows = cluster.client.pull({T_ROWS: keys}).rows[T_ROWS].numpy()
    actual = dict(zip(keys.tolist(), rows[:, 0].astype(int).tolist(), strict=True))
    return {key: count for key, count in actual.items() if count}


def make_optimizer(cluster: Cluster, model: Model, mode: str = "async") -> tr.DistributedOptimizer:
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    set_default(cluster)
    return tr.DistributedOptimizer(dense, model, strategy=STRATEGIES[mode], cluster=cluster)


def make_trainer(cluster: Cluster, model: Model, mode: str = "async", **options: Any) -> tr.Trainer:
    return tr.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=STRATEGIES[mode],
        loss=nn.functional.binary_cross_entropy_with_logits,
        progress=False,
        cluster=cluster,
        **options,
    )


def step(model: Model, batch: Any, optimizer: tr.DistributedOptimizer) -> None:
    nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"]).backward()
    optimizer.step()


@pytest.fixture
def job() -> Iterator[Job]:
    with Job(2) as made:
        yield made


def die(job: Job, work: Any) -> None:
    """The only worker does this work, and dies in it."""
    cluster = job.join(0, 1)
    with pytest.raises(Killed):
        work(cluster)
    cluster.abandon()


# ---- loops ----


def prefetch_twice(cluster: Cluster, mode: str, kill_at: int = 0) -> None:
    model = Model(kill_at)
    optimizer = make_optimizer(cluster, model, mode)
    for _ in range(2):
        for batch in tr.prefetch(batches(), model, cluster=cluster):
            step(model, batch, optimizer)


@MODES
@pytest.mark.parametrize("kill_at", [1, 5, 9, 14])
def test_a_prefetch_loop_skips_the_batches_already_trained_on(
    job: Job, mode: str, kill_at: int
) -> None:
    die(job, lambda cluster: prefetch_twice(cluster, mode, kill_at))
    with job.join(0, 1) as cluster:
        prefetch_twice(cluster, mode)
        assert counts(cluster) == times(2, batches())
        assert session_of(cluster).row_source().num_steps == 16


@MODES
@pytest.mark.parametrize("kill_at", [2, 6, 8, 13])
def test_a_loop_that_adds_up_gradients_of_batches_trains_on_each_once(
    job: Job, mode: str, kill_at: int
) -> None:
    """A step of three batches, a batch without a step, and one at the end of the loop."""

    def train(cluster: Cluster, kill_at: int = 0) -> None:
        model = Model(kill_at)
        optimizer = make_optimizer(cluster, model, mode)
        for _ in range(2):
            for batch in tr.prefetch(data, model, cluster=cluster):
                number = int(batch["number"][0])
                if number == 3:
                    continue
                outputs = model(batch)
                nn.functional.binary_cross_entropy_with_logits(outputs, batch["label"]).backward()
                if number in (2, 6, 7):
                    optimizer.step()

    data = [
        {"a": torch.arange(4 * n, 4 * n + 4), "label": torch.ones(4), "number": torch.tensor([n])}
        for n in range(8)
    ]
    die(job, lambda cluster: train(cluster, kill_at))
    with job.join(0, 1) as cluster:
        train(cluster)
        assert counts(cluster) == times(2, [one for n, one in enumerate(data) if n != 3])


def test_a_position_within_prefetch_is_refused(job: Job) -> None:
    with job.join(0, 1) as cluster:
        model = Model()
        optimizer = make_optimizer(cluster, model)
        for batch in tr.prefetch(batches(1), model, cluster=cluster):
            model(batch).sum().backward()
            with pytest.raises(BadRequest, match=r"no position in tr\.prefetch"):
                optimizer.step(position=(3,))
            optimizer.step()
        assert optimizer.mode.last_push.position == (0, 1)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("geo", "expected to know a predecessor's steps"),
        ("hybrid", "expected all workers to begin together in mode 'hybrid'"),
    ],
)
def test_modes_that_keep_weights_in_the_worker_refuse_it(job: Job, mode: str, message: str) -> None:
    die(job, lambda cluster: prefetch_twice(cluster, mode, 5))
    cluster = job.join(0, 1)
    with pytest.raises(BadRequest, match=message):
        prefetch_twice(cluster, mode)
    cluster.abandon()


@MODES
def test_a_loop_that_does_not_ask_is_refused(job: Job, mode: str) -> None:
    def train(cluster: Cluster, kill_at: int = 0) -> None:
        model = Model(kill_at)
        optimizer = make_optimizer(cluster, model, mode)
        for batch in batches():
            step(model, batch, optimizer)

    die(job, lambda cluster: train(cluster, 4))
    cluster = job.join(0, 1)
    with pytest.raises(BadRequest, match=r"found one that does not ask: train with Trainer.fit"):
        train(cluster)
    cluster.abandon()


@MODES
def test_a_custom_loop_asks_for_the_remaining_streams(job: Job, mode: str) -> None:
    def train(cluster: Cluster, kill_at: int = 0) -> None:
        model = Model(kill_at)
        optimizer = make_optimizer(cluster, model, mode)
        for _ in range(2):
            done = optimizer.begin_pass()
            for batch in [] if done.is_over else batches()[done.num_pushes :]:
                step(model, batch, optimizer)
            optimizer.end_pass()

    die(job, lambda cluster: train(cluster, 11))
    with job.join(0, 1) as cluster:
        train(cluster)
        assert counts(cluster) == times(2, batches())


def test_meetings_within_a_loop_cannot_be_resumed(job: Job) -> None:
    def train(cluster: Cluster, kill_at: int = 0) -> None:
        model = Model(kill_at)
        optimizer = make_optimizer(cluster, model)
        for batch in tr.prefetch(batches(), model, cluster=cluster):
            cluster.client.coordinator.gather({}, [])
            step(model, batch, optimizer)

    die(job, lambda cluster: train(cluster, 4))
    cluster = job.join(0, 1)
    with pytest.raises(BadRequest, match="expected a loop without meetings"):
        train(cluster)
    cluster.abandon()


# ---- a trainer ----


@MODES
@pytest.mark.parametrize("kill_at", [1, 6, 9, 15])
def test_data_without_streams_is_read_again(
    job: Job, mode: str, kill_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    def train(cluster: Cluster, kill_at: int = 0) -> dict[str, float]:
        loader = torch.utils.data.DataLoader(
            batches(), batch_size=None, shuffle=True, generator=torch.Generator().manual_seed(3)
        )
        return make_trainer(cluster, Model(kill_at), mode).fit(loader, epochs=2)

    die(job, lambda cluster: train(cluster, kill_at))
    caplog.set_level(logging.INFO, "trireme.train")
    with job.join(0, 1) as cluster:
        figures = train(cluster)
        assert counts(cluster) == times(2, batches())
    assert figures["examples"] == BATCH * (8 if kill_at < 10 else 17 - kill_at)
    assert ("worker 0 was restarted" in caplog.text) == (kill_at > 1)
    assert (" of epoch 1; " in caplog.text) == (kill_at == 6)  # counted as the progress lines do
    assert ("epoch 1 is over" in caplog.text) == (kill_at > 8)
    assert (" of epoch 2; " in caplog.text) == (kill_at == 15)


class Scoring(tr.Callback):
    """Evaluates: within an epoch after every second step, or at its end."""

    on_all_workers = True

    def __init__(self, *, within: bool) -> None:
        self._within = within

    def step(self, fit: tr.FitState) -> None:
        if self._within and fit.step % 2 == 0:
            fit.trainer.evaluate(batches(2))

    def epoch(self, fit: tr.FitState) -> None:
        fit.trainer.evaluate(batches(2))


@MODES
def test_meetings_of_a_callback_within_an_epoch_cannot_be_resumed(job: Job, mode: str) -> None:
    """Others might wait at one for ever, or be told the figures of an earlier one."""

    def train(cluster: Cluster, kill_at: int = 0) -> None:
        callbacks = [Scoring(within=True)]
        make_trainer(cluster, Model(kill_at), mode, callbacks=callbacks).fit(batches(), epochs=2)

    die(job, lambda cluster: train(cluster, 12))  # in the second epoch, after two evaluations
    cluster = job.join(0, 1)
    with pytest.raises(BadRequest, match="expected callbacks whose `step` does not meet"):
        train(cluster)
    cluster.abandon()


@MODES
@pytest.mark.parametrize(("within", "kill_at"), [(True, 2), (True, 9), (False, 12)])
def test_other_meetings_of_a_callback_can(job: Job, mode: str, within: bool, kill_at: int) -> None:
    """Of epochs that are over, at their ends, or not held yet."""

    def train(cluster: Cluster, kill_at: int = 0) -> None:
        callbacks = [Scoring(within=within)]
        make_trainer(cluster, Model(kill_at), mode, callbacks=callbacks).fit(batches(), epochs=2)

    die(job, lambda cluster: train(cluster, kill_at))
    with job.join(0, 1) as cluster:
        train(cluster)
        assert counts(cluster) == times(2, batches())


def test_a_random_order_cannot_be_resumed(job: Job) -> None:
    def train(cluster: Cluster, kill_at: int = 0) -> None:
        loader = torch.utils.data.DataLoader(batches(), batch_size=None, shuffle=True)
        make_trainer(cluster, Model(kill_at)).fit(loader)

    die(job, lambda cluster: train(cluster, 4))
    cluster = job.join(0, 1)
    with pytest.raises(BadRequest, match=r"restarted finds again, found a random one"):
        train(cluster)
    cluster.abandon()


def test_calls_that_are_over_give_what_they_gave_and_write_nothing(
    job: Job, tmp_path: Path
) -> None:
    def run(cluster: Cluster, kill_at: int = 0) -> list[dict[str, float]]:
        trainer = make_trainer(cluster, Model(kill_at), metrics=[tr.metrics.AUC()])
        actual = []
        for number in range(3):
            actual.append(trainer.fit(batches()))
            trainer.save(tmp_path / f"{number}")
            actual.append(trainer.evaluate(batches(3)))
            for figures in actual[-2:]:
                del figures["examples_per_s"]
            figures_of_all.append(actual[-2:])
        return actual

    figures_of_all: list[Any] = []
    die(job, lambda cluster: run(cluster, 20))
    predecessors, figures_of_all = [figures for pair in figures_of_all for figures in pair], []
    with job.join(0, 1) as cluster:
        actual = run(cluster)
        assert counts(cluster) == times(3, batches())
    assert [repr(figures) for figures in actual[:4]] == [repr(f) for f in predecessors]
    assert actual[4]["examples"] == 5 * BATCH


def test_figures_that_are_not_kept_are_nan(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(cluster: Cluster, kill_at: int = 0) -> dict[str, float]:
        trainer = make_trainer(cluster, Model(kill_at), metrics=[tr.metrics.AUC()])
        first = trainer.fit(batches())
        trainer.fit(batches())
        return first

    monkeypatch.setattr(meetings, "KEPT_BYTES_MAX", 1)
    monkeypatch.setattr(meetings, "KEPT_MIN", 0)
    die(job, lambda cluster: run(cluster, 12))
    with job.join(0, 1) as cluster:
        first = run(cluster)
        assert counts(cluster) == times(2, batches())
    assert np.isnan(first["loss"])
    assert "train: its figures are NaN: coord.gather" in caplog.text


def test_a_worker_killed_after_the_end_has_nothing_left_to_do(job: Job) -> None:
    def train(cluster: Cluster) -> None:
        trainer = make_trainer(cluster, Model())
        trainer.fit(batches())
        trainer.evaluate(batches(3))

    def cluster_of(worker: int) -> Cluster:
        return job.join(worker, 2)

    one, two = in_threads([lambda w=w: cluster_of(w) for w in (0, 1)])
    in_threads([lambda c=c: train(c) for c in (one, two)])
    two.close()
    with cluster_of(1) as successor:
        train(successor)
        assert counts(one) == times(1, batches())
    one.close()


def test_a_dump_cannot_be_resumed(job: Job, tmp_path: Path) -> None:
    schema = tr.data.Schema([tr.data.InsId("id"), tr.data.Sparse("a"), tr.data.Label()])
    columns = {
        "id": [str(number) for number in range(32)],
        "a": np.arange(32) % NUM_KEYS,
        "label": np.ones(32, np.float32),
    }
    data = tr.data.ArrayDataset(columns, schema=schema, batch_size=BATCH)

    def train(cluster: Cluster, kill_at: int = 0) -> None:
        dump = tr.Dump(path=tmp_path / "dump", fields=["output"])
        make_trainer(cluster, Model(kill_at)).fit(data, dump=dump)

    die(job, lambda cluster: train(cluster, 4))
    cluster = job.join(0, 1)
    with pytest.raises(BadRequest, match=r"Dump: .* predecessor's part is lost"):
        train(cluster)
    cluster.abandon()


def test_buffers_start_over_with_a_log_line(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    def train(cluster: Cluster, kill_at: int = 0) -> None:
        model = Model(kill_at)
        model.register_buffer("seen", torch.zeros(1))
        make_trainer(cluster, model).fit(batches())

    die(job, lambda cluster: train(cluster, 4))
    with job.join(0, 1) as cluster:
        train(cluster)
    assert "worker 0 was restarted: the buffers seen of its model start over" in caplog.text


def test_passes_of_a_stream_are_begun_together(job: Job) -> None:
    def train(cluster: Cluster, kill_at: int = 0) -> None:
        passes = [tr.Pass(day="20260101", number=1, open=batches)]
        list(tr.train_passes(make_trainer(cluster, Model(kill_at)), passes))

    die(job, lambda cluster: train(cluster, 4))
    cluster = job.join(0, 1)
    with pytest.raises(BadRequest, match="expected all workers to begin together"):
        train(cluster)
    cluster.abandon()


def test_a_loaded_checkpoint_may_be_deleted(job: Job, tmp_path: Path) -> None:
    def train(cluster: Cluster, kill_at: int = 0) -> None:
        checkpoints = tr.Checkpoints(tmp_path / "c", every_steps=2, keep=1)
        trainer = make_trainer(cluster, Model(kill_at), "sync")
        trainer.fit(batches(), epochs=2, checkpoints=checkpoints, resume=True)

    die(job, lambda cluster: train(cluster, 6))
    with Job(2) as other:
        die(other, lambda cluster: train(cluster, 5))
        with other.join(0, 1) as cluster:
            train(cluster)
            assert counts(cluster) == times(2, batches())
            assert session_of(cluster).row_source().num_steps == 16


# ---- workers among others ----


def test_joining_a_finished_global_shuffle_is_refused(job: Job, tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    data.write_text("".join(f"1 {i % NUM_KEYS} 1 1.0\n" for i in range(64)))
    schema = tr.data.multislot([tr.data.Sparse("a"), tr.data.Label()])

    def shuffle(cluster: Cluster) -> None:
        dataset = tr.data.InMemoryDataset(
            str(data), schema=schema, batch_size=BATCH, cluster=cluster
        )
        dataset.load_into_memory()
        dataset.global_shuffle()

    one, two = in_threads([lambda w=w: job.join(w, 2) for w in (0, 1)])
    in_threads([lambda c=c: shuffle(c) for c in (one, two)])
    two.abandon()
    successor = job.join(1, 2)
    with pytest.raises(
        BadRequest, match="global_shuffle: expected examples that the other workers"
    ):
        shuffle(successor)
    for cluster in (one, successor):
        cluster.abandon()


def test_workers_are_notified_of_a_silent_worker_and_of_its_return(job: Job) -> None:
    answers: queue.Queue[str] = queue.Queue()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            answers.put(record.getMessage())

    def wait_for_log_line(text: str) -> None:
        while text not in answers.get(timeout=60):
            pass

    logger, listener = logging.getLogger("trireme"), Listener()
    logger.setLevel(logging.INFO)
    logger.addHandler(listener)
    try:
        one, two = in_threads([lambda w=w: job.join(w, 2, timeout_s=2) for w in (0, 1)])
        two.abandon()
        wait_for_log_line("workers [1] have not come yet, or are silent: calls that need them wait")
        successor = job.join(1, 2, timeout_s=2)
        wait_for_log_line("workers [1] are no longer silent")
    finally:
        logger.removeHandler(listener)
        logger.setLevel(logging.NOTSET)
    for cluster in (one, successor):
        cluster.abandon()
