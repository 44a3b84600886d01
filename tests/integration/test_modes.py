"""Every mode in real processes, with workers that have unequal data or none."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import Job
from tests.programs import Template

SCRIPT = str(Path(__file__).with_name("modes_script.py"))
MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "bounded": {"mode": "bounded", "staleness": 2},
    "geo": {"mode": "geo", "k": 5},
    "hybrid": {"mode": "hybrid"},
}


def examples(lengths: tuple[int, int]) -> int:
    return sum(8 + number % 3 for length in lengths for number in range(length))


@pytest.mark.parametrize(
    ("mode", "lengths"),
    [("sync", (0, 120)), ("bounded", (90, 50)), ("geo", (90, 50)), ("hybrid", (0, 120))],
)
def test_uneven_streams_end_well_and_all_examples_count(
    mode: str, lengths: tuple[int, int], programs: Template
) -> None:
    arguments = [SCRIPT, json.dumps(MODES[mode]), ",".join(map(str, lengths))]
    with Job(2) as job, ExitStack() as end:
        env = {"TRIREME_ROLE": "worker", "TRIREME_NUM_WORKERS": "2"}
        env["TRIREME_SERVERS"] = ",".join(job.endpoints)
        workers = [
            end.enter_context(
                programs.start(f"worker {index}", arguments, {**env, "TRIREME_INDEX": str(index)})
            )
            for index in range(2)
        ]
        results = [json.loads(worker.wait_line("RESULT (.*)")[1]) for worker in workers]
        assert [worker.finish() for worker in workers] == [0, 0]
    for result in results:
        assert result["trained"] == examples(lengths)
        assert result["auc"] > 0.95
        assert result["weights"] == results[0]["weights"]  # current everywhere, all having ended
        assert mode != "bounded" or result["ahead"] <= 2
