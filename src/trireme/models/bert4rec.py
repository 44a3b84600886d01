"""BERT4Rec: the masked items of a sequence, by a transformer that sees the others on both sides.

Source: Sun et al., "BERT4Rec: Sequential Recommendation with Bidirectional Encoder Representations
from Transformer", CIKM 2019.

PaddleRec's network adds a row for the kind of a sequence, of which there is one.

Shapes: S sequences of L places, D floats, M masked places, V items.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Schema, Sparse
from trireme.errors import BadRequest
from trireme.initializer import Constant, Normal
from trireme.metrics import TopK
from trireme.models.columns import (
    ALL_ITEMS,
    PLACE,
    AllIds,
    examples_of,
    expect_same_sizes,
    expect_sizes,
    expect_within,
    first_is_right,
    ragged_of,
    values_of,
)
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.layers import TransformerLayer
from trireme.nn import Embedding
from trireme.table import Table
from trireme.train.recipe import Evaluation, Recipe

IDS, PLACES, IS_THERE = "src_ids", "pos_ids", "input_mask"
MASKED, ANSWERS = "mask_pos", "mask_label"
CANDIDATES = "candidates"
_ACTIVATIONS: Mapping[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU}


class MaskedStates(nn.Module):
    """The (M, D) states of the masked places of all sequences.

    An example is one sequence, or several behind each other: "src_ids", "pos_ids" and "input_mask",
    L values for each, and "mask_pos", the masked places among the example's.

    Args:
        items: table of dim D. length: L. num_layers, heads: layers, and heads of each.
        dropout: of the rows; attention_dropout: within the layers. spread: standard deviation of
            the first weights.
    """

    def __init__(
        self,
        items: Table,
        *,
        length: int = 50,
        num_layers: int = 2,
        heads: int = 2,
        activation: type[nn.Module] = nn.GELU,
        dropout: float = 0.5,
        attention_dropout: float = 0.2,
        spread: float = 0.02,
    ) -> None:
        super().__init__()
        dim = items.width
        self.items, self.length = Embedding(items, features=IDS, padding_key=0), length
        self.places = nn.Parameter(spread * torch.randn(length, dim))
        self.first = nn.Sequential(nn.LayerNorm(dim), nn.Dropout(dropout))
        self.layers = nn.ModuleList(
            TransformerLayer(
                dim, heads=heads, inner=4 * dim, dropout=attention_dropout, activation=activation
            )
            for _ in range(num_layers)
        )
        self.last = nn.Sequential(nn.Linear(dim, dim), activation(), nn.LayerNorm(dim))
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=spread)
                nn.init.zeros_(part.bias)

    def forward(self, batch: Batch) -> Tensor:
        """Raises BadRequest: sequences of another length, or places outside of them."""
        expect_same_sizes(batch, (IDS, PLACES, IS_THERE))
        sizes_B = ragged_of(batch, IDS).offsets.diff()
        if not torch.compiler.is_compiling() and (sizes_B % self.length).any():
            raise BadRequest(
                f"MaskedStates: expected sequences of {self.length} in {IDS!r}, found examples of"
                f" {int(sizes_B.min())} to {int(sizes_B.max())} ids"
            )
        length = "the sequences have by hyper_parameters._max_position_seq_len"
        expect_within(batch, PLACES, self.length, length)
        rows_ND: Tensor = self.items(batch)
        places_SL = values_of(batch, PLACES).view(-1, self.length)
        x = self.first(rows_ND.view(-1, self.length, rows_ND.shape[1]) + self.places[places_SL])
        is_there_SL = values_of(batch, IS_THERE).view(-1, self.length) != 0
        for layer in self.layers:
            x = layer(x, is_there_SL)
        out: Tensor = self.last(x.flatten(0, 1)[_places_of_all(batch)])
        return out


def _places_of_all(batch: Batch) -> Tensor:
    """The masked places, counted from the first id of the batch."""
    ids, places_M = ragged_of(batch, IDS), values_of(batch, MASKED)
    example_M = examples_of(ragged_of(batch, MASKED).offsets, places_M.shape[0])
    expect_within(batch, MASKED, ids.offsets.diff()[example_M], "its example has ids")
    return places_M + (ids.offsets - ids.offsets[0])[example_M]


class BERT4Rec(nn.Module):
    """The (M, V) logits of all items for the masked places: <state, row> + bias.

    items, biases: tables of dim D and 1. Columns: as of MaskedStates; "all_items", which
    AllIds adds.
    """

    def __init__(self, items: Table, biases: Table, states: MaskedStates) -> None:
        super().__init__()
        self.states = states
        self.rows = Embedding(items, features=ALL_ITEMS, padding_key=0)
        self.biases = Embedding(biases, features=ALL_ITEMS)

    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.states(batch) @ self.rows(batch).T + self.biases(batch).squeeze(1)
        return logits


class Ranking(nn.Module):
    """The (B, C) logits of the candidates of each example for its one masked place."""

    def __init__(self, items: Table, biases: Table, states: MaskedStates) -> None:
        super().__init__()
        self.states = states
        self.rows = Embedding(items, features=CANDIDATES, padding_key=0)
        self.biases = Embedding(biases, features=CANDIDATES)

    def forward(self, batch: Batch) -> Tensor:
        """Raises BadRequest: several masked places, or as many candidates in one example as not in
        another.
        """
        expect_sizes(batch, MASKED, 1)
        states_BD = self.states(batch)
        num, rows_ND = batch.num_examples, self.rows(batch)
        expect_sizes(batch, CANDIDATES, len(rows_ND) // max(num, 1))
        rows_BCD = rows_ND.view(num, -1, rows_ND.shape[1])
        biases_BC: Tensor = self.biases(batch).view(num, -1)
        return torch.einsum("bd,bcd->bc", states_BD, rows_BCD) + biases_BC


def masked_loss(logits_MV: Tensor, batch: Batch) -> Tensor:
    """The cross entropy of the items that were masked.

    Raises BadRequest: not as many answers, or some that are no items.
    """
    expect_same_sizes(batch, (MASKED, ANSWERS))
    expect_within(batch, ANSWERS, logits_MV.shape[1], "hyper_parameters._voc_size says")
    return nn.functional.cross_entropy(logits_MV, values_of(batch, ANSWERS))


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    optimizer.weight_decay: of the dense part, whose optimizer is AdamW; default 0.01.
    clip_by_norm: default 5.
    _voc_size: items, with padding (0) and the mask; default 54546. A step computes with all rows.
    _emb_size: floats per row of the table "item", default 64. The table "bias" has one.
    _max_position_seq_len: length of the sequences, default 50.
    _n_layer, _n_head: layers, default 2; heads, default 2. hidden_act: gelu (default) or relu.
    _dropout, _attention_dropout: of the rows, default 0.5; within the layers, default 0.2.
    _param_initializer: standard deviation of the first weights, default 0.02.

    Inputs: src_ids, pos_ids, input_mask, mask_pos, mask_label; of an evaluation also candidates, of
    which the first is right.

    Raises BadRequest: another hidden_act.
    """
    hyper = HyperParameters(config, clip_by_norm=5.0)
    spread = hyper.number("_param_initializer", 0.02)
    items = hyper.table("item", dim=hyper.whole("_emb_size", 64), initializer=Normal(std=spread))
    biases = hyper.table("bias", dim=1, initializer=Constant(0.0))
    states = MaskedStates(
        items,
        length=hyper.whole("_max_position_seq_len", 50),
        num_layers=hyper.whole("_n_layer", 2),
        heads=hyper.whole("_n_head", 2),
        activation=hyper.choice("hidden_act", "gelu", _ACTIVATIONS),
        dropout=hyper.share("_dropout", 0.5),
        attention_dropout=hyper.share("_attention_dropout", 0.2),
        spread=spread,
    )
    model = BERT4Rec(items, biases, states)
    inputs = [*map(Sparse, (IDS, PLACES, IS_THERE, MASKED, ANSWERS))]
    return hyper.recipe(
        model,
        masked_loss,
        optimizer=torch.optim.AdamW(
            model.parameters(),
            lr=hyper.learning_rate,
            weight_decay=hyper.number("optimizer.weight_decay", 0.01, may_be_zero=True),
        ),
        label=None,
        schema=Schema(inputs),
        prepare=AllIds({ALL_ITEMS: hyper.whole("_voc_size", 54_546)}),
        evaluation=Evaluation(
            model=Ranking(items, biases, states),
            metrics=[TopK(10, label=PLACE)],
            schema=Schema([*inputs, Sparse(CANDIDATES)]),
            prepare=first_is_right,
            files_are_one=True,
        ),
    )
