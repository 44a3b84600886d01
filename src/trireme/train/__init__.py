"""Training: the distributed optimizer, the pipeline and the trainer."""

from trireme.train.checkpointing.checkpoints import Checkpoints
from trireme.train.dump import Dump
from trireme.train.loop.pipeline import Pipeline
from trireme.train.loop.prefetch import prefetch
from trireme.train.loop.reporting import Report
from trireme.train.optimizer import DistributedOptimizer
from trireme.train.recipe import Evaluation, Recipe
from trireme.train.trainer import Trainer

__all__ = [
    "Checkpoints",
    "DistributedOptimizer",
    "Dump",
    "Evaluation",
    "Pipeline",
    "Recipe",
    "Report",
    "Trainer",
    "prefetch",
]
