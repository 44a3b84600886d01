"""Models and rows in the formats of other systems: Paddle's Fleet, Parquet, NumPy. Names are loaded
on first use: a server or worker that imports a module from here loads no trainer.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trireme.interchange.fleet_models import export_fleet, import_fleet, is_fleet
    from trireme.interchange.plain_rows import export_parquet, import_arrays, import_parquet

__all__ = [
    "export_fleet",
    "export_parquet",
    "import_arrays",
    "import_fleet",
    "import_parquet",
    "is_fleet",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'trireme.interchange' has no attribute {name!r}")
    module = "fleet_models" if name.endswith("_fleet") else "plain_rows"
    return getattr(importlib.import_module(f"trireme.interchange.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
