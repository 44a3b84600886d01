"""PLE: levels of experts, some of one task alone and some of all, which gates mix.

Source: Tang et al., "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning Model for
Personalized Recommendations", RecSys 2020.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.inputs import Concatenated, Numbers
from trireme.models.tasks import Experts, Gate, TaskInputs, Towers
from trireme.train.recipe import Recipe


class ExtractionLevel(nn.Module):
    """One level: of T task inputs and one shared input it makes as many, each a gate's mixture.

    A task's gate mixes its own experts and the shared ones; the shared gate mixes all experts. The
    last level has no shared gate.
    """

    def __init__(
        self,
        width: int,
        *,
        num_tasks: int,
        num_experts: int,
        num_shared: int,
        size: int,
        is_last: bool,
    ) -> None:
        super().__init__()
        self.own = nn.ModuleList(Experts(width, num_experts, size) for _ in range(num_tasks))
        self.shared = Experts(width, num_shared, size)
        self.gates = nn.ModuleList(Gate(width, num_experts + num_shared) for _ in range(num_tasks))
        num_all = num_tasks * num_experts + num_shared
        self.shared_gate = None if is_last else Gate(width, num_all)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        """T tensors (B, size), and the shared one if it is not the last level."""
        own_TBEH = [experts(x) for experts, x in zip(self.own, inputs, strict=False)]
        shared_BEH = self.shared(inputs[-1])
        outputs = [
            gate(x, torch.cat([own_BEH, shared_BEH], 1))
            for gate, x, own_BEH in zip(self.gates, inputs, own_TBEH, strict=False)
        ]
        if self.shared_gate is not None:
            outputs.append(self.shared_gate(inputs[-1], torch.cat([*own_TBEH, shared_BEH], 1)))
        return outputs


class PLE(nn.Module):
    """logit of a task = MLP(its output of the last level).

    Args:
        inputs: makes x (B, W) of a batch: Concatenated or Numbers of trireme.models.inputs.
        tasks: names of the outputs.
        num_levels: levels of experts.
        num_experts, num_shared: experts of each task, and of all tasks, in a level.
        expert_size: floats that each expert makes.
        layers: widths of the hidden layers of each task's MLP.
    """

    def __init__(
        self,
        inputs: Concatenated | Numbers,
        *,
        tasks: Sequence[str],
        num_levels: int = 1,
        num_experts: int = 3,
        num_shared: int = 2,
        expert_size: int = 16,
        layers: Sequence[int] = (8,),
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.levels = nn.ModuleList(
            ExtractionLevel(
                inputs.width if level == 0 else expert_size,
                num_tasks=len(tasks),
                num_experts=num_experts,
                num_shared=num_shared,
                size=expert_size,
                is_last=level == num_levels - 1,
            )
            for level in range(num_levels)
        )
        self.towers = Towers(tasks, expert_size, layers)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """(B,) logits by task."""
        x = self.inputs(batch)
        mixtures = [x] * (len(self.towers.tasks) + 1)
        for level in self.levels:
            mixtures = level(mixtures)
        logits: dict[str, Tensor] = self.towers(mixtures)
        return logits


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, those of TaskInputs (trireme.models.tasks),
    and

    level_number: levels of experts, default 1.
    exp_per_task, shared_num: experts of each task, default 3, and of all tasks, default 2.
    expert_size: floats that each expert makes, default 16.
    tower_size: width of the hidden layer of each task, default 8.
    task_num: the number of tasks.
    """
    hyper = HyperParameters(config)
    inputs = TaskInputs.of(hyper, "task_num")
    model = PLE(
        inputs.module,
        tasks=inputs.tasks,
        num_levels=hyper.whole("level_number", 1),
        num_experts=hyper.whole("exp_per_task", 3),
        num_shared=hyper.whole("shared_num", 2),
        expert_size=hyper.whole("expert_size", 16),
        layers=(hyper.whole("tower_size", 8),),
    )
    return inputs.recipe(model, hyper)
