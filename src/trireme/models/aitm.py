"""AITM: what the tower of clicks knows is handed on to the tower of conversions.

Source: Xi et al., "Modeling the Sequential Dependence among Audience Multi-step Conversions with
Multi-task Learning in Targeted Display Advertising", KDD 2021.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Label, Schema, Sparse
from trireme.errors import BadRequest
from trireme.metrics import AUC
from trireme.models.columns import SplitIds, tensor_of
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.inputs import Concatenated, Vocabularies
from trireme.models.layers import mlp
from trireme.train.recipe import Recipe

TASKS = ("click", "conversion")


class AITM(nn.Module):
    """logit of the click = linear(c), of the conversion linear(A), where A is the sum of the
    conversion tower's vector and of relu(linear(c)), with shares that attention gives them; c is
    the click tower's vector.

    The share of a vector u is the softmax, over both, of <Q u, K u> / sqrt(H), and A sums V u.

    Args:
        inputs: makes (B, W) of a batch.
        layers: widths of the layers of each tower; the last one is H.
        dropouts: behind each of these layers, in training.

    Raises BadRequest: another number of dropouts.
    """

    def __init__(
        self,
        inputs: Vocabularies | Concatenated,
        *,
        layers: Sequence[int] = (128, 64, 32),
        dropouts: Sequence[float] = (0.1, 0.3, 0.3),
    ) -> None:
        super().__init__()
        if len(layers) != len(dropouts):
            raise BadRequest(f"AITM: expected {len(layers)} dropouts, found {len(dropouts)}")
        self.inputs, sizes, size = inputs, [inputs.width, *layers], layers[-1]
        self.towers = nn.ModuleList(
            mlp(sizes, activates_last=True, dropouts=dropouts) for _ in TASKS
        )
        self.hand_on = mlp([size, size], activates_last=True, dropouts=dropouts[-1:])
        self.queries_keys_values = nn.Linear(size, 3 * size, bias=False)
        self.heads = nn.ModuleList(mlp([size, 1]) for _ in TASKS)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """(B,) logits by task."""
        x = self.inputs(batch)
        click_BH, conversion_BH = (tower(x) for tower in self.towers)
        both_B2H = torch.stack([conversion_BH, self.hand_on(click_BH)], 1)
        queries, keys, values = self.queries_keys_values(both_B2H).chunk(3, 2)
        shares_B2 = torch.softmax((queries * keys).sum(2) / keys.shape[2] ** 0.5, 1)
        vectors = (click_BH, (shares_B2[:, :, None] * values).sum(1))
        parts = zip(TASKS, self.heads, vectors, strict=True)
        return {task: head(vector).squeeze(1) for task, head, vector in parts}


@dataclass(frozen=True)
class CalibratedLogLoss:
    """The log losses of both tasks, and `weight` times the mean of by how much a conversion is
    likelier than its click. PaddleRec adds that up over the batch, and decays all weights by 1e-6.
    """

    weight: float = 0.6

    def __call__(self, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
        log_loss = nn.functional.binary_cross_entropy_with_logits
        losses = [log_loss(outputs[task], tensor_of(batch, task)) for task in TASKS]
        click, conversion = (torch.sigmoid(outputs[task]) for task in TASKS)
        return losses[0] + losses[1] + self.weight * torch.relu(conversion - click).mean()


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, and

    dims: widths of the layers of each tower, default 128, 64, 32. drop_prob: dropout behind each of
        them, default 0.1, 0.3, 0.3.
    embedding_size: PaddleRec's name of sparse_feature_dim, default 5.

    With feature_vocabulary, a list of [feature, number of its ids], as in PaddleRec's aitm, the
    inputs are click, conversion and "features", one id of each; each has a table of its name.

    Raises BadRequest: another feature_vocabulary, or dropouts.
    """
    hyper = HyperParameters(config, sparse_feature_dim=5)
    dim = hyper.whole("embedding_size", hyper.dim)
    names, inputs, schema = _vocabulary(hyper), None, None
    if names:
        inputs = Vocabularies({name: hyper.table(name, dim=dim) for name in names})
        schema = Schema([*map(Label, TASKS), Sparse("features")])
    model = AITM(
        Concatenated(hyper.table(dim=dim), **hyper.inputs()) if inputs is None else inputs,
        layers=hyper.sizes("dims", (128, 64, 32), least=1),
        dropouts=hyper.shares("drop_prob", (0.1, 0.3, 0.3)),
    )
    return hyper.recipe(
        model,
        CalibratedLogLoss(),
        schema=hyper.schema(*TASKS) if schema is None else schema,
        metrics=[AUC(name=f"auc_{task}", output=task, label=task) for task in TASKS],
        prepare=SplitIds("features", names) if names else None,
    )


def _vocabulary(hyper: HyperParameters) -> tuple[str, ...]:
    """The names of the features; none without feature_vocabulary."""
    pairs = hyper.get("feature_vocabulary", [])
    are_pairs = isinstance(pairs, list) and all(isinstance(p, list) and len(p) == 2 for p in pairs)
    if not are_pairs:
        raise BadRequest(
            "hyper_parameters.feature_vocabulary: expected a list of [name, number of ids], found"
            f" {pairs!r}"
        )
    return tuple(str(name) for name, _ in pairs)
