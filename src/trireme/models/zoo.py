"""The models by name. Each is a module of this package with a `create(config)`, and beside it
<name>.yaml, a configuration to start from.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from trireme.errors import BadRequest
from trireme.models import (
    ctr_dnn,
    dcn_v2,
    deepfm,
    din,
    dlrm,
    esmm,
    fm,
    lr,
    slot_dnn,
    two_tower,
    wide_deep,
    word2vec,
)

_MODULES: dict[str, ModuleType] = {
    "ctr_dnn": ctr_dnn,
    "dcn_v2": dcn_v2,
    "deepfm": deepfm,
    "din": din,
    "dlrm": dlrm,
    "esmm": esmm,
    "fm": fm,
    "lr": lr,
    "slot_dnn": slot_dnn,
    "two_tower": two_tower,
    "wide_deep": wide_deep,
    "word2vec": word2vec,
}
NAMES = tuple(_MODULES)


def load(name: str) -> ModuleType:
    """The module of a model: `load("deepfm").create(config)` is its recipe.

    Raises:
        BadRequest: no model of that name; the message lists the names.
    """
    if name not in _MODULES:
        raise BadRequest(f"zoo.load: expected one of {', '.join(NAMES)}, found {name!r}")
    return _MODULES[name]


def config_path(name: str) -> Path:
    """The YAML file of a model. Raises BadRequest as `load`."""
    return Path(str(load(name).__file__)).with_suffix(".yaml")
