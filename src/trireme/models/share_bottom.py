"""Shared bottom: tasks with one hidden layer in common, and an MLP of its own for each.

Source: Caruana, "Multitask Learning", Machine Learning 28, 1997.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.inputs import Concatenated, Numbers
from trireme.models.layers import mlp
from trireme.models.tasks import TaskInputs, Towers
from trireme.train.recipe import Recipe


class ShareBottom(nn.Module):
    """logit of a task = MLP(relu(linear(x))), with the same linear map for all tasks.

    Args:
        inputs: makes x (B, W) of a batch: Concatenated or Numbers of trireme.models.inputs.
        tasks: names of the outputs.
        bottom_size: width of the common layer.
        layers: widths of the hidden layers of each task's MLP.
    """

    def __init__(
        self,
        inputs: Concatenated | Numbers,
        *,
        tasks: Sequence[str],
        bottom_size: int = 117,
        layers: Sequence[int] = (8,),
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.bottom = mlp([inputs.width, bottom_size], activates_last=True)
        self.towers = Towers(tasks, bottom_size, layers)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """(B,) logits by task."""
        x = self.bottom(self.inputs(batch))
        logits: dict[str, Tensor] = self.towers([x for _ in self.towers.tasks])
        return logits


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, those of TaskInputs (trireme.models.tasks),
    and

    bottom_size: width of the common layer, default 117.
    tower_size: width of the hidden layer of each task, default 8.
    task_num: the number of tasks.
    """
    hyper = HyperParameters(config)
    inputs = TaskInputs.of(hyper, "task_num")
    model = ShareBottom(
        inputs.module,
        tasks=inputs.tasks,
        bottom_size=hyper.whole("bottom_size", 117),
        layers=(hyper.whole("tower_size", 8),),
    )
    return inputs.recipe(model, hyper)
