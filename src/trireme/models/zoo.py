"""The models by name. Each is a module of this package with a `create(config)`, and beside it
NAME.yaml, a configuration to start from.
"""

import importlib
from pathlib import Path
from types import ModuleType

from trireme.errors import BadRequest

NAMES = (
    *("autoint", "bert4rec", "bst", "ctr_dnn", "dcn", "dcn_v2", "deepfefm", "deepfm", "dien"),
    *("difm", "din", "dlrm", "dmr", "dsin", "dssm", "escm2", "esmm", "fastformer", "ffm", "flen"),
    *("fm", "gatenet", "iprec", "kim", "lr", "mind", "mmoe", "naml", "ncf", "ple", "share_bottom"),
    *("slot_dnn", "tagspace", "textcnn", "tisas", "two_tower", "wide_deep", "word2vec", "xdeepfm"),
)


def load(name: str) -> ModuleType:
    """The module of a model: `load("deepfm").create(config)` is its recipe.

    Raises:
        BadRequest: no model of that name; the message lists the names.
    """
    if name not in NAMES:
        raise BadRequest(f"zoo.load: expected one of {', '.join(NAMES)}, found {name!r}")
    return importlib.import_module(f"trireme.models.{name}")


def config_path(name: str) -> Path:
    """The YAML file of a model. Raises BadRequest as `load`."""
    return Path(str(load(name).__file__)).with_suffix(".yaml")
