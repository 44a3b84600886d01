"""docs/protocol.md describes the code: methods, fields of a push, limits."""

from __future__ import annotations

import re

import numpy as np

from tests.repo import tree
from trireme.protocol.wire import Push, TablePush
from trireme.rpc import Limits

PAGE = (tree.ROOT / "docs/protocol.md").read_text()
METHOD = r"(?:coord|server|ps|policy|checkpoint|import|export)\.\w+"
UNITS = {"": 1, "MiB": 1 << 20, "GiB": 1 << 30, "s": 1}


def section(title: str) -> str:
    match = re.search(rf"^## {re.escape(title)}$(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert match, title
    return match[1]


def first_column(text: str) -> set[str]:
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


def test_every_method_that_is_called_is_described_and_every_described_one_is_served() -> None:
    served, called = set(), set()
    for path in tree.files(".py", under="src"):
        if tree.PACKAGE / "launch" in path.parents:  # server.key is a file there
            continue
        text = path.read_text()
        served |= set(re.findall(rf'"({METHOD})":', text))
        called |= set(re.findall(rf'"({METHOD})"(?!:)', text))
    described = first_column(section("Coordinator (server 0)")) | first_column(section("Server"))
    assert len(called) > 10
    assert called <= described <= served


def test_the_fields_of_a_push_are_described() -> None:
    part = TablePush("t", np.zeros(1, np.uint64), np.zeros((1, 2), np.float32), {})
    push = Push(
        stream=0, sequence=1, incarnation=1, step=0, staged=False, computed_at=0, examples=1,
        position=(), time=0, map_version=1, tables=[part], blocks=None,
    )  # fmt: skip
    body, arrays = push.to_wire()
    assert first_column(section("ps.push")) == set(body)
    assert all(f"`{name}`" in section("ps.push") for name in body["tables"][0])
    assert [array.shape for array in arrays] == [(1,), (1, 2)]


def test_the_numbers_given_for_limits_are_the_defaults() -> None:
    actual = re.findall(r"`(\w+)` = `?([\d.]+)`? ?(GiB|MiB|s\b|)", PAGE)
    assert len(actual) > 8
    for name, number, unit in actual:
        assert getattr(Limits(), name) == float(number) * UNITS[unit], name
