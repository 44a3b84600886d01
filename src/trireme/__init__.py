"""Trireme: a parameter server for PyTorch.

Names are loaded on first use, so that commands start without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from trireme.tracebacks import shorten as _shorten

if TYPE_CHECKING:
    from trireme import data, errors, initializer, interchange, metrics, models, nn, optim, policy
    from trireme import fleet as fleet
    from trireme import inference as inference
    from trireme.blocks import Blocks
    from trireme.config import Config
    from trireme.job.cluster import Cluster
    from trireme.job.embedded import embedded
    from trireme.launch.init import init, reset
    from trireme.nn.stages import Stages
    from trireme.nn.table_view import TableView
    from trireme.strategy import Strategy
    from trireme.table import Table
    from trireme.train import (
        BestCheckpoint,
        Callback,
        Checkpoints,
        DistributedOptimizer,
        Dump,
        EarlyStopping,
        Evaluation,
        FitState,
        MLflow,
        Recipe,
        Report,
        TensorBoard,
        Trainer,
        WandB,
        prefetch,
    )
    from trireme.train.online.passes import Pass
    from trireme.train.online.publishing import Publishing
    from trireme.train.online.train_passes import train_passes

    __version__: str

__all__ = [
    "BestCheckpoint",
    "Blocks",
    "Callback",
    "Checkpoints",
    "Cluster",
    "Config",
    "DistributedOptimizer",
    "Dump",
    "EarlyStopping",
    "Evaluation",
    "FitState",
    "MLflow",
    "Pass",
    "Publishing",
    "Recipe",
    "Report",
    "Stages",
    "Strategy",
    "Table",
    "TableView",
    "TensorBoard",
    "Trainer",
    "WandB",
    "data",
    "embedded",
    "errors",
    "fleet",
    "inference",
    "init",
    "initializer",
    "interchange",
    "metrics",
    "models",
    "nn",
    "optim",
    "policy",
    "prefetch",
    "reset",
    "train_passes",
]

# Module -> the names that it has; the others are modules themselves.
_TRAIN = (
    *("BestCheckpoint", "Callback", "Checkpoints", "DistributedOptimizer", "Dump"),
    *("EarlyStopping", "Evaluation", "FitState", "MLflow", "Recipe", "Report", "TensorBoard"),
    *("Trainer", "WandB", "prefetch"),
)
_HOMES = {
    "blocks": ("Blocks",),
    "config": ("Config",),
    "job.cluster": ("Cluster",),
    "job.embedded": ("embedded",),
    "launch.init": ("init", "reset"),
    "nn.stages": ("Stages",),
    "nn.table_view": ("TableView",),
    "strategy": ("Strategy",),
    "table": ("Table",),
    "train": _TRAIN,
    "train.online.passes": ("Pass",),
    "train.online.publishing": ("Publishing",),
    "train.online.train_passes": ("train_passes",),
}

_shorten()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        globals()[name] = number = version("trireme-ps")
        return number
    if name not in __all__:
        raise AttributeError(f"module 'trireme' has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        return importlib.import_module(f"trireme.{name}")
    globals()[name] = value = getattr(importlib.import_module(f"trireme.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
