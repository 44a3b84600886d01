"""Calls by which servers write an export are repeated when a server was killed in one, or when a
connection was lost: each row is in the files once.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import trireme as tr
from tests.integration.test_interchange import batches, make_trainer
from trireme.errors import BadRequest, DeadlineExceeded
from trireme.interchange.server_side.exporting import ExportHandlers
from trireme.job.embedded import embedded
from trireme.rpc import Handler, Reply, Request
from trireme.server.frozen_export import frozen_export_handlers
from trireme.server.repeated_calls import repeatable
from trireme.server.state import ServerState

NUM_SHARDS = 3
FLEET = {
    "accessor": "CtrCommonAccessor",
    "betas": [0.0, 0.0],
    "time": 0,
    "shard_num": NUM_SHARDS,
    "gzip": False,
}
FROZEN = {
    "tables": ["t"],
    "classes": [0],
    "dtype": "float32",
    "version": 1,
    "since": 0,
    "forget": 0,
    "time": 0,
}


def request(method: str, body: dict[str, Any], *, timeout_s: float = 60.0) -> Request:
    return Request(0, method, body, [], "", "", "", time.monotonic() + timeout_s)


def handlers(state: ServerState, root: Path) -> dict[str, Handler]:
    """Those of a server that has just been started."""
    return {**ExportHandlers(state, root).handlers(), **frozen_export_handlers(state, root)}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def damage(folder: Path) -> None:
    """Cut the files off, as a kill may."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture
def trainer():
    with embedded(threads=2) as cluster:
        trainer = make_trainer(cluster)
        trainer.fit(batches(4))
        yield trainer


@pytest.fixture
def state(trainer):
    return trainer.cluster.host.state


def test_a_restarted_server_writes_fleets_text_anew(tmp_path, trainer, state):
    tr.interchange.export_fleet(trainer, tmp_path / "expected", shard_num=NUM_SHARDS)
    body = {**FLEET, "table": "t", "folder": str(tmp_path / "000")}
    for method in ("export.fleet", "export.join"):
        handlers(state, tmp_path)[method](request(method, body))
        if method == "export.fleet":
            damage(tmp_path / "000")
        else:  # it was killed within the next file, whose parts are there still
            (tmp_path / "000" / ".part-000-00001").write_bytes(b"half a li")
            (tmp_path / "000" / "part-000-00001").rename(tmp_path / "000" / "1.0")
        handlers(state, tmp_path)[method](request(method, body))
    assert contents(tmp_path / "000") == contents(tmp_path / "expected" / "000")


@pytest.mark.parametrize("method", ["export.parquet", "export.save"])
def test_a_restarted_server_replaces_what_it_had_written(tmp_path, state, method):
    folder = tmp_path / "t"
    body = {"table": "t", "folder": str(folder), "state": True, "storage_options": {}}
    if method == "export.save":
        folder.mkdir()
        body = {**FROZEN, "path": str(folder)}
    handlers(state, tmp_path)[method](request(method, body))
    expected = contents(folder)
    damage(folder)
    if method == "export.parquet":
        (folder / "part-000-00001.parquet").write_bytes(b"a file that is needed no more")
    handlers(state, tmp_path)[method](request(method, body))
    assert contents(folder) == expected


@pytest.mark.parametrize("method", ["export.parquet", "export.fleet"])
def test_a_server_does_not_bring_back_the_folder_of_an_export_that_was_given_up(
    tmp_path, state, method
):
    body = {**FLEET, "table": "t", "folder": str(tmp_path / ".x.partial" / "000")}
    body |= {"state": False, "storage_options": {}} if method == "export.parquet" else {}
    with pytest.raises(BadRequest, match="No such file"):
        handlers(state, tmp_path)[method](request(method, body))
    assert list(tmp_path.iterdir()) == []


def test_a_repeated_call_waits_for_the_first_and_has_its_answer():
    started, end = threading.Event(), threading.Event()
    calls: list[dict[str, Any]] = []

    def write(one: Request) -> Reply:
        calls.append(one.body)
        started.set()
        assert end.wait(60)
        return Reply({"rows": len(calls)})

    handler, body = repeatable(write), {"folder": "000"}
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(handler, request("m", dict(body)))
        assert started.wait(60)
        with pytest.raises(DeadlineExceeded, match="m: expected the one before to end"):
            handler(request("m", dict(body), timeout_s=0.01))
        second = threads.submit(handler, request("m", dict(body)))
        end.set()
        assert first.result(60) is second.result(60)
    other = handler(request("m", {"folder": "001"}))
    assert isinstance(other, Reply)
    assert other.body == {"rows": 2}
