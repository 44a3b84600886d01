"""Meetings at the end of what worker 0 does for all."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.jobs import Job
from trireme.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from trireme.job.cluster import Cluster
from trireme.train.first_worker import let_first_worker

TIMEOUT_S = 1.0


def test_a_worker_that_dies_in_a_save_is_named_within_the_timeout_of_the_job() -> None:
    def work(cluster: Cluster) -> None:
        if cluster.worker == 1:
            cluster.abandon()
            return
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"\(end of save\) waits for workers \[1\]"):
            let_first_worker(cluster, "save", dict)
        assert time.monotonic() - started < 20 * TIMEOUT_S

    with Job(1) as job:
        job.run(2, work, TIMEOUT_S)


def test_worker_0_may_take_longer_than_the_timeout() -> None:
    def act() -> dict[str, int]:
        threading.Event().wait(2.5 * TIMEOUT_S)
        return {"saved": 7}

    with Job(1) as job:
        results = job.run(2, lambda cluster: let_first_worker(cluster, "save", act), TIMEOUT_S)
    assert results == [{"saved": 7}] * 2


def test_the_error_of_worker_0_is_raised_though_the_others_cannot_hear_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def act() -> dict[str, Any]:
        raise ResourceExhausted("the disk is full")

    def unheard(*_: Any, **__: Any) -> Any:
        raise Unavailable("not reached")

    with Job(1) as job, job.join(0, 1) as cluster:
        monkeypatch.setattr(cluster.client.coordinator, "gather", unheard)
        with pytest.raises(ResourceExhausted, match="the disk is full"):
            let_first_worker(cluster, "save", act)
        monkeypatch.undo()
