"""The scripts and commands of docs/inference.md run, from top to bottom."""

from __future__ import annotations

from pathlib import Path

from tests.integration.test_pages import run_blocks
from tests.programs import Template


def test_the_page_about_inference(tmp_path: Path, programs: Template) -> None:
    output = run_blocks(programs, "inference.md", tmp_path)
    assert "missing" in output
    assert "version 2" in output
    assert "2 examples to scores.tsv; of 4 keys looked up" in output
    assert "\nx\t" in output
