"""Jobs of real processes that run resumed_script.py; tests kill them and compare checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.integration import resumed_script
from tests.programs import Program, Template

RESUMED_SCRIPT = str(Path(resumed_script.__file__))
SERVER = ["-m", "trireme", "server"]


class Jobs:
    """Jobs one after the other, of so many workers and servers, which may write below `root`."""

    def __init__(self, programs: Template, num_workers: int, num_servers: int, root: Path) -> None:
        self._programs = programs
        self._num_workers, self._num_servers = num_workers, num_servers
        self._env = {
            "TRIREME_TIMEOUT_S": "60",
            "TRIREME_THREADS": "1",
            "TRIREME_ROOT": str(root),
        }

    @contextmanager
    def started(self, *arguments: str) -> Iterator[tuple[list[Program], list[Program]]]:
        """Workers and servers of a job, which run until they end or the block does."""
        with ExitStack() as stack:
            servers = [
                stack.enter_context(
                    self._programs.start(
                        f"server {i}", [*SERVER, "--listen", "127.0.0.1:0"], self._env
                    )
                )
                for i in range(self._num_servers)
            ]
            addresses = [server.wait_line(r"^listening on (\S+)")[1] for server in servers]
            yield stack.enter_context(self.joined(addresses, *arguments)), servers

    @contextmanager
    def joined(self, addresses: Sequence[str], *arguments: str) -> Iterator[list[Program]]:
        """The workers alone, of servers that run there."""
        with ExitStack() as stack:
            workers = range(self._num_workers)
            yield [stack.enter_context(self.worker(i, addresses, *arguments)) for i in workers]

    def worker(self, index: int, addresses: Sequence[str], *arguments: str) -> Program:
        """One of them, also in the place of one that was killed."""
        place = {
            "TRIREME_ROLE": "worker",
            "TRIREME_SERVERS": ",".join(addresses),
            "TRIREME_NUM_WORKERS": str(self._num_workers),
            "TRIREME_INDEX": str(index),
        }
        return self._programs.start(
            f"worker {index}", [RESUMED_SCRIPT, *arguments], {**self._env, **place}
        )

    def run(self, *arguments: str) -> None:
        """To its end; not to that of the interpreters, which take seconds to put torch away."""
        with self.started(*arguments) as (workers, servers):
            for worker in workers:
                worker.wait_line("^done$")
            for server in servers:
                server.wait_line("all workers have said goodbye")

    def kill_at(self, step: int, *arguments: str) -> None:
        """All at once, when worker 0 has made so many steps since its start."""
        with self.started(*arguments) as (workers, servers):
            workers[0].wait_line(f"^step {step}$")
            for program in (*servers, *workers):
                program.kill()


def complete(folder: Path) -> list[Path]:
    """The numbered checkpoints there, the oldest first."""
    actual = [p for p in folder.glob("*") if p.name.isdecimal() and (p / "manifest.json").is_file()]
    return sorted(actual, key=lambda path: int(path.name))


def contents(path: Path, *, kinds: bool = True) -> dict[str, Any]:
    """All that a checkpoint says of the state of a run: the bytes of its files, and the rest of the
    manifest but for which job it is of, where the servers listened and how fast it went. kinds:
    also which features have strings.
    """
    files = {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != "manifest.json"
    }
    extra = json.loads((path / "manifest.json").read_text())["manifest"]["extra"]
    del extra["user"]["figures"], extra["saved_by"]
    if not kinds:
        del extra["strings"]
    return {**files, "extra": json.dumps(extra)}


def assert_same(actual: Path, expected: Path, *, versions: bool = True, kinds: bool = True) -> None:
    """Two checkpoints of the same state, to the bit.

    versions: also which save each row has changed before, which one more save changes.
    kinds: also which features have strings, which a worker without a batch does not know.
    """
    found_contents, expected_contents = (
        contents(actual, kinds=kinds),
        contents(expected, kinds=kinds),
    )
    assert found_contents.keys() == expected_contents.keys()
    differing = [
        name
        for name, content in expected_contents.items()
        if found_contents[name] != content
        and (versions or not _same_rows(name, found_contents[name], content))
    ]
    assert not differing, (actual, expected, differing)


def _same_rows(name: str, *files: bytes) -> bool:
    """But for their versions."""
    if not name.endswith(".arrow") or "buckets" in name:
        return False
    actual, expected = (pa.ipc.open_file(file).read_all().drop_columns("version") for file in files)
    return bool(actual.equals(expected))
