"""The memory that a save needs beyond the tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.integration.processes import clean_environment
from tests.repo import tree
from trireme.checkpoint.server_side.save import BLOCK_FILE_BYTES

SCRIPT = Path(__file__).with_name("save_memory_script.py")


def measured(folder: Path, what: str) -> tuple[int, int]:
    """KiB of memory before the save, and most meanwhile."""
    env = clean_environment() | {"PYTHONPATH": f"{tree.ROOT / 'src'}:{tree.ROOT}"}
    command = [sys.executable, str(SCRIPT), str(folder / "saved"), what]
    done = subprocess.run(command, env=env, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, most = (int(number) for number in done.stdout.split())
    print(f"{before} KiB before, {most} meanwhile: {most / before:.3f}")
    return before, most


def test_a_save_needs_little_extra_memory(tmp_path: Path) -> None:
    before, most = measured(tmp_path, "rows")
    assert most <= 1.1 * before


def test_a_save_of_blocks_needs_the_memory_of_one_file_more(tmp_path: Path) -> None:
    before, most = measured(tmp_path, "blocks")
    assert most - before <= 1.25 * BLOCK_FILE_BYTES / 1024
