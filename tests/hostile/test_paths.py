"""No path in a message leads outside a server's root folder."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trireme as tr
from tests.jobs import InProcessServer
from trireme.errors import BadRequest, TriremeError
from trireme.job.cluster import Cluster
from trireme.job.connecting import connect
from trireme.table import RowClassId
from trireme.worker.client import WorkerClient

SECRET = "a line that nobody outside may read"
DIM = 4


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the server's root, with a file that must stay as it is and unread."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_text(f"{SECRET}\n")
    return folder


@pytest.fixture
def root(tmp_path: Path, outside: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    return folder


@pytest.fixture
def cluster(root: Path, outside: Path) -> Iterator[Cluster]:
    """A worker of a server with one table. Afterwards the outside is as it was."""
    server = InProcessServer(root)
    with server.rpc, connect([server.endpoint], worker=0, num_workers=1, timeout_s=30) as cluster:
        cluster.client.create_table(tr.Table("t", dim=DIM).schema)
        yield cluster
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert sorted(path.name for path in outside.parent.iterdir()) == ["outside", "root"]


def escapes(root: Path, outside: Path, name: str = "secret") -> list[str]:
    """Ways to name a place in the folder outside."""
    plain = f"{outside}/{name}"
    return [
        *(plain, f"../outside/{name}", f"link/{name}", f"{root}/../outside/{name}"),
        *(f"x/../../outside/{name}", f"file://{plain}", f"local://{plain}", f"FILE://{plain}"),
        *(f"simplecache::file://{plain}", f"simplecache::{plain}", f"dir::file://{plain}"),
        *(f"filecache::memory://x::file://{plain}", f"reference://{plain}", f"zip://a::{plain}"),
        *(f"http://127.0.0.1:9/{name}", f"git://{outside}:{name}", f"python://{name}"),
        *("s3://b/k::file://" + plain, "\0" + plain, plain + "\0", "x" * 5000, ""),
    ]


STORAGE_OPTIONS: list[dict[str, Any]] = [
    {"protocol": "file"},
    {"protocol": "filecache", "target_protocol": "file", "cache_storage": "."},
    {"fo": "x"},
    {"s3": {"protocol": "file"}},
]


def refused(client: WorkerClient, method: str, body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as error:
        client.servers.everywhere(method, body)
    assert SECRET not in str(error.value)


def test_a_loop_of_links_is_refused_by_name(cluster: Cluster, root: Path) -> None:
    (root / "loop").symlink_to(root / "loop")
    common = {"table": "t", "id": "x", "time": 0, "storage_options": {}}
    cluster.client.servers.everywhere("import.begin", {"table": "t", "id": "x"})
    for path in ("loop", "loop/x"):
        with pytest.raises(BadRequest, match="loop"):
            cluster.client.servers.everywhere(
                "import.parquet", {**common, "files": [path], "columns": {}}
            )
        with pytest.raises(BadRequest, match="loop"):
            cluster.client.servers.everywhere(
                "export.parquet", {**common, "state": False, "folder": path}
            )


def test_an_import_reads_nothing_outside(cluster: Cluster, root: Path, outside: Path) -> None:
    client = cluster.client
    client.servers.everywhere("import.begin", {"table": "t", "id": "x"})
    common = {"table": "t", "id": "x", "time": 0, "storage_options": {}}
    fleet = {**common, "accessor": "SparseAccessor", "betas": [0.9, 0.999]}
    for path in escapes(root, outside):
        refused(client, "import.fleet", {**fleet, "files": [path]})
        refused(client, "import.parquet", {**common, "files": [path], "columns": {}})
    for options in STORAGE_OPTIONS:
        for path in (f"s3:/{outside}/secret", f"memory:/{outside}/secret"):
            actual = {**common, "storage_options": options, "columns": {}, "files": [path]}
            refused(client, "import.parquet", actual)


def test_an_export_writes_nothing_outside(cluster: Cluster, root: Path, outside: Path) -> None:
    client = cluster.client
    common = {"table": "t", "time": 0, "storage_options": {}, "state": False}
    fleet = {**common, "accessor": "SparseAccessor", "betas": [0.9, 0.999], "shard_num": 1}
    frozen = {"tables": ["t"], "classes": [0], "dtype": "float32", "version": 1, "since": 0}
    for path in escapes(root, outside, "new"):
        refused(client, "export.parquet", {**common, "folder": path})
        refused(client, "export.fleet", {**fleet, "folder": path})
        refused(client, "export.join", {"folder": path, "shard_num": 1, "gzip": False})
        refused(client, "export.save", {**frozen, "path": path, "forget": 0, "time": 0})
    for options in STORAGE_OPTIONS:
        place = {"folder": f"s3:/{outside}/new", "storage_options": options}
        refused(client, "export.parquet", {**common, **place})


def test_a_checkpoint_is_written_and_read_inside(
    cluster: Cluster, root: Path, outside: Path
) -> None:
    save = {"mode": "full", "time": 0, "version": 1, "since": 0, "removed_since": 0, "budgets": {}}
    for path in escapes(root, outside, "new"):
        body = {**save, "action": "save", "path": path, "options": {}, "prefix": "", "job": "j"}
        refused(cluster.client, "checkpoint.start", body)
    for prefix in ("../../outside/", f"{outside}/", "a/../../../outside/", "\0", "..", "/"):
        assert "inside the folder" in run(cluster, root, prefix) or "relative" in run(
            cluster, root, prefix
        )
    assert run(cluster, root, "part/") == ""
    assert (root / "inside" / "part" / "tables").is_dir()


def run(cluster: Cluster, root: Path, prefix: str) -> str:
    """The error of a save with that prefix, at a place where one may be; "" if there is none."""
    save = {"mode": "full", "time": 0, "version": 1, "since": 0, "removed_since": 0, "budgets": {}}
    place = {"action": "save", "path": str(root / "inside"), "options": {}, "prefix": prefix}
    shutil.rmtree(root / "inside", ignore_errors=True)
    (root / "inside").mkdir()  # as the worker does
    job = uuid.uuid4().hex
    call = cluster.client.servers.everywhere
    call("checkpoint.start", {**save, **place, "job": job})
    while True:
        [reply] = call("checkpoint.status", {"job": job})
        if not reply.body["running"]:
            error = reply.body["error"]
            return "" if error is None else str(error[1])


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a/b", "a\0b", "..", "~"])
def test_the_name_of_a_table_is_no_path(
    cluster: Cluster, root: Path, outside: Path, name: str
) -> None:
    table = tr.Table(name, dim=DIM)
    try:
        cluster.client.create_table(table.schema)
    except TriremeError:
        return
    cluster.client.pull({RowClassId(name): np.arange(3, dtype=np.uint64)})
    assert run(cluster, root, "") == ""
    actual = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    assert actual
    assert all(path.startswith("inside/tables/") for path in actual), actual
