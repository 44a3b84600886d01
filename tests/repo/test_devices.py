"""One module decides where tensors are: no other names a kind of device beside the CPU."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.repo import tree

AT_HOME = "src/trireme/accelerator.py"
NAME = re.compile(r"\b(is_)?(cuda|xpu|mps)(:\d+)?\b")


def names_of_devices(path: Path) -> Iterator[ast.AST]:
    """Attributes, variables and strings, except documentation."""
    tops = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [n.body[0] for n in ast.walk(tree.syntax(path)) if isinstance(n, tops) and n.body]
    documentation = {id(s.value) for s in texts if isinstance(s, ast.Expr)}
    for node in ast.walk(tree.syntax(path)):
        name = getattr(node, "attr", getattr(node, "id", getattr(node, "value", None)))
        if isinstance(name, str) and id(node) not in documentation and NAME.search(name):
            yield node


def test_one_module_names_devices() -> None:
    wrong = [
        f"{tree.name(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in tree.files(".py", under="src")
        if tree.name(path) != AT_HOME
        for node in names_of_devices(path)
    ]
    assert not wrong, "ask trireme.accelerator:\n" + "\n".join(wrong)


def test_the_module_that_may_does() -> None:
    assert list(names_of_devices(tree.ROOT / AT_HOME))
