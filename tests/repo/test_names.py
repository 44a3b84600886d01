"""A name means one thing, and says which."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.repo import tree

VAGUE = {"found", "given", "here", "met", "of", "said", "theirs", "told"}

CLASSES = {
    "InMemoryDataset": "Fleet's class of that name, over ours",
    "QueueDataset": "Fleet's class of that name, over ours",
}
"""Names of two classes, with the reason."""

FILES = {
    "clipping": "of gradients: what workers and servers both compute, and how a worker asks for it",
    "columns": "of a push beside its keys, and of a batch as models read them",
    "convert": "the command, and what it does",
    "dense_blocks": "of a Fleet folder: the server's and the worker's side",
    "handlers": "of requests by method: of a whole server, and those of checkpoints",
    "load": "of a checkpoint: the server's side, the worker's side, and the trainer's",
    "mode": "a consistency mode, in the folder with its name",
    "monitoring": "what a server and a worker show of themselves",
    "passes": "of the training: as the coordinator, a worker and `train_passes` see them",
    "predict": "the command, and what it does",
    "report": "what a command prints: of `doctor`, `inspect`, `place` and `size`",
    "save": "of a checkpoint: the server's side, the worker's side, and the trainer's",
    "server": "the command, and the RPC server that it starts",
    "stream": "the command, and what it does",
    "verify": "of checkpoints: the command, what it does, and the check of one",
}
"""Names of several modules, with the one meaning that they have."""


def names_by_module(nodes: Iterator[tuple[str, Path]]) -> dict[str, list[str]]:
    """Names that occur more than once, with the files."""
    files = defaultdict(list)
    for name, path in nodes:
        files[name].append(tree.name(path))
    return {name: paths for name, paths in files.items() if len(paths) > 1}


def classes() -> Iterator[tuple[str, Path]]:
    for path in tree.files(".py", under="src"):
        for node in ast.walk(tree.syntax(path)):
            if isinstance(node, ast.ClassDef):
                yield node.name.lstrip("_"), path


def modules() -> Iterator[tuple[str, Path]]:
    for path in tree.files(".py", under="src/trireme"):
        if path.stem not in ("__init__", "__main__"):
            yield path.stem, path


def test_a_class_name_has_one_meaning() -> None:
    names = names_by_module(classes())
    assert names.keys() == CLASSES.keys(), names


def test_a_module_name_has_one_meaning() -> None:
    names = names_by_module(modules())
    assert names.keys() == FILES.keys(), names


def test_variables_say_what_they_hold() -> None:
    wrong = [
        f"{tree.name(path)}:{line}: {name}"
        for path in tree.files(".py")
        for line, name in variables(path)
        if name.strip("_") in VAGUE
    ]
    assert not wrong, "\n".join(wrong)


def variables(path: Path) -> Iterator[tuple[int, str]]:
    """Every variable, parameter and attribute that a file assigns."""
    for node in ast.walk(tree.syntax(path)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
