"""Where the model of a configuration is: a Python file, or a name of trireme.models.

Nothing here loads torch, so that a wrong configuration costs no start of it.
"""

import logging
import re
from pathlib import Path

from trireme.config import Config
from trireme.errors import BadRequest, is_file
from trireme.models import zoo
from trireme.run.settings import Settings

log = logging.getLogger("trireme")

PADDLE_FILES = ("static_model.py", "dygraph_model.py")
# PaddleRec's folders whose models have another name here.
_OTHER_NAMES = {
    "dnn": "ctr_dnn",
    "logistic_regression": "lr",
    "match-pyramid": "match_pyramid",
    "multiview-simnet": "multiview_simnet",
}
_IMPORTS_PADDLE = re.compile(r"^\s*(import|from)\s+paddle\b", re.MULTILINE)


def zoo_name(folder: Path) -> str | None:
    """The name in trireme.models of the model of one of PaddleRec's folders, by the folder."""
    name = _OTHER_NAMES.get(folder.name, folder.name)
    return name if name in zoo.NAMES else None


def model_source(config: Config, settings: Settings) -> Path | str:
    """The file of the model, or its name in trireme.models.

    It is `-o model=NAME`, else runner.model_path, else model.py beside the YAML. A Paddle program
    at runner.model_path gives way to a model.py beside it.

    Raises BadRequest: neither is there, or the file is a Paddle program.
    """
    folder, model = settings.folder, settings.folder / "model.py"
    in_file = config.get("runner.model_path", None)  # read also where -o model=NAME replaces it
    named = settings.model or in_file
    if named is None:
        if not is_file(model):
            raise BadRequest(_nothing(folder))
        if _is_paddle(model):
            raise BadRequest(_paddle(model))
        return model
    if not isinstance(named, str):
        raise BadRequest(
            "runner.model_path: expected a Python file or a name of trireme.models, found"
            f" {named!r}"
        )
    if "/" not in named and not named.endswith(".py"):
        if named not in zoo.NAMES:
            raise BadRequest(
                f"run: expected a Python file or one of {', '.join(zoo.NAMES)} as the model,"
                f" found {named!r}"
            )
        return str(named)
    path = folder / named
    if not is_file(path):
        raise BadRequest(f"run: expected a Python file, found none at {path}")
    if not _is_paddle(path):
        return path
    if settings.model is None and _has_create(model):
        log.info("run: %s is a Paddle program; the model is %s", path, model)
        return model
    raise BadRequest(_paddle(path))


def _is_paddle(path: Path) -> bool:
    return _IMPORTS_PADDLE.search(_text(path)) is not None


def _has_create(path: Path) -> bool:
    return is_file(path) and not _is_paddle(path) and "create" in _text(path)


def _text(path: Path) -> str:
    """To search words of ASCII in, whatever the encoding that the file declares."""
    return path.read_text(encoding="utf-8", errors="replace")


def _paddle(path: Path) -> str:
    return (
        f"run: expected a model in PyTorch, found a Paddle program, {path}: {_advice(path.parent)}"
    )


def _nothing(folder: Path) -> str:
    present = [name for name in PADDLE_FILES if (folder / name).is_file()]
    verb = "are Paddle programs" if len(present) > 1 else "is a Paddle program"
    why = f"; {' and '.join(present)} {verb}" if present else ""
    return f"run: expected a model, found none{why}: {_advice(folder)}"


def _advice(folder: Path) -> str:
    """What to write, and the zoo's name of the model if it has it."""
    advice = (
        f"write {folder / 'model.py'} with create(config) -> trireme.Recipe, as docs/paddlerec.md"
        " shows, or name one by -o model=NAME"
    )
    name = zoo_name(folder)
    return f"{advice}; trireme.models has this one: -o model={name}" if name else advice
