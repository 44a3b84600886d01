"""DSIN: a transformer finds the interest in each session of a user, an LSTM follows it from one
session to the next, and the candidate attends to both.

Source: Feng et al., "Deep Session Interest Network for Click-Through Rate Prediction", IJCAI 2019.

PaddleRec's network lets padding within a session take part, has no biases in the transformer, and
an L2 penalty of 1e-6 on rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Dense, Label, Schema, Sparse
from trireme.initializer import Normal
from trireme.models.columns import SplitIds, ids_of, tensor_of
from trireme.models.hyper_parameters import HyperParameters, click_recipe
from trireme.models.inputs import Vocabularies
from trireme.models.layers import TransformerLayer, compared, mlp
from trireme.models.sequences import shares_of
from trireme.nn import Embedding
from trireme.table import Table
from trireme.train.recipe import Recipe

CATEGORY, BRAND = "cate_id", "brand"
FEATURES = (
    *("userid", "adgroup_id", "pid", "cms_segid", "cms_group_id", "final_gender_code"),
    *("age_level", "pvalue_level", "shopping_level", "occupation", "new_user_class_level"),
    *("campaign_id", "customer", CATEGORY, BRAND),
)
_SESSIONS, _EVENTS = 5, 10
_PLACES = {CATEGORY: "session_cate", BRAND: "session_brand"}


class SessionAttention(nn.Module):
    """The sum of the interests of the sessions, with shares by their relevance to the candidate."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.relevance = mlp([4 * dim, 64, 16, 1], activation=nn.Sigmoid)

    def forward(self, candidate_BD: Tensor, interests_BSD: Tensor, is_there_BS: Tensor) -> Tensor:
        pairs = compared(candidate_BD[:, None].expand_as(interests_BSD), interests_BSD)
        shares_BS = shares_of(self.relevance(pairs).squeeze(2), is_there_BS)
        return torch.einsum("bs,bsd->bd", shares_BS, interests_BSD)


class DSIN(nn.Module):
    """logit = MLP(rows of all features, price, attended interests, attended states of the LSTM).

    An event is a category and a brand; key 0 is padding. Shapes: S sessions, E events of each, D
    floats of an event.

    Columns: FEATURES, one id each; "price"; "session_cate" and "session_brand", (B, S * E) ids;
    "sess_length", how many of the sessions there are.

    tables: of FEATURES. heads: of the transformer. inner: width of its hidden layer. layers: widths
    of the MLP's hidden layers.
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        *,
        heads: int = 8,
        inner: int = 64,
        layers: Sequence[int] = (200, 80),
    ) -> None:
        super().__init__()
        self.features = Vocabularies(tables, _PLACES)
        self.candidate = Vocabularies({name: tables[name] for name in _PLACES}, _PLACES)
        self.events = nn.ModuleList(
            Embedding(tables[name], features=place, padding_key=0)
            for name, place in _PLACES.items()
        )
        dim = self.candidate.width
        self.places = nn.Parameter(torch.randn(_EVENTS, dim))
        self.transformer = TransformerLayer(dim, heads=heads, inner=inner, dropout=0.0)
        self.lstm = nn.LSTM(dim, dim, num_layers=2, bidirectional=True, batch_first=True)
        self.attention = nn.ModuleList(SessionAttention(dim) for _ in range(2))
        self.mlp = mlp([self.features.width + 1 + 2 * dim, *layers, 1], activation=nn.Sigmoid)

    def forward(self, batch: Batch) -> Tensor:
        """(B,) logits."""
        interests_BSD = self._interests(batch)
        states_BSD = torch.stack(self.lstm(interests_BSD)[0].chunk(2, 2)).mean(0)
        places_S = torch.arange(_SESSIONS, device=interests_BSD.device)
        is_there_BS = places_S < tensor_of(batch, "sess_length")[:, None]
        candidate_BD = self.candidate(batch)
        attended = [
            part(candidate_BD, x, is_there_BS)
            for part, x in zip(self.attention, (interests_BSD, states_BSD), strict=True)
        ]
        x = torch.cat([self.features(batch), tensor_of(batch, "price"), *attended], 1)
        logits: Tensor = self.mlp(x)
        return logits.squeeze(1)

    def _interests(self, batch: Batch) -> Tensor:
        """(B, S, D): of each session the mean over its events, zeros without any."""
        rows = torch.cat([part(batch) for part in self.events], 2)
        num = rows.shape[0]
        events = rows.reshape(num * _SESSIONS, _EVENTS, rows.shape[2])
        is_there = (tensor_of(batch, _PLACES[CATEGORY]) != 0).view(num * _SESSIONS, _EVENTS)
        x = self.transformer(events * events.shape[2] ** 0.5 + self.places, is_there)
        weights = is_there / is_there.sum(1, keepdim=True).clamp(min=1)
        means_ND = torch.einsum("ne,ned->nd", weights.to(x.dtype), x)
        return means_ND.view(num, _SESSIONS, rows.shape[2])


def split(batch: Batch) -> Batch:
    """The batch with a column for each vocabulary, of "sparse_input", the ids of FEATURES, and
    "sess_input", the categories, then the brands of each session.
    """
    sessions = ids_of(batch, "sess_input", _SESSIONS * 2 * _EVENTS).view(-1, _SESSIONS, 2, _EVENTS)
    events = dict(zip(_PLACES.values(), sessions.unbind(2), strict=True))
    columns = {**batch.columns, **{name: part.flatten(1) for name, part in events.items()}}
    return SplitIds("sparse_input", FEATURES)(Batch(columns, batch.bags))


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    feat_embed_size: floats per row, default 4; twice that is a multiple of the 8 heads. Each of the
        fifteen features has a table of its name.

    Inputs: sparse_input, the fifteen ids; price; sess_input, five sessions of ten categories and
    ten brands each; sess_length; label.
    """
    hyper = HyperParameters(config)
    dim = hyper.whole("feat_embed_size", 4)
    start = Normal(std=1e-4)
    model = DSIN({name: hyper.table(name, dim=dim, initializer=start) for name in FEATURES})
    schema = Schema(
        [
            *(Sparse("sparse_input"), Dense("price"), Sparse("sess_input")),
            *(Label("sess_length"), Label("label")),
        ]
    )
    recipe = click_recipe(model, hyper, label="label", schema=schema)
    return replace(recipe, prepare=split, files_are_one=True)
