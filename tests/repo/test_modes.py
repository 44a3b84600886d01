"""A consistency mode is an object: outside its folder nothing asks which mode it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.repo import tree
from trireme.strategy import KNOBS

NAMES = set(KNOBS)
AT_HOME = ("src/trireme/train/modes/", "src/trireme/strategy.py")

TRANSLATIONS = {
    "src/trireme/run/settings.py": "the keys of a YAML file that belong to each mode",
    "src/trireme/run/unused_keys.py": "a value of PaddleRec's key that asks for nothing else",
}
"""Files that may name modes elsewhere than in Strategy(...), with the reason."""

OPEN = {"mode_class", "TrainingSetup", "WorkerStep", "BeginPull", "CompletePull"}
"""What other folders may import of modes: what they hand to one and get, and no class of a mode."""


def others() -> list[Path]:
    return [p for p in tree.files(".py", under="src") if not tree.name(p).startswith(AT_HOME)]


def names_outside_strategy(node: ast.AST) -> Iterator[ast.Constant]:
    """String constants that are the name of a mode, except in the arguments of Strategy(...)."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Strategy":
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMES:
        yield node
    for child in ast.iter_child_nodes(node):
        yield from names_outside_strategy(child)


def test_a_name_of_a_mode_stands_only_where_a_strategy_is_made() -> None:
    wrong = [
        f"{tree.name(path)}:{constant.lineno}: {constant.value!r}"
        for path in others()
        if tree.name(path) not in TRANSLATIONS
        for constant in names_outside_strategy(tree.syntax(path))
    ]
    assert not wrong, "ask the mode, not its name:\n" + "\n".join(wrong)


def test_no_class_of_a_mode_is_imported_elsewhere() -> None:
    wrong = [
        f"{tree.name(path)}:{line}: {imported}"
        for path in others()
        for line, imported in tree.imports(path)
        if imported.startswith("trireme.train.modes") and imported.rpartition(".")[2] not in OPEN
    ]
    assert not wrong, "ask the mode, not its class:\n" + "\n".join(wrong)


def test_every_translation_is_still_one() -> None:
    for name in TRANSLATIONS:
        assert list(names_outside_strategy(tree.syntax(tree.ROOT / name))), f"{name}: no names"
