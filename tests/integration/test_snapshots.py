"""Snapshots and saves beside what happens while they are written: a kill or a failure, keys that
the table forgets it has removed.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.property.test_recovery import NUM_KEYS, Requests, Served
from trireme import _core
from trireme.checkpoint.format.row_writer import RowWriter
from trireme.checkpoint.server_side.operations import OperationProgress
from trireme.checkpoint.server_side.rows_to_save import RowsToSave
from trireme.checkpoint.server_side.save import SavePlan, save_shard
from trireme.errors import BadRequest, ResourceExhausted
from trireme.rows.core_table import make_core_table
from trireme.server.log import durable_journal
from trireme.server.log.replay import state_records
from trireme.server.log.segment import Record
from trireme.server.log.state_folder import StateFolder
from trireme.server.prepared_import import PreparedImport, filled_buckets
from trireme.server.server_stats import sync_waits
from trireme.server.state import ServerState
from trireme.storage.local import LocalStorage

SNAPSHOT_COLUMNS = _core.snapshot_columns
KEYS = np.arange(NUM_KEYS, dtype=np.uint64)
LAST_FORGOTTEN = 5


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    """It has served some pushes."""
    served = Served(tmp_path / "state")
    requests = Requests(Random(1), "async")
    for request in [*requests.first(), *[requests.push(0, 0) for _ in range(30)]]:
        served.ask(*request)
    yield served
    served.close()


def remove_in_each_version(server: Served) -> None:
    for version in range(2, LAST_FORGOTTEN + 3):
        server.state.raise_version(version)
        server.state.tables["plain"].rows.erase(
            KEYS[version * 10 : version * 10 + 10].copy(), _core.Pool(1)
        )


def forget_at_first_read(table: _core.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*args: Any) -> _core.BucketColumns:
        columns = SNAPSHOT_COLUMNS(*args)
        table.forget_removed(LAST_FORGOTTEN)
        return columns

    monkeypatch.setattr(_core, "snapshot_columns", read)


def prepare_import(state: ServerState) -> None:
    """All rows of a table come in again, once that is decided."""
    table = state.tables["plain"]
    rows = make_core_table(table.schema)
    for bucket, content in filled_buckets(table.rows):
        rows.apply(bucket, content.keys, content.classes, content.rows, content.keys[:0])
    state.prepare(PreparedImport("an import", True, {"plain": rows}))


def prepared_content(state: ServerState) -> tuple[bool, dict[str, list[bytes]]] | None:
    """Whether it is whole, and its rows."""
    if not isinstance(state.prepared, PreparedImport):
        return None
    rows = {
        name: [content.rows.tobytes() for _, content in filled_buckets(rows)]
        for name, rows in state.prepared.rows.items()
    }
    return state.prepared.is_whole, rows


def killed_beginning_a_segment(server: Served, folder: Path, num_records: int | None) -> Served:
    """What comes up if it had been killed when so many records of a new segment were written."""

    def some(*args: Any) -> list[Record]:
        return list(state_records(*args))[:num_records]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(durable_journal, "state_records", some)
        patched.setattr(durable_journal, "write_snapshot", fail)
        with pytest.raises(OSError, match="No space left"):
            server.snapshot()
    assert server.folder is not None
    shutil.copytree(server.folder, folder)
    return Served(folder)


def fail(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def removed_since(table: _core.Table, version: int) -> set[int]:
    return {key for b in range(4096) for key in table.snapshot(b, version).removed.tolist()}


def test_a_snapshot_that_failed_fails_no_other(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full_disk:
        full_disk.setattr(RowWriter, "write", fail)
        with pytest.raises(ResourceExhausted, match="No space left"):
            server.snapshot()
    server.snapshot()
    before = server.content()
    server.restart()
    assert server.content() == before


@pytest.mark.parametrize("num_records", [0, 1, 2, 3, 40, -1, None])
def test_a_server_killed_while_it_begins_a_segment_keeps_what_it_holds(
    tmp_path: Path, num_records: int | None
) -> None:
    """Staged pushes of a step, and an import that is not decided."""
    server = Served(tmp_path / "state")
    requests = Requests(Random(2), "sync")
    for request in [*requests.first(), requests.push(0, 1), requests.push(1, 1)]:
        server.ask(*request)
    for stream in (0, 1):
        server.state.staging.declare(stream, 1)
    server.state.apply_steps()
    server.ask(*requests.push(0, 2))
    prepare_import(server.state)
    expected = server.content(), prepared_content(server.state), sync_waits(server.state)
    assert expected[1] is not None
    assert expected[1][1]["plain"]
    successor = killed_beginning_a_segment(server, tmp_path / "copy", num_records)
    state = successor.state
    assert (successor.content(), prepared_content(state), sync_waits(state)) == expected
    server.close()
    successor.close()


def test_what_follows_a_segment_that_could_not_be_noted_is_refused(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it were deleted, no start would miss it."""

    def refuse(*_: Any) -> None:
        raise ResourceExhausted("log: cannot write the note")

    monkeypatch.setattr(StateFolder, "note", refuse)
    with pytest.raises(ResourceExhausted, match="cannot write the note"):
        server.snapshot()
    with pytest.raises(ResourceExhausted, match="cannot write the note"):
        server.state.raise_version(99)


