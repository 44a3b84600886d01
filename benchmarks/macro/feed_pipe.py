"""The cost of a Python pipe_command: CPU time of reading batches through it, in all processes,
beside that of the script alone, over the same files with its output discarded.

As a program this file is the reading process; the import of torch is not counted.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.criteo import tsv_files
from benchmarks.harness import Claim, Contest, Run, Settings
from benchmarks.process import run_process

_SCRIPT = str(Path(__file__).with_name("feed_reader.py"))
_BATCH = 4096
_NUM_FILES = 4
_TIMEOUT_S = 600.0
_UNIT = "CPU us/example"


def contest(settings: Settings) -> Contest:
    def files() -> tuple[str, ...]:
        return tsv_files(settings).train[: settings.pick(smoke=2, real=_NUM_FILES)]

    return Contest(
        {"pipe_overhead": lambda _: _pipe(files()), "script": lambda _: _script(files())},
        [Claim("pipe_overhead", "pipe_overhead", ("script",), _UNIT)],
        settings.rounds,
        num_warm_ups=settings.pick(smoke=0, real=1),
    )


def _pipe(files: Sequence[str]) -> Run:
    report = json.loads(
        run_process(
            [sys.executable, "-m", "benchmarks.macro.feed_pipe", *files], timeout_s=_TIMEOUT_S
        )
    )
    cpu_s = report["reading_s"] + report["script_s"]
    return Run(1e6 * cpu_s / report["examples"], hash=str(report["sum"]), detail=report)


def _script(files: Sequence[str]) -> Run:
    before = _cpu_of_children_s()
    num_examples = 0
    for path in files:
        with open(path, "rb") as file:
            num_examples += sum(1 for _ in file)
            file.seek(0)
            subprocess.run(
                [sys.executable, _SCRIPT],
                stdin=file,
                stdout=subprocess.DEVNULL,
                check=True,
                timeout=_TIMEOUT_S,
            )
    return Run(1e6 * (_cpu_of_children_s() - before) / num_examples)


def _cpu_of_children_s() -> float:
    """CPU seconds of all ended children and their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(files: Sequence[str]) -> None:
    """Read the files through the script; print the CPU time of this process."""
    from benchmarks.macro.feed_reader import FEATURES
    from trireme.children import command as keeper
    from trireme.data import Dense, Label, QueueDataset, Sparse, multislot

    schema = multislot([Label(), *map(Sparse, FEATURES), Dense("dense", 13)])
    dataset = QueueDataset(
        files, schema=schema, batch_size=_BATCH, pipe_command=f"{sys.executable} {_SCRIPT}"
    )
    begin, examples, total = time.process_time(), 0, 0
    for batch in dataset:
        assert batch.bags is not None
        examples += batch.num_examples
        total += int(batch.bags.values.numpy().sum())
    reading_s = time.process_time() - begin
    keeper.close()
    report = {"reading_s": reading_s, "script_s": _cpu_of_children_s()}
    print(json.dumps({**report, "examples": examples, "sum": total}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
