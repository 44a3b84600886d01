"""Training: the distributed optimizer, the pipeline and the trainer."""

from trireme.train.callbacks.best_checkpoint import BestCheckpoint
from trireme.train.callbacks.callback import Callback, FitState
from trireme.train.callbacks.early_stopping import EarlyStopping
from trireme.train.callbacks.loggers import MLflow, TensorBoard, WandB
from trireme.train.checkpointing.checkpoints import Checkpoints
from trireme.train.dump import Dump
from trireme.train.loop.pipeline import Pipeline
from trireme.train.loop.prefetch import prefetch
from trireme.train.loop.reporting import Report
from trireme.train.optimizer import DistributedOptimizer
from trireme.train.recipe import Evaluation, Recipe
from trireme.train.trainer import Trainer

__all__ = [
    "BestCheckpoint",
    "Callback",
    "Checkpoints",
    "DistributedOptimizer",
    "Dump",
    "EarlyStopping",
    "Evaluation",
    "FitState",
    "MLflow",
    "Pipeline",
    "Recipe",
    "Report",
    "TensorBoard",
    "Trainer",
    "WandB",
    "prefetch",
]
