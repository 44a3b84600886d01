"""A Predictor imports neither servers nor training code."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import trireme.inference
apart = "train models server worker coordinator job checkpoint launch rpc run fleet".split()
print([name for name in sys.modules if name.startswith("trireme.") and name.split(".")[1] in apart])
"""


def test_a_predictor_loads_no_training_code_and_no_servers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
