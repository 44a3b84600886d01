"""The repository's files and their syntax trees, for the tests beside this file."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "trireme"
_FOLDERS = ("core", "bind", "src", "tests", "benchmarks", "examples", "docs", "wheels", ".ci")


def files(*suffixes: str, under: str | None = None) -> list[Path]:
    """Our own files with one of the suffixes, build outputs left out."""
    folders = [ROOT / under] if under else [ROOT / name for name in _FOLDERS]
    actual = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]
    if not under:
        actual += [path for path in ROOT.iterdir() if path.suffix in suffixes]
        actual = [path for path in actual if path.name != ".git"]  # a file in a git worktree
    ours = [path for path in actual if path.is_file() and "__pycache__" not in path.parts]
    return sorted(path for path in ours if not path.name.startswith("_core."))


def name(path: Path) -> str:
    """Path from the repository's root, as shown in failures."""
    return str(path.relative_to(ROOT))


@functools.cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def module(path: Path) -> str:
    """`trireme.worker.client` for src/trireme/worker/client.py; the package for its __init__.py."""
    parts = (
        path.relative_to(ROOT / "src" if PACKAGE in path.parents else ROOT).with_suffix("").parts
    )
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module or module.name) of each import, inside functions too."""
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@functools.cache
def lines_for_types(path: Path) -> set[int]:
    """The lines that only type checkers read."""
    return {
        line
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for line in range(node.lineno, (node.body[-1].end_lineno or node.lineno) + 1)
    }


def includes(path: Path) -> Iterator[tuple[int, str]]:
    """(line, "own.h" or <standard>) of each include of a C++ file, its brackets kept."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("#include"):
            yield number, line.split()[1]
