"""AutoInt: self-attention among the vectors of all inputs.

Source: Song et al., "AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural
Networks", CIKM 2019.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.inputs import FeatureVectors, ValuedVectors, valued_schema
from trireme.models.layers import SelfAttention, mlp
from trireme.table import Table
from trireme.train.recipe import Recipe


class AutoInt(nn.Module):
    """logit = bias + linear(attention layers(vectors)), plus the weights of the inputs if it is
    wide, plus MLP(vectors) if it has layers. With num_fields the vectors are ValuedVectors.

    Args, besides those of trireme.models.inputs:
        rows: table of dim D, or 1 + D if wide: the weight of an id, then its vector.
        attention: widths of the attention layers. heads: of each of them.
        residual, scaled: as of SelfAttention (trireme.models.layers).
        wide: whether there are weights of the inputs.
        layers: widths of the MLP's hidden layers; empty for no MLP.
    """

    def __init__(
        self,
        rows: Table,
        *,
        attention: Sequence[int] = (64, 64, 64),
        heads: int = 2,
        residual: bool = True,
        scaled: bool = False,
        wide: bool = False,
        layers: Sequence[int] = (),
        **inputs: Any,
    ) -> None:
        super().__init__()
        self.wide = wide
        is_valued = "num_fields" in inputs
        self.fields = ValuedVectors(rows, **inputs) if is_valued else FeatureVectors(rows, **inputs)
        num, dim = self.fields.num_inputs, rows.width - (1 if wide else 0)
        sizes = zip((dim, *attention), attention, strict=False)
        self.attention = nn.Sequential(
            *(SelfAttention(*size, heads=heads, residual=residual, scaled=scaled) for size in sizes)
        )
        self.head = mlp([num * attention[-1], 1])
        self.mlp = mlp([num * dim, *layers, 1]) if layers else None

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        fields = self.fields(batch)
        vectors = fields[:, :, 1:] if self.wide else fields
        logits: Tensor = self.head(self.attention(vectors).flatten(1)).squeeze(1)
        if self.wide:
            logits = logits + fields[:, :, 0].sum(1)
        return logits if self.mlp is None else logits + self.mlp(vectors.flatten(1)).squeeze(1)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters, and

    attn_layer_sizes: widths of the attention layers, default 64, 64, 64; head_num: heads of each,
        default 2; use_residual: default true; scaling: default false.
    use_wide: add a linear model, default false. fc_sizes: of an MLP beside, default none.
    embedding_dim: PaddleRec's name of sparse_feature_dim, default 16.

    With num_field, as in PaddleRec's autoint, the inputs are label, feat_idx and feat_value: that
    many ids and their values.
    """
    hyper = HyperParameters(config, sparse_feature_dim=16)
    is_wide, dim = hyper.flag("use_wide", False), hyper.whole("embedding_dim", hyper.dim)
    inputs, schema = hyper.inputs(), None
    if hyper.get("num_field") is not None:
        num = hyper.whole("num_field", 39)
        inputs = {"num_fields": num}
        schema = valued_schema(num)
    model = AutoInt(
        hyper.table(dim=dim + (1 if is_wide else 0)),
        attention=hyper.sizes("attn_layer_sizes", (64, 64, 64), least=1),
        heads=hyper.whole("head_num", 2),
        residual=hyper.flag("use_residual", True),
        scaled=hyper.flag("scaling", False),
        wide=is_wide,
        layers=hyper.sizes("fc_sizes", ()),
        **inputs,
    )
    label = "click" if schema is None else "label"
    return click_recipe(model, hyper, label=label, schema=schema)
