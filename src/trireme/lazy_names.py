"""Names of a package whose modules are imported when one is first used."""

import ast
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, whose `__init__.py` says once, to type checkers and
    to Python, where the names are: by the imports under `if TYPE_CHECKING:`.
    """
    module = sys.modules[package]
    names = vars(module)

    @functools.cache
    def homes() -> Mapping[str, tuple[str, str]]:
        """Name -> the module of it, and its name there."""
        # By the loader, which reads a package in a zip file, too.
        source = module.__loader__.get_source(package)  # type: ignore[union-attr]
        return {
            alias.asname or alias.name: (node.module or "", alias.name)
            for block in ast.parse(source).body
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in block.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def get(name: str) -> Any:
        if name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, original = homes()[name]
        if home == package:
            value = importlib.import_module(f"{package}.{original}")
        else:
            value = getattr(importlib.import_module(home), original)
        names[name] = value
        return value

    return get, lambda: sorted({*names, *names["__all__"]})
