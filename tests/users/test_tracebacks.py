"""Tracebacks end at the user's line, unless the whole is asked for."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.integration.processes import clean_environment

SCRIPT = """\
import sys
import trireme as tr

def looked_up():
    import torch
    table = tr.Table("ids", dim=4, optimizer=tr.optim.SGD(lr=1))
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.ids = tr.nn.Embedding(table, ["ids"])
        def forward(self, ids):
            return self.ids(ids)  # of the user
    Net()(torch.ones(3))

def train():
    if sys.argv[1] == "forward":
        looked_up()
    elif sys.argv[1] == "internal":
        raise tr.errors.Internal("a bug")
    elif sys.argv[1] == "theirs":
        tr.Table("t", dim=4, optimizer=property(lambda: 1 / 0).fget())
    elif sys.argv[1] == "dataclass":
        tr.Checkpoints("here")  # of the user
    elif sys.argv[1] == "handler":
        try:
            {}["mine"]
        except KeyError:
            tr.Strategy("nonsense")  # of the user
    elif sys.argv[1] == "caught":
        try:
            tr.Strategy("nonsense")
        except tr.errors.BadRequest as error:
            import traceback
            traceback.print_exception(error)
            raise SystemExit(3)
    else:
        tr.Strategy("nonsense")  # of the user

if sys.argv[1] == "hook":
    before = sys.excepthook
    sys.excepthook = lambda *error: (print("mine", file=sys.stderr), before(*error))
train()
"""


def traceback_of(folder: Path, case: str, *flags: str) -> list[str]:
    (folder / "script.py").write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, *flags, "script.py", case],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == (3 if case == "caught" else 1)
    return ended.stderr.splitlines()


@pytest.mark.parametrize("case", ["strategy", "forward", "hook", "dataclass"])
def test_a_traceback_ends_at_the_line_of_the_user(tmp_path: Path, case: str) -> None:
    lines = traceback_of(tmp_path, case)
    places = [line for line in lines if line.startswith("  File ")]
    assert "script.py" in places[-1]
    assert "in forward" in places[-1] if case == "forward" else "in train" in places[-1]
    assert any("# of the user" in line for line in lines)
    assert lines[-1].startswith("trireme.errors.BadRequest: ")
    assert lines.count("Traceback (most recent call last):") == 1
    assert ("mine" in lines) == (case == "hook")


@pytest.mark.parametrize(
    ("case", "flags"),
    [("strategy", ["-X", "dev"]), ("caught", []), ("internal", []), ("theirs", [])],
)
def test_what_is_not_shortened(tmp_path: Path, case: str, flags: list[str]) -> None:
    lines = traceback_of(tmp_path, case, *flags)
    places = [line for line in lines if line.startswith("  File ")]
    assert ("script.py" in places[-1]) == (case in ("internal", "theirs"))
    if case == "theirs":
        assert lines[-1].startswith("ZeroDivisionError")


def test_the_users_own_error_before_stays(tmp_path: Path) -> None:
    lines = traceback_of(tmp_path, "handler")
    assert "KeyError: 'mine'" in lines
    assert "During handling of the above exception, another exception occurred:" in lines
    assert "script.py" in [line for line in lines if line.startswith("  File ")][-1]


def test_an_installed_program_is_the_users(tmp_path: Path) -> None:
    """As `pip install` does: the package in site-packages, and a script that calls it."""
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path)}))
    packages.mkdir(parents=True)
    (packages / "program.py").write_text(
        "import trireme as tr\n\ndef main():\n    tr.Strategy('nonsense')  # of the user\n"
    )
    patched = (
        "import sysconfig, sys\n"
        "path = sysconfig.get_path\n"
        f"sysconfig.get_path = lambda n: {str(packages)!r} if n.endswith('lib') and n[0] == 'p'"
        " and 'std' not in n else path(n)\n"
        f"sys.path.append({str(packages)!r})\n"
        "import program\nprogram.main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", patched],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    places = [line for line in ended.stderr.splitlines() if line.startswith("  File ")]
    assert "program.py" in places[-1]
    assert "in main" in places[-1]
