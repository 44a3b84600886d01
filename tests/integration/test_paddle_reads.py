"""Paddle loads what Trireme writes for Fleet, and predicts the same as from its own files.

Needs a Python with paddlepaddle 2.6.2 (`make paddle`, or TRIREME_BENCH_PADDLE names it); skipped
without.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import trireme as tr
from tests.golden.test_fleet_checkpoint import CASES, FOLDER, make_trainer
from tests.repo import tree
from trireme.job.embedded import embedded

PYTHON = Path(os.environ.get("TRIREME_BENCH_PADDLE", tree.ROOT / "build/paddle/bin/python"))
SHARDS = 2  # of benchmarks/paddle/checkpoint.py


@pytest.mark.skipif(not PYTHON.is_file(), reason=f"no Python with Paddle at {PYTHON}")
@pytest.mark.parametrize("case", CASES)
def test_paddle_predicts_the_same_from_our_files(case, tmp_path):
    accessor, rule, dense = case.split("-")
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster, case)
        tr.interchange.import_fleet(trainer, FOLDER / case / "saved", accessor=accessor)
        tr.interchange.export_fleet(
            trainer,
            tmp_path / "ours",
            accessor=accessor,
            shard_num=SHARDS,
            compress=dense == "adam",
        )
    script = tree.ROOT / "benchmarks/paddle/checkpoint.py"
    options = {"accessor": accessor, "rule": rule, "dense": dense, "load": tmp_path / "ours"}
    done = subprocess.run(
        [
            str(PYTHON),
            str(script),
            f"--out={tmp_path}",
            *(f"--{k}={v}" for k, v in options.items()),
        ],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    recorded = json.loads((FOLDER / case / "predicted.json").read_text())["predictions"]
    actual = json.loads((tmp_path / "predicted.json").read_text())["predictions"]
    np.testing.assert_allclose(actual, recorded, rtol=0, atol=1e-6)
