"""Import of Python files that a configuration names."""

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from trireme.errors import BadRequest, is_file


def load_file(path: Path) -> ModuleType:
    """Import a Python file by its path. It may import modules of its folder. Raises BadRequest: no
    such file, it is not Python, or it imports paddle.
    """
    if not is_file(path):
        raise BadRequest(f"run: expected a Python file, found none at {path}")
    spec = importlib.util.spec_from_file_location(f"_trireme_run_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        where = f"{error.filename or path}, line {error.lineno or 1}"
        raise BadRequest(f"{where}: expected Python, found {error.msg}: {error.text}") from error
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "paddle":
            raise
        raise BadRequest(_imports_paddle(error)) from error
    return module


def _imports_paddle(error: ModuleNotFoundError) -> str:
    """Which line, maybe of a module that the file imports, and what it should be."""
    frames = traceback.extract_tb(error.__traceback__)
    last = [frame for frame in frames if not frame.filename.startswith("<frozen ")][-1]
    line = (last.line or "import paddle").strip()
    if "paddle.io" in line:
        advice = line.replace("paddle.io", "torch.utils.data")
    elif "fleet" in line:
        advice = "import trireme.fleet as fleet"
    else:
        advice = "import trireme.fleet.paddle as paddle"
    return (
        f"{last.filename}, line {last.lineno}: expected no import of Paddle, found {line!r}; change"
        f" it to {advice!r} (docs/paddlerec.md, step 1)"
    )
