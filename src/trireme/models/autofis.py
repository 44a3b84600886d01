"""AutoFIS: a DeepFM that finds out which products of two features it needs, then trains on those.

Sources: Liu et al., "AutoFIS: Automatic Feature Interaction Selection in Factorization Models for
Click-Through Rate Prediction", KDD 2020; Chao and Cheng, "A Generalization of Regularized Dual
Averaging and its Dynamics", 2019 (GRDA).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Label, Schema, Sparse
from trireme.errors import BadRequest
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.inputs import FeatureVectors, IdVectors
from trireme.models.layers import BatchNorm, normalized_mlp, pairwise_products
from trireme.train.recipe import Recipe

_LARGE = 1e4


class AutoFIS(nn.Module):
    """logit = sum of w_i + sum over the pairs i<j of m_ij norm(<v_i, v_j>) + MLP(vectors), where
    norm is batch normalization, and m_ij is 0 for the pairs that are not needed.

    Args:
        fields: makes (B, N, 1 + D) of a batch: the weight w of each input, then its vector v.
        layers: widths of the MLP's hidden layers, each normalized by batch.
        pairs: has the weights m of the pairs.
    """

    def __init__(
        self,
        fields: FeatureVectors | IdVectors,
        pairs: "PairWeights",
        *,
        layers: Sequence[int] = (700, 700, 700, 700, 700),
    ) -> None:
        super().__init__()
        self.fields, self.pairs, num = fields, pairs, fields.num_inputs
        self.norm = BatchNorm(num * (num - 1) // 2)
        self.mlp = normalized_mlp([num * (fields.dim - 1), *layers, 1])

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        fields = self.fields(batch)
        vectors = fields[:, :, 1:]
        products_BP = self.norm(pairwise_products(vectors)) * self.pairs()
        deep_B = self.mlp(vectors.flatten(1)).squeeze(1)
        logits: Tensor = fields[:, :, 0].sum(1) + products_BP.sum(1) + deep_B
        return logits


class PairWeights(nn.Module):
    """The P weights m of pairs. While it searches, GRDA makes those 0 that do not matter:

    m = sign(a) max(|a| - c t^mu, 0) after t steps, where a is the first weight minus the sum of the
    gradients of m. Afterwards those that are 0 stay so, and the others learn as any parameter.

    Each worker counts its own steps.

    searches: whether this is the search. c, mu: how fast weights go to 0.
    """

    steps: Tensor
    is_needed: Tensor

    def __init__(
        self, num_pairs: int, *, searches: bool = True, c: float = 5e-4, mu: float = 0.8
    ) -> None:
        super().__init__()
        self.searches, self.c, self.mu = searches, c, mu
        self.weights = nn.Parameter(torch.empty(num_pairs).uniform_(0.599, 0.601))
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("is_needed", torch.ones(num_pairs))

    def forward(self) -> Tensor:
        """(P,)."""
        if not self.searches:
            return self.weights * self.is_needed
        a = self.weights.detach()
        shrunk = a.sign() * (a.abs() - self.c * self.steps**self.mu).relu()
        if self.training:
            self.steps += 1
            self.is_needed.copy_(shrunk != 0)
        return shrunk + self.weights - a  # the gradient of m is that of a

    def group(self) -> dict[str, Any]:
        """A param group of Adam for the weights: in a search, with an eps far above all gradients,
        it subtracts the gradient g itself, since lr g / (|g| + eps) is g for lr = eps.
        """
        values = {"lr": _LARGE, "eps": _LARGE, "betas": (0.0, 0.0)} if self.searches else {}
        return {"params": [self.weights], **values}


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, and

    stage, not below hyper_parameters: 0 (default) for the search, 1 for the training after it, from
        a checkpoint of the search, runner.warmup_model_path. (PaddleRec's file comb_mask.npy is in
        the checkpoint here, with all that the search has learnt.)
    width, depth: of the MLP's hidden layers, default 700 and 5.
    grad_c, grad_mu: how fast weights of pairs go to 0, default 0.0005 and 0.8.
    embedding_size: PaddleRec's name of sparse_feature_dim, default 40.
    optimizer.gamma: no effect: it is the decay of a rate per fifth of an epoch.

    With num_inputs, as in PaddleRec's autofis, the inputs are "ids", that many, and label. Its
    pairs and n_col are the number of their pairs.

    Raises BadRequest: another stage, number of pairs, or optimizer than Adam.
    """
    hyper = HyperParameters(config, sparse_feature_dim=40)
    if (stage := config.get("stage", 0)) not in (0, 1):
        raise BadRequest(f"stage: expected 0 or 1, found {stage!r}")
    rows = hyper.table(dim=1 + hyper.whole("embedding_size", hyper.dim))
    fields: FeatureVectors | IdVectors
    if has_ids := hyper.get("num_inputs") is not None:
        fields = IdVectors(rows, num_inputs=hyper.whole("num_inputs", 39, least=2))
    else:
        fields = FeatureVectors(rows, **hyper.inputs())
    num_pairs = fields.num_inputs * (fields.num_inputs - 1) // 2
    for key in ("pairs", "n_col"):
        hyper.fixed(key, num_pairs, f"the pairs of {fields.num_inputs} inputs")
    pairs = PairWeights(
        num_pairs,
        searches=stage == 0,
        c=hyper.number("grad_c", 5e-4, may_be_zero=True),
        mu=hyper.number("grad_mu", 0.8, may_be_zero=True),
    )
    layers = (hyper.whole("width", 700),) * hyper.whole("depth", 5)
    model = AutoFIS(fields, pairs, layers=layers)
    schema = Schema([Sparse("ids"), Label("label")]) if has_ids else None
    label = "label" if has_ids else "click"
    recipe = click_recipe(model, hyper, label=label, schema=schema)
    return replace(recipe, optimizer=_optimizer(model, recipe.optimizer))


def _optimizer(model: AutoFIS, configured: torch.optim.Optimizer | None) -> torch.optim.Adam:
    """The configured Adam with a group for the weights of pairs."""
    if not isinstance(configured, torch.optim.Adam):
        raise BadRequest(
            "hyper_parameters.optimizer.class: expected Adam with autofis, found"
            f" {type(configured).__name__}"
        )
    own = model.pairs.weights
    others = [parameter for parameter in model.parameters() if parameter is not own]
    return torch.optim.Adam([{"params": others}, model.pairs.group()], lr=configured.defaults["lr"])