def test_a_recovered_row_has_the_version_that_its_push_stamped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save raises the version while a snapshot is written, between two pushes that it has in some
    of its buckets only.
    """
    server, requests = Served(tmp_path / "state"), Requests(Random(3), "async")
    for request in [*requests.first(), requests.push(0, 0)]:
        server.ask(*request)
    save = threading.Thread(target=server.state.raise_version, args=[7])

    is_first, lock = True, threading.Lock()

    def read(*args: Any) -> _core.BucketColumns:
        nonlocal is_first
        columns = SNAPSHOT_COLUMNS(*args)
        with lock:
            if is_first:
                is_first = False
                for _ in range(10):
                    server.ask(*requests.push(0, 0))
                save.start()
                save.join(0.5)
                server.ask(*requests.push(0, 0))
        return columns

    server.ask(*requests.push(0, 0))
    monkeypatch.setattr(_core, "snapshot_columns", read)
    server.snapshot()
    save.join()
    server.ask(*requests.push(0, 0))
    expected = server.content()
    server.restart()
    assert server.content() == expected
    server.close()


@pytest.mark.parametrize("when", ["before", "while"])
def test_what_a_table_has_forgotten_stays_forgotten_in_a_recovery(
    server: Served, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    table = server.state.tables["plain"].rows
    remove_in_each_version(server)
    if when == "before":
        table.forget_removed(LAST_FORGOTTEN)
    else:
        forget_at_first_read(table, monkeypatch)
    server.snapshot()
    expected = removed_since(table, LAST_FORGOTTEN)
    assert expected
    server.restart()
    table = server.state.tables["plain"].rows
    assert removed_since(table, LAST_FORGOTTEN) >= expected
    with pytest.raises(BadRequest, match=f"expected since >= {LAST_FORGOTTEN}, found 4: the keys"):
        table.snapshot(0, LAST_FORGOTTEN - 1)


@pytest.mark.parametrize(
    ("since", "is_known"), [(LAST_FORGOTTEN - 1, False), (LAST_FORGOTTEN, True)]
)
def test_a_save_of_all_rows_says_whether_deltas_of_earlier_saves_may_follow(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, since: int, is_known: bool
) -> None:
    table = server.state.tables["plain"].rows
    remove_in_each_version(server)
    forget_at_first_read(table, monkeypatch)
    plan = SavePlan(table.version, 0, since, "", RowsToSave("full", 0, {}))
    (tmp_path / "full").mkdir()
    storage = LocalStorage(tmp_path / "full")
    share = save_shard(server.state, storage, plan, OperationProgress())
    assert share["removed_known"] is is_known
