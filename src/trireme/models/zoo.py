"""The models by name. Each is a module of this package with a `create(config)`, and beside it
NAME.yaml, a configuration to start from.
"""

import importlib
from pathlib import Path
from types import ModuleType

from trireme.errors import check_choice

NAMES = tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.yaml")))


def load(name: str) -> ModuleType:
    """The module of a model: `load("deepfm").create(config)` is its recipe.

    Raises:
        BadRequest: no model of that name; the message lists the names.
    """
    check_choice("zoo.load", NAMES, name=name)
    return importlib.import_module(f"trireme.models.{name}")


def config_path(name: str) -> Path:
    """The YAML file of a model. Raises BadRequest as `load`."""
    return Path(str(load(name).__file__)).with_suffix(".yaml")
