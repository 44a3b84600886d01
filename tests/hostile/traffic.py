"""Messages of a small job, recorded from the calls of a real worker, and server handlers in the
state after these calls.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.hostile.mutation import Message
from trireme import _core
from trireme.checkpoint.format.manifest import CheckpointManifest
from trireme.checkpoint.worker_side.load import load_checkpoint
from trireme.coordinator.coordinator import Coordinator
from trireme.errors import TriremeError, Unavailable
from trireme.interchange.worker_side.dense_blocks import read_blocks, write_blocks
from trireme.interchange.worker_side.import_requests import importing
from trireme.job.cluster import Cluster
from trireme.job.handlers import handlers_of
from trireme.rpc import Call, Deferred, Handler, Reply, Request, frames
from trireme.rpc.limits import Limits
from trireme.server.attendance import Attendance
from trireme.server.state import ServerState
from trireme.train.earlier_models import begin_anew_together
from trireme.worker import passes
from trireme.worker.client import WorkerClient
from trireme.worker.expiry_calls import counters, remove, shrink
from trireme.worker.monitoring import WorkerMetrics
from trireme.worker.pull import PullPlan
from trireme.worker.transport import LOCAL, LocalTransport

FEATURES = ("a", "b")
DAY_S = 86_400
JOB_S = 30.0
FLEET = {"fleet": 0}  # the table that Fleet could have, and its number there
SAME_MAX = 20  # calls of one method are recorded


class World:
    """A server's handlers. Relative paths in messages lead into `root`, which must be the working
    directory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = ServerState(_core.Pool(1))
        self.state.state_id = (
            "the same"  # drawn at random, it would refuse what another world recorded
        )
        self.handlers: Mapping[str, Handler] = handlers_of(
            self.state, Coordinator(), Attendance().handlers(), root
        )

    def send(self, parts: list[bytes]) -> Reply | TriremeError | None:
        """What the server does with a message; any error that is not its own is raised.

        None: the answer is deferred.
        """
        try:
            header, arrays = frames.unpack(parts, Limits())
            body = frames.map_field(header, "b")
            method = frames.str_field(header, "m")
            handler = self.handlers.get(method)
            if handler is None:
                return None
            deadline = time.monotonic() + JOB_S
            answer = handler(Request(1, method, body, arrays, "fuzz", "nowhere", "", deadline))
        except TriremeError as error:
            return error
        if method == "checkpoint.start":
            return self._wait(body["job"])
        if isinstance(answer, Deferred):
            answer.bind(lambda _: None)
            return None
        answer = answer or Reply()
        frames.pack({"t": frames.REPLY, "id": 1, "b": answer.body}, answer.arrays)
        return answer

    def _wait(self, job: str) -> Reply | TriremeError:
        """A job's end: its errors count as the call's."""
        deadline = time.monotonic() + JOB_S
        status = Request(1, "checkpoint.status", {"job": job}, [], "", "", "", deadline)
        while True:
            try:
                reply = self.handlers["checkpoint.status"](status)
            except TriremeError as error:  # the job is lost, and would be begun anew
                return error
            assert isinstance(reply, Reply)
            if not reply.body["running"]:
                break
            assert time.monotonic() < deadline, f"job {job} must end in {JOB_S} s"
        if reply.body["error"] is None:
            return reply
        code, text = reply.body["error"]
        error = TriremeError(text)
        error.code, error.name = code, ""  # type: ignore[misc]
        return error


