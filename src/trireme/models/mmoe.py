"""MMoE: experts that all tasks share, and for each task a gate that mixes them.

Source: Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate
Mixture-of-Experts", KDD 2018.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.inputs import Concatenated, Numbers
from trireme.models.tasks import Experts, Gate, TaskInputs, Towers
from trireme.train.recipe import Recipe


class MMoE(nn.Module):
    """logit of a task = MLP(sum over the experts of its gate's share of relu(linear(x))).

    Args:
        inputs: makes x (B, W) of a batch: Concatenated or Numbers of trireme.models.inputs.
        tasks: names of the outputs.
        num_experts, expert_size: how many experts, and floats that each makes.
        layers: widths of the hidden layers of each task's MLP.
    """

    def __init__(
        self,
        inputs: Concatenated | Numbers,
        *,
        tasks: Sequence[str],
        num_experts: int = 8,
        expert_size: int = 16,
        layers: Sequence[int] = (8,),
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.experts = Experts(inputs.width, num_experts, expert_size)
        self.gates = nn.ModuleList(Gate(inputs.width, num_experts) for _ in tasks)
        self.towers = Towers(tasks, expert_size, layers)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """(B,) logits by task."""
        x = self.inputs(batch)
        experts_BEH = self.experts(x)
        logits: dict[str, Tensor] = self.towers([gate(x, experts_BEH) for gate in self.gates])
        return logits


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, those of TaskInputs (trireme.models.tasks),
    and

    expert_num, expert_size: experts, default 8, and floats that each makes, default 16.
    tower_size: width of the hidden layer of each task, default 8.
    gate_num: the number of tasks.
    """
    hyper = HyperParameters(config)
    inputs = TaskInputs.of(hyper, "gate_num")
    model = MMoE(
        inputs.module,
        tasks=inputs.tasks,
        num_experts=hyper.whole("expert_num", 8),
        expert_size=hyper.whole("expert_size", 16),
        layers=(hyper.whole("tower_size", 8),),
    )
    return inputs.recipe(model, hyper)
