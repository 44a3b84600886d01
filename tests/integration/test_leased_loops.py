"""Leased streams in loops of all kinds, and what is refused with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.test_predecessor import (
    STRATEGIES,
    Killed,
    Model,
    batches,
    counts,
    make_optimizer,
    make_trainer,
    step,
    times,
)
from tests.jobs import TIMEOUT_S, Job, in_threads
from trireme.errors import (
    BadRequest,
    DeadlineExceeded,
    NotAdmitted,
    ResourceExhausted,
    Stopped,
    TriremeError,
    Unavailable,
)
from trireme.fleet import util
from trireme.job.cluster import Cluster
from trireme.job.connecting import connect
from trireme.job.embedded import embedded
from trireme.worker import passes

NUM_STREAMS = 3


@pytest.fixture
def job() -> Iterator[Job]:
    with Job(2) as made:
        yield made


def join(job: Job, worker: int = 0, num_workers: int = 1, **place: Any) -> Cluster:
    place = place or {"worker": worker, "num_workers": num_workers, "streams": NUM_STREAMS}
    return connect(job.endpoints, threads=1, timeout_s=TIMEOUT_S, **place)


def prefetch_twice(cluster: Cluster, kill_at: int = 0) -> int:
    """Returns how many steps this worker has made."""
    model = Model(kill_at)
    optimizer = make_optimizer(cluster, model)
    for _ in range(2):
        for batch in tr.prefetch(batches(), model, cluster=cluster):
            step(model, batch, optimizer)
    cluster.client.coordinator.gather({}, [])
    return optimizer.num_steps


def fit_twice(cluster: Cluster, kill_at: int = 0) -> int:
    trainer = make_trainer(cluster, Model(kill_at))
    trainer.fit(batches(), epochs=2)
    return trainer.optimizer.num_steps


@pytest.mark.parametrize("train", [prefetch_twice, fit_twice])
def test_two_workers_train_on_all_streams_of_a_list_once(
    job: Job, train: Callable[[Cluster], int]
) -> None:
    def work(worker: int) -> tuple[int, dict[int, int]]:
        with join(job, worker, 2) as cluster:
            return train(cluster), counts(cluster)

    actual = in_threads([lambda w=w: work(w) for w in (0, 1)])
    assert sum(num_steps for num_steps, _ in actual) == 16
    assert [count for _, count in actual] == [times(2, batches())] * 2


@pytest.mark.parametrize("train", [prefetch_twice, fit_twice])
@pytest.mark.parametrize("kill_at", [1, 4])
def test_a_restarted_process_continues_with_any_stream(
    job: Job, train: Callable[..., int], kill_at: int
) -> None:
    def work() -> dict[int, int]:
        with join(job, 0, 2) as cluster:
            train(cluster)
            return counts(cluster)

    def die_and_come_again() -> dict[int, int]:
        cluster = join(job, 1, 2)
        try:
            train(cluster, kill_at)
        except Killed:
            cluster.abandon()
            cluster = join(job, 1, 2)
            train(cluster)
        actual = counts(cluster)
        cluster.close()
        return actual

    expected = times(2, batches())
    assert in_threads([work, die_and_come_again]) == [expected, expected]


def test_a_loop_that_adds_up_gradients_continues_a_stream_after_its_last_step(job: Job) -> None:
    def train(cluster: Cluster, kill_at: int = 0) -> None:
        model = Model(kill_at)
        optimizer = make_optimizer(cluster, model)
        for number, batch in enumerate(tr.prefetch(data, model, cluster=cluster)):
            nn.functional.mse_loss(model(batch), batch["label"]).backward()
            if number % 2:
                optimizer.step()

    data = [{"a": torch.tensor([n]), "label": torch.ones(1)} for n in range(8 * NUM_STREAMS)]
    cluster = join(job)
    with pytest.raises(Killed):
        train(cluster, 6)
    cluster.abandon()
    with join(job) as cluster:
        train(cluster)
        assert counts(cluster) == times(1, data)


def test_a_single_process_trains_on_its_streams_one_after_another() -> None:
    with embedded(streams=NUM_STREAMS, threads=1) as cluster:
        assert fit_twice(cluster) == 16
        assert counts(cluster) == times(2, batches())


def test_a_run_resumes_from_a_checkpoint_within_each_stream(tmp_path: Path) -> None:
    """With as many streams, whatever the number of workers."""
    checkpoints = tr.Checkpoints(tmp_path, every_steps=3)
    with embedded(streams=NUM_STREAMS, threads=1) as cluster:
        with pytest.raises(Killed):
            make_trainer(cluster, Model(6)).fit(batches(), epochs=2, checkpoints=checkpoints)
        cluster.abandon()
    with Job(1) as job:

        def work(worker: int) -> dict[int, int]:
            with join(job, worker, 2) as cluster:
                trainer = make_trainer(cluster, Model())
                trainer.fit(batches(), epochs=2, checkpoints=checkpoints, resume=True)
                return counts(cluster)

        assert in_threads([lambda w=w: work(w) for w in (0, 1)]) == [times(2, batches())] * 2
    with embedded(streams=2, threads=1) as cluster:
        trainer = make_trainer(cluster, Model())
        with pytest.raises(BadRequest, match=r"expected 3 workers, as in .*, found 2"):
            trainer.resume(tmp_path)


def fail_first(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, errors: list[TriremeError]
) -> None:
    """Questions for a stream end with these errors, one after the other."""
    coordinate = cluster.client.coordinator.call

    def ask(method: str, *args: Any, **options: Any) -> dict[str, Any]:
        if method == "coord.take" and errors:
            raise errors.pop(0)
        return coordinate(method, *args, **options)

    monkeypatch.setattr(cluster.client.coordinator, "call", ask)


def test_a_worker_that_waits_for_a_stream_retries_when_the_coordinator_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with embedded(streams=NUM_STREAMS, threads=1) as cluster:
        errors = [Unavailable("gone"), ResourceExhausted("full"), DeadlineExceeded("late")]
        fail_first(cluster, monkeypatch, errors)
        assert fit_twice(cluster) == 16
        assert not errors
        assert counts(cluster) == times(2, batches())


@pytest.mark.parametrize("error", [Unavailable("gone"), ResourceExhausted("full")])
def test_a_coordinator_that_does_not_return_is_an_error(
    monkeypatch: pytest.MonkeyPatch, error: TriremeError
) -> None:
    with embedded(streams=NUM_STREAMS, threads=1) as cluster:
        fail_first(cluster, monkeypatch, [NotAdmitted("not listed"), error])
        with pytest.raises(NotAdmitted):
            passes.take(cluster.client, None, lambda: False)
        cluster.client.timeout_s = 0.0
        with pytest.raises(type(error)):
            passes.take(cluster.client, None, lambda: False)


def test_a_loop_that_is_left_early_returns_its_stream(job: Job) -> None:
    """While its worker continues with other work."""
    with join(job) as cluster, join(job, late=True) as other:
        model = Model(0)
        optimizer = make_optimizer(cluster, model)
        for number, batch in enumerate(tr.prefetch(batches(), model, cluster=cluster)):
            step(model, batch, optimizer)
            if number == 1:
                break
        model = Model(0)
        optimizer = make_optimizer(other, model)
        for batch in tr.prefetch(batches(), model, cluster=other):
            step(model, batch, optimizer)
        assert counts(other) == times(1, batches())


@pytest.mark.parametrize(
    ("mode", "place"), [("async", {"streams": NUM_STREAMS}), ("async", {}), ("sync", {})]
)
def test_a_loop_that_is_left_early_leaves_current_weights(mode: str, place: dict[str, int]) -> None:
    with embedded(threads=1, **place) as cluster:
        model = Model(0)
        optimizer = make_optimizer(cluster, model, mode)
        for number, batch in enumerate(tr.prefetch(batches(), model, cluster=cluster)):
            step(model, batch, optimizer)
            if number == 2:
                break
        after = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.refresh()
        assert all(map(torch.equal, after, model.parameters()))


class Asking(Model):
    """Its worker is asked to stop in the forward pass of the n-th batch."""

    def __init__(self, cluster: Cluster, ask_at: int) -> None:
        super().__init__()
        self._asked, self._to_go = cluster.stop_request, ask_at

    def forward(self, batch: Any) -> torch.Tensor:
        self._to_go -= self.training
        if self._to_go == 0:
            self._asked.reason = "a test asks to stop"
        return super().forward(batch)


@pytest.mark.parametrize("ask_at", [2, 8])
def test_a_stopped_run_resumes_from_its_checkpoint(tmp_path: Path, ask_at: int) -> None:
    """Amid a stream, and at the end of the last one."""
    checkpoints = tr.Checkpoints(tmp_path, every_steps=100)
    with embedded(streams=NUM_STREAMS, threads=1) as cluster:
        trainer = make_trainer(cluster, Asking(cluster, ask_at))
        with pytest.raises(Stopped):
            trainer.fit(batches(), epochs=2, checkpoints=checkpoints)
    with embedded(streams=NUM_STREAMS, threads=1) as cluster:
        trainer = make_trainer(cluster, Model())
        trainer.fit(batches(), epochs=2, checkpoints=checkpoints, resume=True)
        assert counts(cluster) == times(2, batches())


def test_a_worker_that_joins_after_the_end_trains_nothing(job: Job) -> None:
    with join(job) as cluster:
        trainer = make_trainer(cluster, Model())
        trained = trainer.fit(batches())
        with join(job, late=True) as late:
            other = make_trainer(late, Model())
            actual = other.fit(batches())
            assert late.worker == 1
            assert actual["loss"] == trained["loss"]
            trainer.evaluate(batches())
            assert other.evaluate(batches())["examples"] == trained["examples"]


def test_a_late_worker_counts_its_steps_from_those_of_the_others(job: Job) -> None:
    with join(job) as cluster:
        trainer = make_trainer(cluster, Model())
        trainer.fit(batches())
        late = join(job, late=True)
        other = make_trainer(late, Model())
        other.fit(batches())
        assert [trainer.optimizer.num_steps, other.optimizer.num_steps] == [8, 8]
        in_threads([lambda t=t: t.fit(batches()) for t in (trainer, other)])
        assert trainer.optimizer.num_steps + other.optimizer.num_steps >= 8 + 8 + 8
        assert counts(cluster) == times(2, batches())
        late.close()


class Own:
    """Examples of each worker's own."""

    own_files = True

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Iterator[Any]:
        return iter(batches())


