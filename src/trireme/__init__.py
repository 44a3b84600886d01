"""Trireme: a parameter server for PyTorch.

Names are loaded on first use, so that commands start without torch.
"""

from typing import TYPE_CHECKING, Any

from trireme.lazy_names import lazy_names as _lazy_names
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

_shorten()
_lazy, _names = _lazy_names(__name__)


def __getattr__(name: str) -> Any:
    if name != "__version__":
        return _lazy(name)
    from importlib.metadata import version

    globals()[name] = number = version("trireme-ps")
    return number


def __dir__() -> list[str]:
    return sorted({*_names(), "__version__"})
