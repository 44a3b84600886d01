"""Global shuffle of real processes: loses nothing, is repeatable, and ends when a worker dies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from tests.criteo_text import random_line
from tests.integration.shuffle_script import digests
from tests.programs import Program, Template
from trireme.data import QueueDataset, criteo

SHUFFLE_SCRIPT = str(Path(__file__).with_name("shuffle_script.py"))
NUM_EXAMPLES = 900


@pytest.fixture
def data(tmp_path: Path) -> str:
    random = Random(8)
    for i, num_lines in enumerate([400, 1, 499]):
        lines = [random_line(random) + b"\n" for _ in range(num_lines)]
        (tmp_path / f"part-{i}").write_bytes(b"".join(lines))
    return f"{tmp_path}/part-*"


@pytest.fixture
def end() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def job(
    programs: Template, end: ExitStack, arguments: list[list[str]], *, timeout_s: str = "60"
) -> list[Program]:
    """A server and a worker for each list of arguments; they end with the test."""

    def start(name: str, arguments: list[str], **env: str) -> Program:
        env = {"TRIREME_TIMEOUT_S": timeout_s, "TRIREME_THREADS": "1", **env}
        return end.enter_context(programs.start(name, arguments, env))

    server = start("server", ["-m", "trireme", "server", "--listen", "127.0.0.1:0"])
    address = server.wait_line(r"^listening on (\S+)")[1]
    place = {"TRIREME_ROLE": "worker", "TRIREME_SERVERS": address}
    place["TRIREME_NUM_WORKERS"] = str(len(arguments))
    return [
        start(f"worker {i}", [SHUFFLE_SCRIPT, *rest], **place, TRIREME_INDEX=str(i))
        for i, rest in enumerate(arguments)
    ]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_nothing_is_lost_and_another_run_with_other_threads_is_the_same(
    programs: Template, end: ExitStack, data: str, num_workers: int
) -> None:
    runs = []
    for threads in ("1", "3"):
        workers = job(programs, end, [[data, "--threads", threads]] * num_workers)
        assert [worker.finish() for worker in workers] == [0] * num_workers
        # But for the first line, which names the server's port.
        runs.append([worker.output.partition("\n")[2] for worker in workers])
    match = [re.search(r"^held (\d+) (\d+) (\w+)$", text, re.MULTILINE) for text in runs[0]]
    assert all(match)
    num_examples, total, order = digests(QueueDataset(data, schema=criteo(), batch_size=64))
    assert num_examples == NUM_EXAMPLES
    assert sum(int(held[1]) for held in match if held) == NUM_EXAMPLES
    assert sum(int(held[2]) for held in match if held) % (1 << 64) == total
    assert order not in [held[3] for held in match if held]
    # Sizes, orders, positions, and the batches after each position.
    assert runs[0] == runs[1]
    assert sum(text.count("\nbatch ") for text in runs[0]) >= NUM_EXAMPLES // 150


@pytest.mark.parametrize("when", ["0", "5"])
def test_a_worker_that_dies_is_an_error_of_the_others(
    programs: Template, end: ExitStack, data: str, when: str
) -> None:
    workers = job(programs, end, [[data], [data], [data, "--wait-in-round", when]], timeout_s="3")
    workers[2].wait_line(f"^in round {when}$")
    workers[2].kill()
    assert [worker.finish() for worker in workers[:2]] == [1, 1]
    errors = [worker.output.splitlines()[-1] for worker in workers[:2]]
    for error in errors:
        assert re.match(r"trireme\.errors\.(DeadlineExceeded|Unavailable): ", error), error
    # The last one to end may miss the other's examples first.
    assert re.search(r"worker 2|exchange\.piece at \S+", "\n".join(errors)), errors
    assert not any("\nheld" in worker.output for worker in workers[:2])
