"""Which interpreters `make wheel` builds with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.repo import tree
from wheels.build import BuildError, Python, find_python, find_pythons


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_python_is_asked_what_it_is() -> None:
    assert find_python(sys.executable) == Python(sys.executable, sys.version_info[:2])


def test_pythons_from_3_12_on_share_a_wheel() -> None:
    wheels = [Python("python3", version).wheel for version in ((3, 10), (3, 11), (3, 12), (3, 14))]
    assert wheels == [(3, 10), (3, 11), (3, 12), (3, 12)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo 'pyenv: python3.10: command not found' >&2; exit 127", "pyenv: python3.10"),
        ("echo /usr/bin/python3.9 3 9 True", "expected Python >= 3.10, found 3.9"),
        ("echo /usr/bin/python3.12 3 12 False", "expected Python.h"),
    ],
)
def test_a_python_that_builds_no_wheel_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    unfit = script(tmp_path / "python", text)
    with pytest.raises(BuildError, match=words):
        find_python(unfit)
    assert [one.executable for one in find_pythons([unfit, sys.executable], skip=True)] == [
        sys.executable
    ]
    assert words in capfd.readouterr().out
    with pytest.raises(BuildError, match=words):
        find_pythons([unfit, sys.executable], skip=False)
    with pytest.raises(BuildError, match="found none"):
        find_pythons([unfit], skip=True)


def test_nothing_is_compiled_for_this_processor_alone() -> None:
    """A wheel runs on others; `core/base/isa.h` chooses instructions when it runs."""
    builds = [tree.ROOT / "CMakeLists.txt", *tree.ROOT.glob("*/CMakeLists.txt")]
    assert len(builds) == 3
    assert not [path for path in builds if "-march" in path.read_text()]
