"""Script of a job over every update rule: takes the mode, whether to clip, and a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import trireme as tr
from tests.integration.all_rules_model import run


def main() -> None:
    mode, clips, folder = sys.argv[1], sys.argv[2] == "clips", Path(sys.argv[3])
    result = run(tr.init(), mode, folder, clips=clips)
    weights = {name: array.tolist() for name, array in result["weights"].items()}
    print("RESULT", json.dumps({"figures": result["figures"], "weights": weights}))


main()
