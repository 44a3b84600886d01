"""TiSASRec: the next item of a sequence, by attention that knows the places of events and the time
between each two of them.

Source: Li et al., "Time Interval Aware Self-Attention for Sequential Recommendation", WSDM 2020.

PaddleRec's network lets events look at the padding before the sequence, too.

Shapes: B examples, L places of a sequence, D floats, H heads, C candidates.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Dense, Field, Schema, Sparse
from trireme.metrics import TopK
from trireme.models.columns import PLACE, expect_same_sizes, first_is_right, ids_of, numbers_of
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.layers import check_heads
from trireme.models.sequences import SequenceRows, Sequences
from trireme.table import Table
from trireme.train.recipe import Evaluation, Recipe

SEQUENCE, TIMES, NEXT, OTHERS, CANDIDATES = "seq", "time_matrix", "pos", "neg", "item_idx"
_NUM_CANDIDATES = 101


class TimeAttention(nn.Module):
    """Attention of each place to those up to it, with keys and values of places and of times.

    weights = softmax(q_i (k_j + place key_j + time key_ij) / sqrt(D / H)), and the output of place
    i is the sum over j of weight_ij (v_j + place value_j + time value_ij).

    Raises BadRequest: D is no multiple of `heads`.
    """

    def __init__(self, dim: int, *, heads: int, dropout: float) -> None:
        super().__init__()
        check_heads("TimeAttention", dim, heads)
        self.heads, self.scale = heads, (heads / dim) ** 0.5
        self.query, self.keys_values = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, queries_BLD: Tensor, x_BLD: Tensor, places: Tensor, times: Tensor, is_seen: Tensor
    ) -> Tensor:
        """(B, L, D).

        Args:
            places: (L, 2 D) keys and values. times: (B, L, L, 2 D). is_seen: (B, L, L) bool.
        """
        by_head = partial(torch.Tensor.unflatten, dim=-1, sizes=(self.heads, -1))
        queries = by_head(self.query(queries_BLD))
        keys, values = map(by_head, (self.keys_values(x_BLD) + places).chunk(2, 2))
        time_keys, time_values = map(by_head, times.chunk(2, 3))
        scores_BHLL = torch.einsum("bihd,bjhd->bhij", queries, keys)
        scores_BHLL = scores_BHLL + torch.einsum("bihd,bijhd->bhij", queries, time_keys)
        lowest = torch.finfo(scores_BHLL.dtype).min
        scores_BHLL = (scores_BHLL * self.scale).masked_fill(~is_seen[:, None], lowest)
        weights = self.dropout(torch.softmax(scores_BHLL, 3))
        out = torch.einsum("bhij,bjhd->bihd", weights, values)
        return (out + torch.einsum("bhij,bijhd->bihd", weights, time_values)).flatten(2)


class Block(nn.Module):
    """Attention, and a hidden layer, each added to what it normalizes."""

    def __init__(self, dim: int, *, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = TimeAttention(dim, heads=heads, dropout=dropout)
        self.norms = nn.ModuleList(nn.LayerNorm(dim, eps=1e-8) for _ in range(2))
        self.hidden = nn.Sequential(
            *(nn.Linear(dim, dim), nn.Dropout(dropout), nn.ReLU()),
            *(nn.Linear(dim, dim), nn.Dropout(dropout)),
        )

    def forward(self, x: Tensor, places: Tensor, times: Tensor, is_seen: Tensor) -> Tensor:
        queries = self.norms[0](x)
        x = self.norms[1](queries + self.attention(queries, x, places, times, is_seen))
        out: Tensor = x + self.hidden(x)
        return out


class Sequence(nn.Module):
    """The (B, L, D) states of sequences, whose key 0 is padding, before or behind them, and which
    of them are those of events.

    Args:
        items: table of dim D. length: L. time_span: the longest time, in units of the reader; a
            longer one counts as this.
        num_blocks, heads: blocks, and heads of each. dropout: in training.
    """

    def __init__(
        self,
        items: Table,
        *,
        length: int = 50,
        time_span: int = 256,
        num_blocks: int = 2,
        heads: int = 1,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        dim = items.width
        self.events = SequenceRows(items, column=SEQUENCE, length=length)
        self.places = nn.Parameter(torch.randn(length, 2 * dim) / dim**0.5)
        self.times = nn.Parameter(torch.randn(time_span + 1, 2 * dim) / dim**0.5)
        self.blocks = nn.ModuleList(
            Block(dim, heads=heads, dropout=dropout) for _ in range(num_blocks)
        )
        self.dropout, self.norm = nn.Dropout(dropout), nn.LayerNorm(dim, eps=1e-8)

    def forward(self, batch: Batch) -> Sequences:
        rows_BLD, is_there_BL = self.events(batch)
        length = rows_BLD.shape[1]
        # A place without an event looks at itself; what it makes of that is left out.
        causal_LL = torch.ones(length, length, device=rows_BLD.device, dtype=torch.bool).tril()
        itself_LL = torch.eye(length, device=rows_BLD.device, dtype=torch.bool)
        is_seen = (causal_LL & is_there_BL[:, None]) | itself_LL
        kept = is_there_BL[:, :, None].to(rows_BLD.dtype)
        times_BN = numbers_of(batch, TIMES, length * length)
        times_BLL = torch.unflatten(times_BN.long(), 1, (length, length))
        # As in the paper, all times from time_span on are one; the order of the two is left out.
        times_BLL = times_BLL.abs().clamp(max=len(self.times) - 1)
        times = self.dropout(self.times[times_BLL])
        places = self.dropout(self.places)
        x = self.dropout(rows_BLD * rows_BLD.shape[2] ** 0.5) * kept
        for block in self.blocks:
            x = block(x, places, times, is_seen) * kept
        return Sequences(self.norm(x), is_there_BL)


class TiSAS(nn.Module):
    """Logits of the item that followed each event, and of another item: <state, item>.

    Columns: "seq", "pos" and "neg", L ids each; "time_matrix", the L * L times.
    """

    def __init__(self, items: Table, sequence: Sequence) -> None:
        super().__init__()
        self.sequence = sequence
        length = sequence.events.length
        self.next, self.others = (
            SequenceRows(items, column=name, length=length) for name in (NEXT, OTHERS)
        )

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """(B, L) "right" and "wrong"."""
        expect_same_sizes(batch, (SEQUENCE, NEXT, OTHERS))
        states = self.sequence(batch).rows
        rows = (part(batch).rows for part in (self.next, self.others))
        right, wrong = ((states * part).sum(2) for part in rows)
        return {"right": right, "wrong": wrong}


class NextItem(nn.Module):
    """The (B, C) logits of candidates for what follows the last event."""

    def __init__(self, items: Table, sequence: Sequence) -> None:
        super().__init__()
        self.sequence = sequence
        self.candidates = SequenceRows(items, column=CANDIDATES, length=_NUM_CANDIDATES)

    def forward(self, batch: Batch) -> Tensor:
        states_BLD, is_there_BL = self.sequence(batch)
        examples_B, places_L = (
            torch.arange(size, device=states_BLD.device) for size in is_there_BL.shape
        )
        last_B = (is_there_BL * places_L).amax(1)
        rows_BCD = self.candidates(batch).rows
        return torch.einsum("bcd,bd->bc", rows_BCD, states_BLD[examples_B, last_B])


@dataclass(frozen=True)
class PairLoss:
    """The log losses of right and of wrong items, over the events that something followed."""

    length: int

    def __call__(self, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
        is_there = ids_of(batch, NEXT, self.length) != 0
        log = nn.functional.logsigmoid
        losses = -(log(outputs["right"]) + log(-outputs["wrong"])) * is_there
        return losses.sum() / is_there.sum().clamp(min=1)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    hidden_units: floats per row of the table "item", default 50. maxlen: of sequences, default 50.
    time_span: the longest time between two events, default 256; a longer one counts as this.
    num_blocks, num_heads: blocks of attention, default 2; heads of each, default 1.
    dropout_rate: default 0.2.

    Inputs: seq; time_matrix, between each two of its events; pos, what followed each; neg,
    something else. Of an evaluation, with runner.mode test for the reader: seq, time_matrix, and
    item_idx, 101 candidates of which the first is right.
    """
    hyper = HyperParameters(config)
    length = hyper.whole("maxlen", 50)
    items = hyper.table("item", dim=hyper.whole("hidden_units", 50))
    sequence = Sequence(
        items,
        length=length,
        time_span=hyper.whole("time_span", 256),
        num_blocks=hyper.whole("num_blocks", 2),
        heads=hyper.whole("num_heads", 1),
        dropout=hyper.share("dropout_rate", 0.2),
    )
    model = TiSAS(items, sequence)
    inputs: list[Field] = [Sparse(SEQUENCE), Dense(TIMES, length * length)]
    return hyper.recipe(
        model,
        PairLoss(length),
        schema=Schema([*inputs, Sparse(NEXT), Sparse(OTHERS)]),
        evaluation=Evaluation(
            model=NextItem(items, sequence),
            metrics=[TopK(10, label=PLACE)],
            schema=Schema([*inputs, Sparse(CANDIDATES)]),
            prepare=first_is_right,
            reader_config={"runner.mode": "test"},
        ),
    )
