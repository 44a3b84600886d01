"""DeepFEFM: products of vectors through a matrix for each pair of fields, and an MLP over them.

Source: Pande, "Field-Embedded Factorization Machines for Click-through rate prediction", 2020.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.inputs import FeatureVectors
from trireme.models.layers import mlp
from trireme.table import Table
from trireme.train.recipe import Recipe


class DeepFEFM(nn.Module):
    """logit = bias + sum of w_i x_i + sum over i<j of p_ij + MLP(vectors, all p_ij), where
    p_ij = v_i^T (M_ij + M_ij^T) v_j x_i x_j.

    Each input, feature or dense number, is a field of its own. The table has dim 1 + D: the weight
    w of an id, then its vector v. layers: widths of the MLP's hidden layers; for the other
    arguments see trireme.models.inputs.
    """

    def __init__(
        self, rows: Table, *, layers: Sequence[int] = (1024, 1024, 1024), **inputs: Any
    ) -> None:
        super().__init__()
        self.fields = FeatureVectors(rows, **inputs)
        self.bias = nn.Parameter(torch.zeros(1))
        num, dim = self.fields.num_inputs, rows.width - 1
        num_pairs = num * (num - 1) // 2
        self.matrices_PDD = nn.Parameter(torch.randn(num_pairs, dim, dim) / math.sqrt(2 * dim))
        self.mlp = mlp([num * dim + num_pairs, *layers, 1])

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        fields = self.fields(batch)
        vectors = fields[:, :, 1:]
        num = self.fields.num_inputs
        first, second = torch.triu_indices(num, num, offset=1, device=vectors.device)
        symmetric_PDD = self.matrices_PDD + self.matrices_PDD.transpose(1, 2)
        mapped_BPD = torch.einsum("bpd,pde->bpe", vectors[:, first], symmetric_PDD)
        products_BP = (mapped_BPD * vectors[:, second]).sum(2)
        deep = self.mlp(torch.cat([vectors.flatten(1), products_BP], 1)).squeeze(1)
        logits: Tensor = self.bias + fields[:, :, 0].sum(1) + products_BP.sum(1) + deep
        return logits


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, and fc_sizes, the widths of the MLP's hidden
    layers (default 1024, 1024, 1024). A dense number is a factor of a learned vector, where
    PaddleRec's deepfefm makes ids of them.
    """
    hyper = HyperParameters(config)
    layers = hyper.sizes("fc_sizes", (1024, 1024, 1024))
    model = DeepFEFM(hyper.table(dim=1 + hyper.dim), layers=layers, **hyper.inputs())
    return click_recipe(model, hyper)
