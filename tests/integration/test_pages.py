"""The pages for users of other systems: all their commands and scripts run."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.integration.processes import clean_environment
from tests.paddlerec import sample
from tests.programs import Template
from tests.repo import tree

WAIT_S = 110.0
VARIABLE = re.compile(r"[A-Z_]+=")


def blocks(page: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page with their languages, in order."""
    text = (tree.ROOT / "docs" / page).read_text()
    actual = re.findall(r"^( *)```(\w+)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [(language, textwrap.dedent(body)) for _, language, body in actual]


def commands(block: str) -> list[str]:
    """Those of a block for a shell, each as one line."""
    return block.replace("\\\n", " ").splitlines()


def run(programs: Template, folder: Path, command: str) -> str:
    """What it prints when it ends well, `trireme` and `python` being these."""
    words = shlex.split(command)
    env = dict(word.split("=", 1) for word in itertools.takewhile(VARIABLE.match, words))
    name, *rest = words[len(env) :]
    if name == "python":
        return programs.run(folder, rest, env, wait_s=WAIT_S) + "\n"
    if name == "trireme":
        return programs.run(folder, ["-m", "trireme", *rest], env, wait_s=WAIT_S) + "\n"
    programs_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "-ec", command],
        cwd=folder,
        env=clean_environment() | {"PATH": programs_first},
        stdout=subprocess.PIPE,
        text=True,
        timeout=WAIT_S,
        check=True,
    ).stdout


def run_blocks(programs: Template, page: str, folder: Path) -> str:
    """Python blocks become the files that their first lines name; the commands of others run."""
    output = ""
    for language, body in blocks(page):
        if language == "python":
            name = body.splitlines()[0].removeprefix("# ")
            (folder / name).write_text(body)
        elif language == "sh":
            output += "".join(run(programs, folder, command) for command in commands(body))
        else:
            assert language == "text"  # what is printed, or what files are called
    return output


def test_the_page_for_people_from_torch(tmp_path: Path, programs: Template) -> None:
    output = run_blocks(programs, "torch.md", tmp_path)
    assert "1 server and 2 workers ended well" in output


def test_the_page_on_retrieval(tmp_path: Path, programs: Template) -> None:
    output = run_blocks(programs, "retrieval.md", tmp_path)
    recalls = [float(text) for text in re.findall(r"^\d recall ([\d.]+)$", output, re.MULTILINE)]
    assert len(recalls) == 2  # alone, and worker 0 of two
    assert min(recalls) > 0.9
    assert (
        len(re.findall(r"^after \[\[0, 0, 0, 0, 1200\]\] come \[1207, ", output, re.MULTILINE)) == 2
    )


def test_the_page_of_collective(tmp_path: Path, programs: Template) -> None:
    output = run_blocks(programs, "collective.md", tmp_path)
    scores = re.findall(r"^auc ([\d.]+)$", output, re.MULTILINE)
    assert len(scores) == 3
    assert float(scores[2]) > 0.95


def test_the_page_of_consistency(tmp_path: Path, programs: Template) -> None:
    output = run_blocks(programs, "consistency.md", tmp_path)
    assert "1 server and 2 workers ended well" in output
    actual = dict(re.findall(r"^(?:\[worker 0\] )?(bounded|geo) ([\d.]+)$", output, re.MULTILINE))
    assert {mode: float(auc) > 0.9 for mode, auc in actual.items()} == {
        "bounded": True,
        "geo": True,
    }


def test_the_page_of_gpus(tmp_path: Path, programs: Template) -> None:
    run_blocks(programs, "gpu.md", tmp_path)
    output = programs.run(tmp_path, ["on_gpu.py"], {"TRIREME_DEVICE_GPU": "cpu"}, wait_s=WAIT_S)
    assert float(re.findall(r"'auc': ([\d.]+)", output)[0]) > 0.8
    output = programs.run(tmp_path, ["block.py"], wait_s=WAIT_S)
    assert output.splitlines() == ["tensor([3, 7], dtype=torch.int32)", "[3 7]"]


def test_the_page_of_rows(tmp_path: Path, programs: Template) -> None:
    run_blocks(programs, "rows.md", tmp_path)
    look = run(programs, tmp_path, "python look.py").splitlines()
    assert look[-3].startswith("3 torch.Size([4]) torch.Size([2, 4])")
    assert look[-2].startswith("['Heat', ")
    assert "unknown" not in look[-1]
    trained, today = run(programs, tmp_path, "python why.py").split("today auc ")
    assert "ad permuted 0.5" in trained
    assert "0 of 50 values have a row" in today
    run(programs, tmp_path, "python dims.py")
    output = run(programs, tmp_path, "python live.py")
    assert "{'ads': {'expired': 1, 'evicted': 0}, 'users': {'expired': 0, 'evicted': 0}}" in output
    assert "'users': {'admitted': 2, 'rejected': 2, 'expired': 0, 'evicted': 0}" in output


def test_the_page_for_people_from_paddlerec(tmp_path: Path, programs: Template) -> None:
    folder = sample.copy("dnn", tmp_path / "dnn")
    output = run_blocks(programs, "paddlerec.md", folder)
    assert "1 server and 2 workers ended well" in output
    assert len(re.findall(r"run: infer epoch [01]: ", output)) == 2
    assert f"starting from {folder}/output_job/0" in output
    assert "'examples': 3000" in output
    assert "'examples': 3000" in run(programs, folder, "python ps_gpu.py")
    assert "train: batch 1: loss" in run(programs, folder, "python wide_deep.py")


@pytest.mark.timeout(300)  # every command of the page
def test_the_page_on_online_learning(tmp_path: Path, programs: Template) -> None:
    (tmp_path / "examples").mkdir()
    shutil.copy(tree.ROOT / "examples" / "online.yaml", tmp_path / "examples")
    shutil.copytree(tree.ROOT / "examples" / "planted", tmp_path / "examples" / "planted")
    output = run_blocks(programs, "online.md", tmp_path)
    assert output.count("stream: pass 20190722/6: before:") == 2  # alone, and as a job
    assert re.search(r"20190721/3 auc 0\.\d+ .*delta-3", output)
    assert "online_models/20190723/base'] tensor([" in output
