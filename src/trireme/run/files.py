"""Import of Python files that a configuration names."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from trireme.errors import BadRequest


def load_file(path: Path) -> ModuleType:
    """Import a Python file by its path. It may import modules of its folder. Raises BadRequest: no
    such file.
    """
    if not path.is_file():
        raise BadRequest(f"run: expected a Python file, found none at {path}")
    spec = importlib.util.spec_from_file_location(f"_trireme_run_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module
