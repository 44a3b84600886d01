"""Names of a package whose modules are imported when one is first used."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package. homes: name -> the module of it in the package."""
    names = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        names[name] = value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        return value

    return get, lambda: sorted({*names, *names["__all__"]})
