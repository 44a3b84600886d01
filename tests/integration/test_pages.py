"""The pages for people who come from elsewhere: every command and every script in them runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.integration.processes import clean_environment
from tests.paddlerec import sample
from tests.repo import tree


def blocks(page: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page with their languages, in order."""
    text = (tree.ROOT / "docs" / page).read_text()
    found = re.findall(r"^( *)```(\w+)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [(language, textwrap.dedent(body)) for _, language, body in found]


def run(folder: Path, command: list[str]) -> str:
    """Run in the folder, with `trireme` and `python` being these."""
    shims = folder / "bin"
    if not shims.is_dir():
        shims.mkdir()
        for name, arguments in (("trireme", "-m trireme.cli"), ("python", "")):
            shim = shims / name
            shim.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
            shim.chmod(0o755)
    env = clean_environment()
    env |= {"PATH": f"{shims}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, timeout=110, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_blocks(page: str, folder: Path) -> str:
    """Python blocks become the files that their first lines name; shell blocks run."""
    output = ""
    for language, body in blocks(page):
        if language == "python":
            name = body.splitlines()[0].removeprefix("# ")
            (folder / name).write_text(body)
        elif language == "sh":
            output += run(folder, ["sh", "-ec", body])
        else:
            assert language == "text"  # what is printed, or what files are called
    return output


def test_the_page_for_people_from_torch(tmp_path: Path) -> None:
    output = run_blocks("torch.md", tmp_path)
    assert "1 server and 2 workers ended well" in output


def test_the_page_of_consistency(tmp_path: Path) -> None:
    output = run_blocks("consistency.md", tmp_path)
    assert "1 server and 2 workers ended well" in output
    found = dict(re.findall(r"^(?:\[worker 0\] )?(bounded|geo) ([\d.]+)$", output, re.MULTILINE))
    assert {mode: float(auc) > 0.9 for mode, auc in found.items()} == {"bounded": True, "geo": True}


def test_the_page_of_rows(tmp_path: Path) -> None:
    run_blocks("rows.md", tmp_path)
    run(tmp_path, ["python", "dims.py"])
    output = run(tmp_path, ["python", "live.py"])
    assert "{'ads': {'expired': 1, 'evicted': 0}, 'users': {'expired': 0, 'evicted': 0}}" in output
    assert "'users': {'admitted': 2, 'rejected': 2, 'expired': 0, 'evicted': 0}" in output


def test_the_page_for_people_from_paddlerec(tmp_path: Path) -> None:
    folder = sample.copy("dnn", tmp_path / "dnn")
    output = run_blocks("paddlerec.md", folder)
    assert "1 server and 2 workers ended well" in output
    assert len(re.findall(r"run: infer epoch [01]: ", output)) == 2
    assert f"starting from {folder}/output_job/0" in output
    text = run(
        folder,
        [
            "sh",
            "-c",
            "cat data/sample_data/train/* | python queuedataset_reader.py"
            f" config.yaml {tree.ROOT}/src/trireme/fleet/reader_utils",
        ],
    )
    (folder / "multislot.txt").write_text(text)
    assert "'examples': 3000" in run(folder, ["python", "train.py"])


def test_the_page_on_online_learning(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    shutil.copy(tree.ROOT / "examples" / "online.yaml", tmp_path / "examples")
    output = run_blocks("online.md", tmp_path)
    assert output.count("stream: pass 20190722/6: before:") == 2  # alone, and as a job
    assert re.search(r"20190721/3 auc 0\.\d+ .*delta-3", output)
