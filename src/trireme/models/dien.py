"""DIEN: a GRU finds the interests in a history, and a second one, whose steps are as large as they
are relevant to the candidate, follows how they evolve.

Source: Zhou et al., "Deep Interest Evolution Network for Click-Through Rate Prediction", AAAI 2019.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Label, Schema, Sparse
from trireme.metrics import AUC
from trireme.models.columns import expect_same_sizes
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.layers import mlp
from trireme.models.losses import ClickAndAuxiliaryLoss
from trireme.models.sequences import EventRows, Sequences, shares_of
from trireme.nn import EmbeddingBag
from trireme.table import Table
from trireme.train.recipe import Recipe

HISTORY = ("hist_item_seq", "hist_cat_seq")
TARGET = ("target_item", "target_cat")
MORE = ("mask", "target_item_seq", "target_cat_seq")
NOT_CLICKED = ("neg_hist_item_seq", "neg_hist_cat_seq")


class AttentionGRU(nn.Module):
    """A GRU whose update gate is multiplied by the attention of each step (AUGRU): its states.

    The paper's candidate state is tanh(W x + r * (U h)), with the reset gate r behind the matrix;
    here, as in the authors' code, it is tanh(W x + U (r * h)).

    A step with attention 0 leaves the state as it is; with 1 it is that of a GRU. So a mask in
    place of the attention makes a GRU that leaves out padding.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gates = mlp([2 * dim, 2 * dim])
        self.candidate = mlp([2 * dim, dim])

    def forward(self, inputs_BLD: Tensor, attention_BL: Tensor) -> Tensor:
        """(B, L, D)."""
        state, states = torch.zeros_like(inputs_BLD[:, 0]), []
        for x, attention in zip(inputs_BLD.unbind(1), attention_BL.unbind(1), strict=True):
            update, reset = torch.sigmoid(self.gates(torch.cat([x, state], 1))).chunk(2, 1)
            new = torch.tanh(self.candidate(torch.cat([x, reset * state], 1)))
            step = attention[:, None] * update
            state = (1 - step) * state + step * new
            states.append(state)
        return torch.stack(states, 1)


class DIEN(nn.Module):
    """logit = MLP(last state of the evolution, candidate), beside an auxiliary loss.

    The auxiliary loss is that of telling, from each state of the first GRU, the event that followed
    from one that did not. Key 0 is padding in both tables.

    Args:
        items, categories: tables of item ids and of category ids.
        length: events of a history; the ones behind are left out.
        layers: widths of the MLP's hidden layers.
    """

    def __init__(
        self, items: Table, categories: Table, *, length: int = 50, layers: Sequence[int] = (80, 40)
    ) -> None:
        super().__init__()
        tables = (items, categories)
        self.events = EventRows(tables, HISTORY, length=length)
        self.others = EventRows(tables, NOT_CLICKED, length=length)
        self.candidate = nn.ModuleList(
            EmbeddingBag(table, features=name, padding_key=0)
            for table, name in zip(tables, TARGET, strict=True)
        )
        dim = self.events.width
        self.interests = AttentionGRU(dim)
        self.relevance = nn.Linear(dim, dim, bias=False)
        self.evolution = AttentionGRU(dim)
        self.mlp = mlp([2 * dim, *layers, 1])

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """(B,) "click", a logit, and (B,) "auxiliary", a loss per event of the example."""
        expect_same_sizes(batch, (HISTORY[0], NOT_CLICKED[0]))
        events, others = self.events(batch), self.others(batch)
        candidate = torch.cat([part(batch).squeeze(1) for part in self.candidate], 1)
        states_BLD = self.interests(events.rows, events.is_there.to(events.rows.dtype))
        relevance_BL = (states_BLD @ self.relevance(candidate)[:, :, None]).squeeze(2)
        attention_BL = shares_of(relevance_BL, events.is_there)
        final_BD = self.evolution(states_BLD, attention_BL)[:, -1]
        click = self.mlp(torch.cat([final_BD, candidate], 1)).squeeze(1)
        return {"click": click, "auxiliary": _auxiliary(states_BLD, events, others)}


def _auxiliary(states_BLD: Tensor, events: Sequences, others: Sequences) -> Tensor:
    """The mean over the events from the second on, of each example."""
    log = nn.functional.logsigmoid
    before = states_BLD[:, :-1]
    right = log((before * events.rows[:, 1:]).sum(2))
    wrong = log(-(before * others.rows[:, 1:]).sum(2))
    is_there = events.is_there[:, 1:]
    return -((right + wrong) * is_there).sum(1) / is_there.sum(1).clamp(min=1)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    item_emb_size, cat_emb_size: floats per row of the tables "item" and "category", default 64.
    max_len: events of a history, default 50.
    fc_sizes: widths of the hidden layers, default 80, 40.
    auxiliary_w: weight of the auxiliary loss, default 1.

    Inputs: hist_item_seq, hist_cat_seq, target_item, target_cat, label, neg_hist_item_seq,
    neg_hist_cat_seq: a history, the candidate, and for each event one that did not happen.
    use_DataLoader: PaddleRec's mask, and the candidate repeated along the history, come after the
    label. The model does not need them: key 0 is what the mask marks.
    """
    hyper = HyperParameters(config)
    model = DIEN(
        hyper.table("item", dim=hyper.whole("item_emb_size", 64)),
        hyper.table("category", dim=hyper.whole("cat_emb_size", 64)),
        length=hyper.whole("max_len", 50, least=2),
        layers=hyper.sizes("fc_sizes", (80, 40)),
    )
    more = MORE if hyper.flag("use_DataLoader", False) else ()
    sparse = map(Sparse, (*HISTORY, *TARGET))
    schema = Schema([*sparse, Label("label"), *map(Sparse, (*more, *NOT_CLICKED))])
    return hyper.recipe(
        model,
        ClickAndAuxiliaryLoss(hyper.number("auxiliary_w", 1.0, may_be_zero=True)),
        label=None,
        schema=schema,
        metrics=[AUC(output="click", label="label")],
    )
