"""Models and rows in the formats of other systems: Paddle's Fleet, Parquet, NumPy. Names are loaded
on first use: a server or worker that imports a module from here loads no trainer.
"""

from typing import TYPE_CHECKING

from trireme.lazy_names import lazy_names

if TYPE_CHECKING:
    from trireme.interchange.fleet_models import export_fleet, import_fleet, is_fleet
    from trireme.interchange.plain_rows import (
        export_parquet,
        import_arrays,
        import_parquet,
        remove_rows,
    )

__all__ = [
    "export_fleet",
    "export_parquet",
    "import_arrays",
    "import_fleet",
    "import_parquet",
    "is_fleet",
    "remove_rows",
]

__getattr__, __dir__ = lazy_names(__name__)
