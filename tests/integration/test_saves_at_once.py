"""Two saves at once, and a load beside a save: what is published is one model, and what a row has
gained is exported once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.test_checkpoint_modes import Writer, content, save, some, statistics
from tests.jobs import Job, in_threads
from trireme.checkpoint.server_side import save as server_save
from trireme.checkpoint.worker_side import save as worker_save
from trireme.checkpoint.worker_side.load import load_checkpoint
from trireme.errors import BadRequest, Unavailable


def once(action: Callable[[], Any]) -> Callable[..., None]:
    """Calls the action when it is called first."""
    left = [action]

    def call(*_: Any) -> None:
        if left:
            left.pop()()

    return call


def gains(job: Job) -> np.ndarray:
    """What each row of the scored table has gained since it was exported."""
    return statistics(job)["delta_score"]


def test_a_save_within_another_leaves_no_row_settled_twice(tmp_path: Path) -> None:
    with Job(2) as job, job.join(0, 1) as cluster:
        writer = Writer(job, cluster)
        writer.update(some(seed=0, num=300), shows=9)
        within = once(lambda: save(cluster, tmp_path / "within", "base"))
        save(cluster, tmp_path / "around", "base", watch=within)
        assert (gains(job) == 0).all()
        writer.update(some(seed=0, num=300), shows=9)
        assert save(cluster, tmp_path / "delta", "delta").tables["scored"].num_rows == 300
        assert (gains(job) == 0).all()


def test_saves_that_overlap_leave_no_row_settled_twice(tmp_path: Path) -> None:
    with Job(2) as job, job.join(0, 1) as cluster:
        Writer(job, cluster).update(some(seed=0, num=300), shows=9)
        second_has_begun, first_is_over = threading.Event(), threading.Event()

        def first() -> None:
            watch = once(lambda: second_has_begun.wait(60))
            save(cluster, tmp_path / "first", "base", watch=watch)
            first_is_over.set()

        def let_first_end() -> None:
            second_has_begun.set()
            first_is_over.wait(60)

        def second() -> None:
            save(cluster, tmp_path / "second", "base", watch=once(let_first_end))

        in_threads([first, second])
        assert (gains(job) == 0).all()


def test_a_load_before_a_save_is_settled_leaves_the_loaded_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Job(2) as job, job.join(0, 1) as cluster:
        writer = Writer(job, cluster)
        writer.update(some(seed=0, num=300), shows=9)
        save(cluster, tmp_path / "full")
        before = content(job.servers)
        writer.update(some(seed=0, num=300), shows=2)
        load = once(lambda: load_checkpoint(cluster.client, tmp_path / "full"))
        finish = worker_save._finish
        monkeypatch.setattr(worker_save, "_finish", lambda *args: (load(), finish(*args)))
        save(cluster, tmp_path / "base", "base")
        after = content(job.servers)
        assert {place: rows for place, (_, rows, _) in after.items()} == {
            place: rows for place, (_, rows, _) in before.items()
        }


def test_no_save_has_rows_of_two_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(1) as job, job.join(0, 1) as cluster:
        writer = Writer(job, cluster)
        writer.update(some(seed=0, num=50))
        save(cluster, tmp_path / "old")
        writer.update(some(seed=1, num=400))
        load = once(lambda: load_checkpoint(cluster.client, tmp_path / "old"))
        parallel = server_save.in_parallel

        def with_a_load(tasks: Any, progress: Any) -> None:
            for task in tasks:
                parallel([task], progress)
                if len(list(tmp_path.glob(".*/tables/0/*"))):  # the first table is written
                    load()

        monkeypatch.setattr(server_save, "in_parallel", with_a_load)
        with pytest.raises(BadRequest, match="expected one model, found that another"):
            save(cluster, tmp_path / "mixed")
        assert not (tmp_path / "mixed").exists()
        save(cluster, tmp_path / "new")


def test_a_server_gives_up_a_save_that_its_worker_asks_for_no_more(tmp_path: Path) -> None:
    with Job(1) as job, job.join(0, 1) as cluster:
        Writer(job, cluster).update(some(seed=0, num=300))
        (tmp_path / "draft").mkdir()
        place = {"path": str(tmp_path / "draft"), "options": {}, "prefix": "", "mode": "full"}
        plan = {"version": 1, "since": 0, "removed_since": 0, "time": 0, "budgets": {}}
        call = cluster.client.servers.everywhere
        start = {"job": "a", "action": "save", "patience_s": 0.0, **place, **plan}
        call("checkpoint.start", start)

        def ask_until_it_ends() -> None:
            while call("checkpoint.status", {"job": "a"})[0].body["running"]:
                pass

        with pytest.raises(Unavailable, match="was given up, unasked for 0 s"):
            ask_until_it_ends()
