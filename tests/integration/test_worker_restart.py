"""Workers are killed anywhere and their script is restarted: in sync all weights and states keep
the bits of an undisturbed run, in async every batch counts once.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

import numpy as np
import pytest

import trireme as tr
from tests.integration import restarted_script
from tests.integration.resumed_jobs import SERVER, assert_same
from tests.long import pick, sample
from tests.programs import Program, Template
from tests.seeds import SEED
from tests.tables import T_ROWS
from trireme import _core
from trireme.job.embedded import embedded

RESTARTED_SCRIPT = str(Path(restarted_script.__file__))
NUM_KILLS = pick(short=3, long=30)

# Where the processes of a worker are held and killed, one after the other. A process counts its own
# calls: 1 is its first push.
HOLDS = {
    "before the first batch": [
        *("create_blocks:1:before", "create_blocks:1:after"),
        *("begin_pass:1:before", "begin_pass:1:after", "push:1:before"),
    ],
    "amid epochs": ["push:2:after", "push:1:after", "leave:2:before", "push:3:before"],
    "at the end of epochs": ["leave:1:after", "gather:9:before", "leave:2:after"],
    "at the end": ["gather:12:after", "say_goodbye:1:before"],
    "amid saves": ["gather:4:before", "save_checkpoint:1:before", "save_checkpoint:2:after"],
    "behind saves": ["save_checkpoint:5:after", "save_checkpoint:1:after"],
}
SAVES = ("amid saves", "behind saves")  # of worker 0 alone
CASES = sample(
    [(worker, name) for worker in (0, 1) for name in HOLDS if worker == 0 or name not in SAVES],
    keep=5,
)


class Training:
    """A job of restarted_script.py whose workers are killed and restarted."""

    def __init__(self, programs: Template, folder: Path, mode: str) -> None:
        self.folder, self._mode = folder, mode
        self._programs, self._exit = programs, ExitStack()

    def __enter__(self) -> Training:
        with ExitStack() as stack:
            self._servers = [
                stack.enter_context(self._program("server", *SERVER, "--listen", "127.0.0.1:0"))
                for _ in range(2)
            ]
            self._addresses = [s.wait_line(r"^listening on (\S+)")[1] for s in self._servers]
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.__exit__(*error)  # type: ignore[arg-type]

    def _program(self, name: str, *command: str, **env: str) -> Program:
        env = {"TRIREME_TIMEOUT_S": "60", "TRIREME_THREADS": "1", **env}
        env["TRIREME_ROOT"] = str(self.folder)
        return self._programs.start(name, command, env)

    def start(self, worker: int, hold: str | None = None) -> Program:
        """A process of a worker, the first or the next."""
        options = [] if hold is None else ["--hold", hold]
        program = self._program(
            f"worker {worker}",
            *(RESTARTED_SCRIPT, str(self.folder), "--mode", self._mode, *options),
            TRIREME_ROLE="worker",
            TRIREME_SERVERS=",".join(self._addresses),
            TRIREME_INDEX=str(worker),
            TRIREME_NUM_WORKERS="2",
        )
        return self._exit.enter_context(program)

    def run(self, worker: int, holds: Sequence[str]) -> dict[int, list[str]]:
        """Kill a worker at each of these places, then let it come to its end; what both say
        there.
        """
        programs = {1 - worker: self.start(1 - worker)}
        for hold in holds:
            program = self.start(worker, hold)
            program.wait_line("^held$")
            program.kill()
        programs[worker] = self.start(worker)
        return self.finish(programs)

    def run_killing(self, random: Random) -> dict[int, list[str]]:
        """Kill random workers at random steps of theirs, or before their first, and let both come
        to their ends.
        """
        programs = {worker: self.start(worker) for worker in (0, 1)}
        for _ in range(NUM_KILLS):
            worker = random.randrange(2)
            if step := random.choice((0, 1, 2, 3, 5)):
                programs[worker].wait_line(rf"^(step {step}|done)$")
            programs[worker].kill()
            programs[worker] = self.start(worker)
        return self.finish(programs)

    def finish(self, programs: dict[int, Program]) -> dict[int, list[str]]:
        """The figures that each worker has come to; the servers have ended."""
        for program in programs.values():
            program.wait_line("^done$")
        for server in self._servers:
            server.wait_line("all workers have said goodbye")
        return {w: program.output.splitlines()[-3:-1] for w, program in programs.items()}


@pytest.fixture(scope="module")
def undisturbed(programs: Template, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run in sync."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with Training(programs, folder, "sync") as training:
        figures = training.run(1, [])
    assert figures[0] == figures[1]
    return folder


def assert_as_undisturbed(folder: Path, undisturbed: Path) -> None:
    """All but the number of the save that a row has changed before, as one that was cut off counts,
    and the kinds of values, which a worker does not know that had nothing left to train on.
    """
    for name in ("between", "last"):
        assert_same(folder / name, undisturbed / name, versions=False, kinds=False)


@pytest.mark.parametrize(("worker", "name"), CASES)
def test_sync_is_bit_equal_wherever_a_worker_is_killed(
    programs: Template, tmp_path: Path, undisturbed: Path, worker: int, name: str
) -> None:
    with Training(programs, tmp_path, "sync") as training:
        training.run(worker, HOLDS[name])
    assert_as_undisturbed(tmp_path, undisturbed)


def test_sync_is_bit_equal_whenever_workers_are_killed(
    programs: Template, tmp_path: Path, undisturbed: Path
) -> None:
    """Both, one after the other, each now and then before it has come to a step."""
    random = Random(f"{SEED} sync")
    print(f"seed {SEED}")
    with Training(programs, tmp_path, "sync") as training:
        figures = training.run_killing(random)
    assert_as_undisturbed(tmp_path, undisturbed)
    assert figures[0] == figures[1]


@pytest.mark.parametrize("mode", ["bounded", "async", "geo"])
def test_every_batch_is_applied_once_whenever_workers_are_killed(
    programs: Template, tmp_path: Path, mode: str
) -> None:
    random = Random(f"{SEED} {mode}")
    print(f"seed {SEED}")
    with Training(programs, tmp_path, mode) as training:
        figures = training.run_killing(random)
    assert counts(tmp_path / "last") == expected_counts()
    assert figures[0] == figures[1]


def expected_counts() -> dict[int, int]:
    """How often each key is in a batch."""
    actual = Counter[int]()
    for worker, epoch in itertools.product((0, 1), range(restarted_script.EPOCHS)):
        for batch in restarted_script.Data().stream(worker, 2, epoch=epoch):
            actual.update(set(batch["a"].values.tolist()) | set(batch["b"].values.tolist()))
    return dict(actual)


def counts(path: Path) -> dict[int, int]:
    """Updates of each key in a checkpoint of the rule Count."""
    with embedded(threads=1) as cluster:
        model = restarted_script.Model(tr.optim.Count())
        restarted_script.make_trainer("async", model, cluster).load(path)
        keys = _core.unique(np.arange(restarted_script.NUM_KEYS, dtype=np.uint64), cluster.pool)[0]
        rows = cluster.client.pull({T_ROWS: keys}).rows[T_ROWS].numpy()
        actual = dict(zip(keys.tolist(), rows[:, 0].astype(int).tolist(), strict=True))
        return {key: count for key, count in actual.items() if count}
