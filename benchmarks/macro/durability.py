"""The cost of durability, and the time that a server needs to recover.

process      CTR-DNN, async, one server and one worker, batch 4096: examples/s of training with
machine      --durability process or machine, beside none; batch 512 as process_b512, machine_b512
recovery_s   seconds until a server of 10 million rows of 16 floats with Adagrad's state has
             recovered, from a snapshot and some later pushes
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

import trireme as tr
from benchmarks.criteo import tsv_files
from benchmarks.harness import Claim, Contest, Run, Settings
from benchmarks.macro.ours import need_plain_job, run_job
from trireme import _core
from trireme.coordinator.coordinator import Coordinator
from trireme.job.durability import Durability, kept
from trireme.job.handlers import handlers_of
from trireme.optim import values_of_group
from trireme.protocol.block_messages import map_to_wire
from trireme.protocol.routing import BucketMap
from trireme.protocol.wire import Push, TablePush
from trireme.rpc import Request
from trireme.server.attendance import Attendance
from trireme.server.state import ServerState
from trireme.threads import start_pool

DIM = 16
ROWS_PER_PUSH = 500_000
NUM_PUSHES_BEHIND = 20
KEYS_BEHIND = 50_000
_NUM_WARM, _NUM_TIMED = 2, 8
_THREADS = {512: 3, 4096: 2}


def contests(settings: Settings) -> Sequence[Contest]:
    batches = settings.pick(smoke=(512,), real=(4096, 512))
    return [*(_cost(settings, batch) for batch in batches), _recovery(settings)]


def _cost(settings: Settings, batch: int) -> Contest:
    of_batch = "" if batch == 4096 or settings.is_smoke else f"_b{batch}"
    kept = settings.pick(smoke=("machine",), real=("process", "machine"))
    names = {mode: f"{mode}{of_batch}" for mode in (*kept, "none")}
    return Contest(
        {name: partial(_rate, settings, batch, mode) for mode, name in names.items()},
        [Claim(names[mode], names[mode], (names["none"],)) for mode in kept],
        settings.rounds,
    )


def _rate(settings: Settings, batch: int, mode: str, number: int) -> Run:
    del number
    if mode == "none":
        need_plain_job(settings)
    train = tsv_files(settings).train
    out = run_job(
        is_embedded=False,
        net="ctr",
        batch=batch,
        dim=9,
        threads=_THREADS[batch],
        seed=1,
        warm=train[:_NUM_WARM],
        timed=train[_NUM_WARM : _NUM_WARM + _NUM_TIMED],
        durability=mode,
    )
    return Run(out["examples_per_s"], detail=out)


def _recovery(settings: Settings) -> Contest:
    num_rows = settings.pick(smoke=20_000, real=10_000_000)
    return Contest(
        {"recovery_s": lambda _: _recover(num_rows)},
        [Claim("recovery_s", "recovery_s", unit="s")],
        settings.rounds,
    )


def _recover(num_rows: int) -> Run:
    with tempfile.TemporaryDirectory(prefix="trireme_bench_") as name:
        folder = Path(name)
        server = _Server(folder)
        for low in range(0, num_rows, ROWS_PER_PUSH):
            server.push(np.arange(low, min(low + ROWS_PER_PUSH, num_rows), dtype=np.uint64))
        with server.state.journal.replacing():
            pass
        rng = np.random.default_rng(1)
        for _ in range(NUM_PUSHES_BEHIND):
            server.push(rng.choice(num_rows, min(KEYS_BEHIND, num_rows), False).astype(np.uint64))
        server.close()
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        del server
        started = time.monotonic()
        again = _Server(folder)
        elapsed_s = time.monotonic() - started
        recovered = again.state.tables["rows"].rows.rows
        assert recovered == num_rows, f"expected {num_rows} rows, found {recovered}"
        again.close()
    return Run(elapsed_s, detail={"bytes": num_bytes, "rows": num_rows})


class _Server:
    """A server without a network, with durability."""

    def __init__(self, folder: Path) -> None:
        self._exit, self._table = ExitStack(), tr.Table("rows", dim=DIM, optimizer=_rule())
        self.state, coordinator, attendance = (
            ServerState(start_pool(0)),
            Coordinator(),
            Attendance(),
        )
        durability = Durability(mode="process", folder=folder, log_bytes=1 << 40)
        self._exit.enter_context(kept(durability, self.state, coordinator, attendance))
        self._handlers = handlers_of(self.state, coordinator, attendance.handlers(), folder)
        self._num_pushes = 0
        if not self.state.assignment.is_in_a_job:
            body = {"servers": ["a:1"], "worker": 0, "num_workers": 1, "token": "a"}
            self._ask("coord.join", body, [])
            head, arrays = map_to_wire(BucketMap.even(("a:1",)))
            self._ask("ps.map", {"map": head, "index": 0, "job": "a", "state": ""}, list(arrays))
            self._ask("ps.create_table", {"schema": self._table.schema.to_wire()}, [])

    def push(self, keys: np.ndarray) -> None:
        self._num_pushes += 1
        distinct = _core.unique(keys, self.state.pool)[0]
        gradients = np.full((len(distinct), DIM), 0.5, np.float32)
        values = values_of_group(_rule().group(), self._num_pushes)
        push = Push(
            stream=0, sequence=self._num_pushes, incarnation=1, step=0, staged=False, computed_at=0,
            examples=1, position=(), time=0, map_version=1,
            tables=[TablePush("rows", distinct, gradients, values)], blocks=None,
        )  # fmt: skip
        self._ask("ps.push", *push.to_wire())

    def _ask(self, method: str, body: dict[str, object], arrays: list[np.ndarray]) -> None:
        deadline = time.monotonic() + 60
        self._handlers[method](Request(1, method, body, arrays, "bench", "bench", "", deadline))

    def close(self) -> None:
        self._exit.close()


def _rule() -> tr.optim.Adagrad:
    return tr.optim.Adagrad(lr=0.1)
