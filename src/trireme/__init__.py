"""Trireme: a parameter server for PyTorch.

Names are loaded on first use, so that commands start without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trireme import data, errors, initializer, interchange, metrics, models, nn, optim, policy
    from trireme.blocks import Blocks
    from trireme.config import Config
    from trireme.job.cluster import Cluster
    from trireme.launch.init import init
    from trireme.strategy import Strategy
    from trireme.table import Table
    from trireme.train import (
        Checkpoints,
        DistributedOptimizer,
        Dump,
        Recipe,
        Report,
        Trainer,
        prefetch,
    )
    from trireme.train.online.passes import Pass
    from trireme.train.online.publishing import Publishing
    from trireme.train.online.train_passes import train_passes

__all__ = [
    "Blocks",
    "Checkpoints",
    "Cluster",
    "Config",
    "DistributedOptimizer",
    "Dump",
    "Pass",
    "Publishing",
    "Recipe",
    "Report",
    "Strategy",
    "Table",
    "Trainer",
    "data",
    "errors",
    "init",
    "initializer",
    "interchange",
    "metrics",
    "models",
    "nn",
    "optim",
    "policy",
    "prefetch",
    "train_passes",
]

_HOMES = {
    "Blocks": "trireme.blocks",
    "Checkpoints": "trireme.train",
    "Cluster": "trireme.job.cluster",
    "Config": "trireme.config",
    "DistributedOptimizer": "trireme.train",
    "Dump": "trireme.train",
    "Pass": "trireme.train.online.passes",
    "Publishing": "trireme.train.online.publishing",
    "Recipe": "trireme.train",
    "Report": "trireme.train",
    "Strategy": "trireme.strategy",
    "Table": "trireme.table",
    "Trainer": "trireme.train",
    "init": "trireme.launch.init",
    "prefetch": "trireme.train",
    "train_passes": "trireme.train.online.train_passes",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'trireme' has no attribute {name!r}")
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        value = importlib.import_module(f"trireme.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
