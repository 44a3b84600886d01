"""DMR: the click on a candidate, by how relevant it is to a user, whose vector is learned beside by
predicting the last event of the history, and to the events of the history.

Source: Lyu et al., "Deep Match to Rank Model for Personalized Click-Through Rate Prediction", AAAI
2020.

PaddleRec's network has rows for padding, a slope (PReLU) for each hidden unit, and one behind the
logit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Dense, Schema
from trireme.errors import BadRequest
from trireme.metrics import AUC
from trireme.models.columns import tensor_of, with_items
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.inputs import Vocabularies
from trireme.models.layers import BatchNorm, compared, mlp
from trireme.models.losses import ClickAndAuxiliaryLoss
from trireme.models.sequences import shares_of
from trireme.nn import Embedding, EmbeddingBag
from trireme.table import Table
from trireme.train.recipe import Recipe

CATEGORY, BRAND, ALL = "cate_id", "brand", "all_categories"
PROFILE = (
    *("cms_segid", "cms_group_id", "final_gender_code", "age_level", "pvalue_level"),
    *("shopping_level", "occupation", "new_user_class_level"),
)
ITEM = ("adgroup_id", CATEGORY, "campaign_id", "customer", BRAND)
FEATURES = ("userid", *PROFILE, *ITEM, "price", "pid", "label")
HISTORY = ("btag_his", "cate_his", "brand_his", "mask", "match_mask")
_LENGTH = 50


@dataclass(frozen=True)
class Tables:
    """features: of FEATURES without price and label. actions, match_actions: of the kinds of events
    (clicked, bought, ...), for each of the two networks. categories: the vectors with which users
    are matched, of num_categories categories.
    """

    features: Mapping[str, Table]
    actions: Table
    match_actions: Table
    categories: Table
    num_categories: int


class Relevance(nn.Module):
    """The (B, L) scores of events for a query of each place: an MLP of the query's layer and the
    event, (B, L, Q) and (B, L, E).
    """

    def __init__(self, query: int, event: int, length: int) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(query, event), nn.PReLU(length, init=0.1))
        self.score = mlp([4 * event, 80, 40, 1], activation=nn.Sigmoid)

    def forward(self, query_BLQ: Tensor, events_BLE: Tensor) -> Tensor:
        scores: Tensor = self.score(compared(self.query(query_BLQ), events_BLE))
        return scores.squeeze(2)


class DMR(nn.Module):
    """logit = MLP(rows of all features, price, sum of the history, its product with the candidate,
    both relevances of the candidate, the attended history).

    User to item: attention by place and kind of event makes the user's vector, whose product with
    the category's is the relevance. Without the last event it must predict that one's category,
    among all: the auxiliary loss. Item to item: the relevance is the sum of the attention's scores.

    Columns: FEATURES, and HISTORY of (B, length) each; "all_categories", which SplitLine adds.

    length: events of a history, the last one at its end. layers: widths of the MLP's hidden layers.
    """

    def __init__(
        self, tables: Tables, *, length: int = _LENGTH, layers: Sequence[int] = (512, 256, 128)
    ) -> None:
        super().__init__()
        rows = tables.features
        self.features = Vocabularies(rows)
        self.candidate = Vocabularies({name: rows[name] for name in (CATEGORY, BRAND)})
        self.events = nn.ModuleList(
            Embedding(rows[name], features=column)
            for name, column in ((CATEGORY, "cate_his"), (BRAND, "brand_his"))
        )
        self.actions, self.match_actions = (
            Embedding(table, features="btag_his")
            for table in (tables.actions, tables.match_actions)
        )
        self.category = EmbeddingBag(tables.categories, features=CATEGORY)
        self.categories = Embedding(tables.categories, features=ALL)
        event, action = self.candidate.width, tables.actions.width
        self.places, self.match_places = (
            nn.Parameter(torch.empty(length, action).uniform_(-1, 1)) for _ in range(2)
        )
        self.to_user = Relevance(2 * action, event, length)
        self.to_events = Relevance(2 * action + event, event, length)
        # For the history without its last event, and for all of it.
        self.user = nn.Sequential(nn.Linear(event, tables.categories.width), nn.PReLU(2, init=0.1))
        width = self.features.width + 1 + 3 * event + 2
        self.norm = BatchNorm(width, eps=1e-3, momentum=0.01)
        self.mlp = mlp([width, *layers, 1], activation=nn.PReLU)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """(B,) "click", a logit, and (B,) "auxiliary", the loss of predicting the last event."""
        events_BLE = torch.cat([part(batch) for part in self.events], 2)
        is_there_BL = tensor_of(batch, "mask") != 0
        before_BD, user_BD = self._users(batch, events_BLE, is_there_BL).unbind(1)
        candidate_BE = self.candidate(batch)
        contexts = self._contexts(batch, self.actions, self.places)
        query = torch.cat([candidate_BE[:, None].expand_as(events_BLE), contexts], 2)
        scores_BL = self.to_events(query, events_BLE)
        attended_BE = torch.einsum("bl,ble->be", shares_of(scores_BL, is_there_BL), events_BLE)
        history_BE = torch.einsum("bl,ble->be", is_there_BL.to(events_BLE.dtype), events_BLE)
        parts = [
            *(self.features(batch), tensor_of(batch, "price")[:, None], history_BE),
            candidate_BE * history_BE,
            (user_BD * self.category(batch).squeeze(1)).sum(1, keepdim=True),
            (scores_BL * is_there_BL).sum(1, keepdim=True),
            attended_BE,
        ]
        click = self.mlp(self.norm(torch.cat(parts, 1))).squeeze(1)
        return {"click": click, "auxiliary": self._auxiliary(batch, before_BD)}

    def _contexts(self, batch: Batch, actions: nn.Module, places_LA: Tensor) -> Tensor:
        """The rows of place and kind of each event."""
        rows_BLA = actions(batch)
        return torch.cat([places_LA.expand_as(rows_BLA), rows_BLA], 2)

    def _users(self, batch: Batch, events_BLE: Tensor, is_there_BL: Tensor) -> Tensor:
        """(B, 2, D): the user before the last event, and behind it."""
        contexts = self._contexts(batch, self.match_actions, self.match_places)
        scores_BL = self.to_user(contexts, events_BLE)
        is_before_BL = torch.cat([is_there_BL[:, :-1], torch.zeros_like(is_there_BL[:, :1])], 1)
        shares = [shares_of(scores_BL, part) for part in (is_before_BL, is_there_BL)]
        users: Tensor = self.user(torch.stack(shares, 1) @ events_BLE)
        return users

    def _auxiliary(self, batch: Batch, before_BD: Tensor) -> Tensor:
        products_BV = before_BD @ self.categories(batch).T
        last_B = tensor_of(batch, "cate_his")[:, -1]
        loss_B = nn.functional.cross_entropy(products_BV.float(), last_B, reduction="none")
        # What the mask leaves out, before the last event, has no user to predict from.
        return loss_B * (tensor_of(batch, "match_mask")[:, -2] != 0)


@dataclass(frozen=True)
class SplitLine:
    """Makes columns of "line", the numbers of an example, and adds "all_categories".

    Raises BadRequest: a category that is none of num_categories.
    """

    num_categories: int

    def __call__(self, batch: Batch) -> Batch:
        sizes = [_LENGTH] * len(HISTORY) + [len(FEATURES)]
        *histories, rest = torch.split(tensor_of(batch, "line"), sizes, 1)
        columns = dict(zip(FEATURES, rest.T.contiguous().unbind(), strict=True))
        whole = {name: x.long() for name, x in columns.items() if name not in ("price", "label")}
        past = {name: x.long() for name, x in zip(HISTORY, histories, strict=True)}
        if (last := int(past["cate_his"].max())) >= self.num_categories:
            raise BadRequest(
                f"hyper_parameters.cate_size: expected above {last}, a category of a history, found"
                f" {self.num_categories}"
            )
        split = Batch({**columns, **whole, **past})
        return with_items(split, ALL, torch.arange(self.num_categories))


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    main_embedding_size: floats per row of the user, of what describes the item, and of the vectors
        of categories with which users are matched; default 32. other_embedding_size: of the other
        features, default 8. Each feature has a table of its name.
    cate_size: categories, default 12978: an id is below.

    Inputs: line, the 267 numbers of an example: 50 kinds of events, their categories, brands, and
    two masks; FEATURES. The auxiliary loss counts a tenth.
    """
    hyper = HyperParameters(config)
    main, other = hyper.whole("main_embedding_size", 32), hyper.whole("other_embedding_size", 8)
    num_categories = hyper.whole("cate_size", 12_978)
    wide = ("userid", *ITEM)
    features = [name for name in FEATURES if name not in ("price", "label")]
    model = DMR(
        Tables(
            {name: hyper.table(name, dim=main if name in wide else other) for name in features},
            actions=hyper.table("btag", dim=other),
            match_actions=hyper.table("match_btag", dim=other),
            categories=hyper.table("match_cate", dim=main),
            num_categories=num_categories,
        )
    )
    return hyper.recipe(
        model,
        ClickAndAuxiliaryLoss(0.1),
        schema=Schema([Dense("line", len(HISTORY) * _LENGTH + len(FEATURES))]),
        metrics=[AUC(output="click", label="label")],
        prepare=SplitLine(num_categories),
    )
