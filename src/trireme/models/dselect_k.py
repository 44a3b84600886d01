"""DSelect-k: a gate that selects k of the experts, and is learnt by gradients: here for the two
digits of an image.

Source: Hazimeh et al., "DSelect-k: Differentiable Selection in the Mixture of Experts with
Applications to Multi-Task Learning", NeurIPS 2021.
"""

import math

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Dense, Label, Schema
from trireme.errors import BadRequest
from trireme.metrics import TopK
from trireme.models.columns import tensor_of
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.layers import mlp
from trireme.train.recipe import Recipe

IMAGE, TASKS = "input", ("label_left", "label_right")
_NUM_CLASSES = 10


class SelectionGate(nn.Module):
    """The shares of E experts: k selectors, each with a share of its own, choose one expert each.

    A selector has log2(E) numbers z. With bits b_i = smooth_step(z_i) it chooses expert e by the
    product of b_i over the bits of e that are 1, and of 1 - b_i over the others: all or nothing
    as soon as no z_i is between -1/2 and 1/2. So at most k experts have a share in the end.

    Raises BadRequest: E is no power of 2.
    """

    codes: Tensor

    def __init__(self, num_experts: int, k: int) -> None:
        super().__init__()
        num_bits = num_experts.bit_length() - 1
        if num_experts != 1 << num_bits:
            raise BadRequest(f"SelectionGate: expected a power of 2 experts, found {num_experts}")
        self.selectors_KN = nn.Parameter(torch.empty(k, num_bits).uniform_(-0.01, 0.01))
        self.shares_K = nn.Parameter(torch.empty(k).uniform_(-1, 1))
        codes_EN = torch.arange(num_experts)[:, None] >> torch.arange(num_bits) & 1
        self.register_buffer("codes", codes_EN.bool(), persistent=False)

    def forward(self) -> Tensor:
        """(E,)."""
        bits_K1N = smooth_step(self.selectors_KN)[:, None]
        chosen_KE = torch.where(self.codes, bits_K1N, 1 - bits_K1N).prod(2)
        return torch.softmax(self.shares_K, 0) @ chosen_KE


def smooth_step(x: Tensor) -> Tensor:
    """0 up to -1/2, 1 from 1/2 on, and between them 1/2 + 3/2 x - 2 x^3."""
    return torch.where(x.abs() < 0.5, 0.5 + 1.5 * x - 2 * x**3, (x > 0).to(x.dtype))


class DSelectK(nn.Module):
    """logits of a task = MLP(sum over the experts of the gate's share of relu(CNN(image))).

    All tasks have one gate, whose shares do not depend on the image, as in PaddleRec's net. Its
    towers end with a softmax before that of the loss; these do not.

    Column: "input", a square image row by row.

    Args:
        side: of the image, at least 16.
        num_experts, expert_size: how many experts, and floats that each makes.
        k: experts that the gate selects.
        hidden: width of the hidden layers of experts and towers.
    """

    def __init__(
        self,
        *,
        side: int = 36,
        num_experts: int = 8,
        expert_size: int = 50,
        k: int = 2,
        hidden: int = 50,
    ) -> None:
        super().__init__()
        self.side = side
        self.experts = nn.ModuleList(_expert(side, hidden, expert_size) for _ in range(num_experts))
        self.gate = SelectionGate(num_experts, k)
        sizes = [expert_size, hidden, hidden, _NUM_CLASSES]
        self.towers = nn.ModuleList(mlp(sizes) for _ in TASKS)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """(B, 10) logits by task."""
        images_B1SS = tensor_of(batch, IMAGE).view(-1, 1, self.side, self.side)
        experts_EBH = torch.stack([expert(images_B1SS) for expert in self.experts])
        mixed_BH = torch.einsum("e,ebh->bh", self.gate(), experts_EBH)
        return {task: tower(mixed_BH) for task, tower in zip(TASKS, self.towers, strict=True)}


def _expert(side: int, hidden: int, size: int) -> nn.Sequential:
    """relu(MLP(two convolutions of 5 x 5 pixels, each normalized, and its maxima of 2 x 2))."""
    left = ((side - 4) // 2 - 4) // 2
    parts = [
        (nn.Conv2d(before, after, 5), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2))
        for before, after in ((1, 10), (10, 20))
    ]
    layers = mlp([20 * left * left, hidden, size])
    return nn.Sequential(*parts[0], *parts[1], nn.Flatten(), layers, nn.ReLU())


def class_losses(outputs: dict[str, Tensor], batch: Batch) -> Tensor:
    """The sum of the cross entropies of the tasks."""
    cross_entropy = nn.functional.cross_entropy
    losses = [cross_entropy(outputs[task], tensor_of(batch, task).long()) for task in TASKS]
    return torch.stack(losses).sum()


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    feature_size: pixels of a square image, default 1296.
    expert_num, expert_size: experts, a power of 2, default 8, and floats that each makes, default
        50. top_k: experts that the gate selects, default 2.
    gate_num: the number of tasks, 2. tower_size has no effect, as in PaddleRec: hidden
        layers have 50 floats.

    Inputs: input, label_left, label_right. It has no tables.

    Raises BadRequest: an image that is not square or too small, another number of tasks or experts.
    """
    hyper = HyperParameters(config)
    size = hyper.whole("feature_size", 1296)
    side = math.isqrt(size)
    if side * side != size or side < 16:
        raise BadRequest(
            f"hyper_parameters.feature_size: expected the square of 16 or more, found {size}"
        )
    hyper.fixed("gate_num", len(TASKS))
    model = DSelectK(
        side=side,
        num_experts=hyper.whole("expert_num", 8),
        expert_size=hyper.whole("expert_size", 50),
        k=hyper.whole("top_k", 2),
    )
    return hyper.recipe(
        model,
        class_losses,
        schema=Schema([Dense(IMAGE, size), *map(Label, TASKS)]),
        metrics=[TopK(1, name=f"accuracy_{task}", output=task, label=task) for task in TASKS],
    )
