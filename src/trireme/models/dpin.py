"""DPIN: the click on an item at each of the positions of a page, from what the user clicked there.

Source: Huang et al., "Deep Position-wise Interaction Network for CTR Prediction", SIGIR 2021.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Dense, Field, Label, Schema, Sparse
from trireme.errors import BadRequest
from trireme.metrics import AUC, GAUC
from trireme.models.columns import ragged_of
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.layers import TransformerLayer, mlp
from trireme.models.sequences import EventRows
from trireme.nn import EmbeddingBag
from trireme.table import Table
from trireme.train.recipe import Evaluation, Recipe

HISTORY = ("hist_item", "hist_cat")
TARGET = ("target_item", "target_cat")
POSITION = "target_pos"


class DPIN(nn.Module):
    """logit of position k = MLP(MLP(candidate), what the transformer makes of k, vector of k).

    The transformer sees, for each position, its vector and the mean of the events there, whose
    shares are exp(MLP(event)), element by element. A position without events has zeros.

    Columns: "hist_item" and "hist_cat", K * L ids each: at most L events of position 1, then those
    of position 2, ...; item 0 is padding. "target_item", "target_cat". "target_pos", 1 to K.

    PaddleRec's net attends to the padding too, and normalizes all positions of a layer together.

    Args:
        events: tables of the items and categories of events, of dim D each.
        candidates: tables of those of candidates, of dim D each.
        num_positions, length: K and L.
        size: floats of a position in the transformer. num_layers, heads: of it.
        base: widths of the layers of the candidate's MLP.
    """

    def __init__(
        self,
        events: tuple[Table, Table],
        candidates: tuple[Table, Table],
        *,
        num_positions: int = 3,
        length: int = 10,
        size: int = 64,
        num_layers: int = 12,
        heads: int = 2,
        base: Sequence[int] = (1024, 512, 128),
    ) -> None:
        super().__init__()
        dim, self.num_positions = events[0].width, num_positions
        # The items say what is padding: 0 may well be a category.
        self.events = EventRows(
            events, HISTORY, length=num_positions * length, padding_keys=(0, None)
        )
        self.candidate = nn.ModuleList(
            EmbeddingBag(table, features=name)
            for table, name in zip(candidates, TARGET, strict=True)
        )
        self.base = mlp([2 * dim, *base], activates_last=True)
        self.shares = mlp([2 * dim, 2 * dim, 2 * dim])
        self.before_KD, self.behind_KD = (
            nn.Parameter(torch.empty(num_positions, dim).uniform_(-0.5, 0.5)) for _ in range(2)
        )
        self.join = mlp([3 * dim, size], activates_last=True)
        self.transformer = nn.ModuleList(
            TransformerLayer(size, heads=heads, inner=size, dropout=0.0) for _ in range(num_layers)
        )
        self.head = mlp([base[-1] + size + dim, 128, 1])

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits of the candidates at their positions. Raises BadRequest: another position."""
        positions_B = self._positions(batch) - 1
        logits: Tensor = self.all_positions(batch).gather(1, positions_B[:, None])
        return logits.squeeze(1)

    def _positions(self, batch: Batch) -> Tensor:
        """(B,): 1 to K."""
        values, offsets_B1 = ragged_of(batch, POSITION)[:2]
        if torch.compiler.is_compiling():  # a graph cannot look at values
            return values
        positions_B = values[int(offsets_B1[0]) : int(offsets_B1[-1])]
        is_right = len(positions_B) == len(offsets_B1) - 1
        if not is_right or ((positions_B < 1) | (positions_B > self.num_positions)).any():
            raise BadRequest(
                f"DPIN: expected one {POSITION!r} from 1 to {self.num_positions} of each of"
                f" {len(offsets_B1) - 1} examples, found {positions_B.tolist()}"
            )
        return positions_B

    def all_positions(self, batch: Batch) -> Tensor:
        """(B, K) logits of the candidates at each position."""
        events = self.events(batch)
        num, places = events.is_there.shape
        split = (num, self.num_positions, places // self.num_positions, -1)
        events_BKLW = events.rows.view(split)
        is_there = events.is_there.view(split)
        shares = self.shares(events_BKLW).float()
        shares = shares.masked_fill(~is_there, torch.finfo(shares.dtype).min)
        interests_BKW = (torch.softmax(shares, 2) * is_there * events_BKLW).sum(2)
        x = self.join(torch.cat([self.before_KD.expand(num, -1, -1), interests_BKW], 2))
        everywhere = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        for layer in self.transformer:
            x = layer(x, everywhere)
        candidate = self.base(torch.cat([part(batch) for part in self.candidate], 2))
        parts = [candidate.expand(-1, self.num_positions, -1), x]
        logits: Tensor = self.head(torch.cat([*parts, self.behind_KD.expand(num, -1, -1)], 2))
        return logits.squeeze(2)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    K: positions, default 3. L: events of each, default 10.
    embedding_dim: floats per row of the tables "event_item", "event_category", "item" and
        "category", default 8.
    d_model, h: width of the transformer, default 64, and its heads, default 2.

    Inputs: hist_item, hist_cat, target_item, target_cat, target_pos, position (not needed: K
    numbers), label. An evaluation has the AUC within each position, too: pauc.
    """
    hyper = HyperParameters(config)
    num_positions, length = hyper.whole("K", 3), hyper.whole("L", 10)
    names = ("event_item", "event_category", "item", "category")
    tables = [hyper.table(name, dim=hyper.whole("embedding_dim", 8)) for name in names]
    model = DPIN(
        (tables[0], tables[1]),
        (tables[2], tables[3]),
        num_positions=num_positions,
        length=length,
        size=hyper.whole("d_model", 64),
        heads=hyper.whole("h", 2),
    )
    inputs: list[Field] = [*map(Sparse, (*HISTORY, *TARGET, POSITION))]
    inputs += [Dense("position", num_positions), Label("label")]
    log_loss = nn.functional.binary_cross_entropy_with_logits
    return hyper.recipe(
        model,
        log_loss,
        schema=Schema(inputs),
        metrics=[AUC()],
        evaluation=Evaluation(
            model=model, metrics=[AUC(), GAUC(POSITION, name="pauc")], label="label", loss=log_loss
        ),
    )
