"""The memory that a save needs beyond the tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.integration.processes import clean_environment
from tests.repo import tree

SCRIPT = Path(__file__).with_name("save_memory_script.py")


def test_a_save_needs_little_extra_memory(tmp_path: Path) -> None:
    env = clean_environment() | {"PYTHONPATH": f"{tree.ROOT / 'src'}:{tree.ROOT}"}
    command = [sys.executable, str(SCRIPT), str(tmp_path / "saved")]
    done = subprocess.run(command, env=env, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, most = (int(number) for number in done.stdout.split())
    print(f"{before} KiB before, {most} meanwhile: {most / before:.3f}")
    assert most <= 1.1 * before