DATA: dict[str, tuple[Callable[[], Any], str]] = {
    "files of each worker": (Own, "found a Own of files of each worker's own"),
    "an iterator": (lambda: iter(batches()), "found a list_iterator"),
    "a loader": (
        lambda: torch.utils.data.DataLoader(batches(), batch_size=None),
        "found a DataLoader",
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_data_whose_streams_not_every_worker_can_read_is_refused(name: str) -> None:
    make, message = DATA[name]
    with embedded(streams=NUM_STREAMS, threads=1) as cluster:
        trainer = make_trainer(cluster, Model())
        with pytest.raises(BadRequest, match=message):
            trainer.fit(make())


@pytest.mark.parametrize("mode", ["sync", "bounded", "geo", "hybrid"])
def test_other_modes_are_refused_and_say_why(mode: str) -> None:
    assert mode in STRATEGIES
    message = f"expected mode 'async' .*, found '{mode}', in which"
    with (
        embedded(streams=NUM_STREAMS, threads=1) as cluster,
        pytest.raises(BadRequest, match=message),
    ):
        make_trainer(cluster, Model(), mode)


def test_what_needs_a_stream_or_a_share_of_each_worker_is_refused(tmp_path: Path) -> None:
    with embedded(streams=NUM_STREAMS, threads=1) as cluster:
        model = Model()
        optimizer = make_optimizer(cluster, model)
        [batch] = batches(1)
        nn.functional.mse_loss(model(batch), batch["label"]).backward()
        with pytest.raises(BadRequest, match=r"\.step: expected a loop over streams that workers"):
            optimizer.step()
        with pytest.raises(BadRequest, match=r"\.begin_pass: expected a loop over streams"):
            optimizer.begin_pass()
        trainer = make_trainer(cluster, Model())
        with pytest.raises(BadRequest, match="expected workers that each train on one stream"):
            trainer.fit(batches(), dump=tr.Dump(path=tmp_path, fields=["a"]))
        with pytest.raises(BadRequest, match="train_passes: expected a job in which each worker"):
            next(tr.train_passes(trainer, []))
        with pytest.raises(BadRequest, match="get_file_shard: expected a job in which each worker"):
            util.get_file_shard(["a"])