class Model(nn.Module):
    """Tables: a plain one, one with everything that a policy can have, one that counts keys, and
    one as Fleet has them.
    """

    def __init__(self) -> None:
        super().__init__()
        plain = tr.Table("plain", dim=4, optimizer=tr.optim.Adam(lr=0.1), dtype="bfloat16")
        scored = tr.Table(
            "scored",
            dims={"a": 2, "b": 3},
            salt=True,
            optimizer=tr.optim.FleetAdagrad(lr=0.1),
            policy=tr.policy.CtrCommonAccessor(embedx_threshold=1.0),
            absent="zeros",
        )
        counted = tr.Table(
            "counted", dim=1, optimizer=tr.optim.FTRL(lr=0.1), admit=tr.policy.CountFilter(2)
        )
        fleet = tr.Table(
            "fleet",
            dim=2,
            optimizer=tr.optim.FleetAdagrad(lr=0.1),
            policy=tr.policy.CtrCommonAccessor(),
        )
        tables = (plain, scored, counted, fleet)
        self.rows = nn.ModuleList(tr.nn.EmbeddingBag(table, features=FEATURES) for table in tables)
        self.out = nn.Linear(2 * 4 + (2 + 2) + (3 + 2) + 2 * 1 + 2 * (2 + 2), 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.out(torch.cat([rows(batch).flatten(1) for rows in self.rows], 1)).squeeze(1)


class Small(nn.Module):
    """One table, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        table = tr.Table("plain", dim=4, optimizer=tr.optim.Adam(lr=0.1))
        self.rows = tr.nn.EmbeddingBag(table, features=FEATURES)
        self.out = nn.Linear(2 * 4, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.out(self.rows(batch).flatten(1)).squeeze(1)


def batches(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    draw = np.random.default_rng(seed)
    return [
        {
            **{name: torch.from_numpy(draw.integers(0, 30, 16)) for name in FEATURES},
            "label": torch.from_numpy(draw.integers(0, 2, 16).astype(np.float32)),
        }
        for _ in range(count)
    ]


def record(root: Path) -> list[list[Message]]:
    """The calls of two jobs that train, save, load, export and import, of one that shares out its
    streams, and of one that trains on a device.
    """
    jobs = []
    for name, streams, run in (
        ("sync", 0, _run),
        ("async", 0, _run),
        ("shared", 2, _share),
        ("device", 0, _train_on_device),
    ):
        recorded: list[Message] = []
        folder = root / name
        folder.mkdir()
        world = World(root)
        handlers = {
            method: _recording(handler, recorded, str(root) + "/")
            for method, handler in world.handlers.items()
        }
        with _cluster(LocalTransport(handlers), streams) as cluster:
            run(cluster, folder)
        for message in recorded:  # the folders of drafts, which its worker makes and publishes
            if message.method == "checkpoint.start" and message.body["action"] == "save":
                (root / message.body["path"]).mkdir(exist_ok=True)
            elif message.method in ("export.parquet", "export.fleet"):
                (root / message.body["folder"]).parent.mkdir(exist_ok=True)
        jobs.append(recorded)
    return jobs


def _cluster(transport: LocalTransport, streams: int) -> Cluster:
    pool = _core.Pool(1)
    client = WorkerClient(
        [LOCAL],
        lambda _: transport,
        worker=0,
        num_workers=1,
        streams=streams,
        pool=pool,
        timeout_s=JOB_S,
    )
    return Cluster(client, pool, metrics=WorkerMetrics("embedded", None))


def _trainer(cluster: Cluster, mode: str, model: nn.Module) -> tr.Trainer:
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        strategy=tr.Strategy(mode),
        loss=nn.functional.binary_cross_entropy_with_logits,
        progress=False,
        cluster=cluster,
    )


def _share(cluster: Cluster, folder: Path) -> None:
    """Streams are taken one by one, and one is given back during it."""
    torch.manual_seed(1)
    trainer = _trainer(cluster, "async", Small())
    trainer.fit(batches(4, seed=1))
    trainer.save(folder / "full")
    for _ in tr.prefetch(batches(4, seed=2), trainer.model, cluster=cluster):
        break


def _train_on_device(cluster: Cluster, folder: Path) -> None:
    """In a pass, then in a window of 30 rows, which rows leave and enter again."""
    torch.manual_seed(1)
    trainer = _trainer(cluster, "async", Small())
    with trainer.on_device(batches(2, seed=1)):
        trainer.fit(batches(2, seed=1))
    trainer.begin_pass(batches(2, seed=1))
    passes.meet_in_pass(cluster.client, {"place": ["127.0.0.1", 1]})  # as one of several workers
    trainer.abandon_pass()
    with trainer.in_window(1, 30 * 60):
        trainer.fit(batches(3, seed=2))
    begin_anew_together(cluster, ["plain"])


def _run(cluster: Cluster, folder: Path) -> None:
    torch.manual_seed(1)
    trainer = _trainer(cluster, folder.name, Model())
    trainer.fit(batches(3, seed=1))
    if trainer.optimizer.strategy.mode == "sync":  # as one of several workers that clip by the norm
        cluster.client.pull({}, staged=3, clipped=True)
    trainer.save(folder / "full")
    # As of a table with rows on SSD.
    announced = PullPlan(
        {tr.table.RowClassId("plain"): np.arange(9, dtype=np.uint64)},
        cluster.client.servers.map,
        cluster.pool,
    )
    cluster.client.servers.announce(announced.calls(announced.tables(), "ps.announce"))
    trainer.fit(batches(2, seed=2))
    trainer.save(folder / "delta", mode="delta")
    shrink(cluster.client, time=3 * DAY_S, day_over=True)
    remove(cluster.client, "plain", np.arange(2, dtype=np.uint64))
    counters(cluster.client)
    servers = cluster.client.servers  # looks, as the console's and a view's
    servers.everywhere("ps.sample", {"table": "plain"})
    servers.everywhere("ps.top", {"table": "plain", "by": "time", "k": 3, "time": 0})
    some = [np.arange(3, dtype=np.uint64)]
    servers.call_all(
        [Call(server, "ps.look", {"table": "plain"}, some) for server in servers.endpoints], 30.0
    )
    tr.interchange.export_parquet(trainer, folder / "rows", state=True)
    keys = {"key": np.arange(5, dtype=np.uint64), "weights": np.ones((5, 4), np.float32)}
    tr.interchange.import_arrays(trainer, "plain", keys)
    tr.interchange.import_parquet(trainer, "plain", folder / "rows" / "plain", replace=True)
    with pytest.raises(KeyboardInterrupt), importing(cluster.client, ["plain"], replace=False):
        raise KeyboardInterrupt
    trainer.save(folder / "hot", mode="hot", hot=10)
    tr.interchange.export_fleet(trainer, folder / "fleet", shard_num=2, tables=FLEET, dense={})
    tr.interchange.import_fleet(trainer, folder / "fleet", tables=FLEET, dense={})
    write_blocks(cluster.client, read_blocks(cluster.client)[1])
    _export(cluster.client, folder / "inference")
    with pytest.raises(KeyboardInterrupt):
        load_checkpoint(cluster.client, folder / "full", check=_interrupt)
    trainer.load(folder / "full")
    _attend(cluster.client)


def _interrupt(_: CheckpointManifest) -> None:
    raise KeyboardInterrupt


def _export(client: WorkerClient, folder: Path) -> None:
    """The rows of an export for inference; the dense part would take seconds."""
    for table, row_class in (("plain", 0), ("scored", 1)):
        (folder / table).mkdir(parents=True)
        body = {"path": str(folder / table), "tables": [table], "classes": [row_class]}
        body |= {"dtype": "float16", "version": 9, "since": 0, "forget": 0, "time": DAY_S}
        client.servers.everywhere("export.save", body, timeout_s=JOB_S)


def _attend(client: WorkerClient) -> None:
    """What a worker says beside its job: that it lives, and that it has come to the end."""
    with pytest.raises(Unavailable):  # there is no such job any more
        client.servers.everywhere("checkpoint.stop", {"job": "none"}, timeout_s=JOB_S)
    client.servers.ask("coord.chain", {}, aside=True)
    client.servers.ask("coord.map", {}, aside=True)
    client.coordinator.exchanges["a group"] = 0
    client.coordinator.check_exchange("a group", timeout_s=JOB_S)
    client.stats()
    me = {"worker": 0, "num_workers": 1, "incarnation": client.incarnation}
    client.servers.everywhere("server.ready", {}, timeout_s=JOB_S)
    client.servers.everywhere("server.alive", {**me, "report": {"retries": 1}}, timeout_s=JOB_S)
    client.coordinator.silent_workers()
    client.coordinator.say_goodbye(me)
    client.servers.everywhere("server.end", {}, timeout_s=JOB_S)  # as compute workers ask


def _recording(handler: Handler, recorded: list[Message], root: str) -> Handler:
    def call(request: Request) -> Reply | Deferred | None:
        body = _relative(request.body, root)
        # How often a job is asked after depends on time; all else must be the same in every run.
        most = 1 if request.method == "checkpoint.status" else SAME_MAX
        if sum(message.method == request.method for message in recorded) < most:
            recorded.append(Message(request.method, body, [a.copy() for a in request.arrays]))
        return handler(request)

    return call


def _relative(value: Any, root: str) -> Any:
    """A copy with paths relative to the root."""
    if isinstance(value, dict):
        return {name: _relative(inner, root) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_relative(inner, root) for inner in value]
    return value.replace(root, "") if isinstance(value, str) else value
