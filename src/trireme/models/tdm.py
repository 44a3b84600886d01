"""TDM: items are the leaves of a tree; a user is led from its root to the items, by a model of
whether a node has what the user wants.

Source: Zhu et al., "Learning Tree-based Deep Model for Recommender Systems", KDD 2018.

Shapes: B examples, S nodes of an example, V nodes of the tree, N leaves, L levels from the first
one that is asked for, K nodes kept, W floats.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch, Ragged
from trireme.data.schema import Dense, Label, Schema, Sparse
from trireme.errors import BadRequest, DataError
from trireme.metrics import TopK
from trireme.models.columns import Draws, ids_of, tensor_of, with_items
from trireme.models.hyper_parameters import HyperParameters, file_of
from trireme.models.layers import mlp
from trireme.nn import Embedding
from trireme.table import Table
from trireme.train.recipe import Evaluation, Recipe

USER, LEAF = "user_item", "unit_id"
NODES, LABELS, ALL_NODES, PLACE = "nodes", "node_labels", "all_nodes", "leaf_place"


_META = b".tree_meta"
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TreeIndex:
    """The tree over items, as PaddleRec's tree_index_builder.py writes it. A node's code is its
    place in a whole tree, read row by row: the root is 0, the children of c are b c + 1 to b c + b.
    All leaves have one level.

    layers: of each level the codes of its nodes, ascending. leaf_ids: (N,) ids of the leaves, in
    the order of their codes. branch: b.
    """

    layers: tuple[Ints, ...]
    leaf_ids: Ints
    branch: int

    @classmethod
    def read(cls, path: Path) -> "TreeIndex":
        """The file is a row of 4-byte sizes with messages of that many bytes: (key, value). A value
        is a node (id, whether it is a leaf, ...) of the code that the key has in digits; one is
        (height, branch).

        Raises DataError: no such file, or another one.
        """
        try:
            content = path.read_bytes()
            nodes, branch = _nodes(content)
            leaves = sorted((code, number) for code, (number, is_leaf) in nodes.items() if is_leaf)
            layers = [np.array([code for code, _ in leaves], np.int64)]
            while layers[-1].max() > 0:
                layers.append(np.unique((layers[-1] - 1) // branch))
        except (OSError, ValueError, LookupError, ArithmeticError, struct.error) as error:
            raise DataError(f"TreeIndex: expected a tree in {path}, found none: {error}") from None
        if layers[-1].min() < 0:
            raise DataError(f"TreeIndex: expected leaves of one level in {path}, found others")
        return cls(tuple(layers[::-1]), np.array([n for _, n in leaves], np.int64), branch)

    def places(self, leaf_ids: Ints) -> Ints:
        """Their places among the leaves. Raises DataError: an id that no leaf has."""
        order = np.argsort(self.leaf_ids)
        nearest = np.searchsorted(self.leaf_ids, leaf_ids, sorter=order).clip(max=len(order) - 1)
        places: Ints = order[nearest]
        is_other = self.leaf_ids[places] != leaf_ids
        if is_other.any():
            raise DataError(f"TreeIndex: expected ids of leaves, found {leaf_ids[is_other][0]}")
        return places

    def paths(self, places: Ints, first: int) -> Ints:
        """(n, L): the codes from the level `first` to these leaves."""
        codes = [self.layers[-1][places]]
        while len(codes) < len(self.layers) - first:
            codes.append((codes[-1] - 1) // self.branch)
        return np.stack(codes[::-1], 1)


def _nodes(content: bytes) -> tuple[dict[int, tuple[int, bool]], int]:
    """(id, whether it is a leaf) by code, and the branch."""
    nodes, branch, at = {}, 2, 0
    while at < len(content):
        (size,) = struct.unpack_from("<i", content, at)
        if not 0 < size <= len(content) - at - 4:
            raise ValueError(f"a message of {size} bytes at byte {at} of {len(content)}")
        message = dict(_fields(content[at + 4 : at + 4 + size]))
        value = dict(_fields(message[2]))
        if message[1] == _META:
            branch = int(value[2])
        else:
            nodes[int(message[1])] = (int(value[1]), bool(value[2]))
        at += 4 + size
    if branch < 2:
        raise ValueError(f"nodes with {branch} children")
    return nodes, branch


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The numbers and the values of the fields of a protobuf message."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value: Any
            value, at = _varint(message, at)
        elif kind == 2:
            size, at = _varint(message, at)
            value, at = message[at : at + size], at + size
        elif kind == 5:
            value, at = message[at : at + 4], at + 4
        else:
            raise ValueError(f"a field of kind {kind}")
        yield tag >> 3, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


class TDM(nn.Module):
    """logit of a node = MLP(u * n, u - n, <u, n>), with u = tanh(linear(user)), n the node's row.

    Columns: "user_item", numbers of the user; "nodes", as many of each example, which
    LayerSamples adds.

    Args:
        nodes: table of the nodes' codes, of dim W. width: of the column of the user.
    """

    def __init__(self, nodes: Table, *, width: int = 128) -> None:
        super().__init__()
        self.nodes = Embedding(nodes, features=NODES)
        self.user = nn.Sequential(nn.Linear(width, nodes.width), nn.Tanh())
        self.mlp = mlp([2 * nodes.width + 1, nodes.width, 1])

    def forward(self, batch: Batch) -> Tensor:
        """(B, S) logits."""
        user_BW = self.user(tensor_of(batch, USER))
        return _logits(self.mlp, user_BW, self.nodes(batch).unflatten(0, (user_BW.shape[0], -1)))


def _logits(layers: nn.Module, user_BW: Tensor, nodes_BSW: Tensor) -> Tensor:
    user = user_BW[:, None]
    product = user * nodes_BSW
    parts = [product, user - nodes_BSW, product.sum(2, keepdim=True)]
    return cast(Tensor, layers(torch.cat(parts, 2)).squeeze(2))


class BeamSearch(nn.Module):
    """The (B, N) logits of the leaves that are reached by the children of the K best nodes of each
    level; the lowest number for others.

    Columns: "user_item"; "all_nodes", which AllNodes adds: the codes of all levels.

    The search begins with the first level of more than K nodes, or with the leaves.
    """

    below: Tensor

    def __init__(self, model: TDM, tree: TreeIndex, *, keep: int) -> None:
        super().__init__()
        self.user, self.mlp = model.user, model.mlp
        self.keep, self.sizes = keep, [len(layer) for layer in tree.layers]
        self.nodes = Embedding(model.nodes.table, features=ALL_NODES)
        codes_V = np.concatenate(tree.layers)
        codes = codes_V[:, None] * tree.branch + 1 + np.arange(tree.branch)
        places = np.searchsorted(codes_V, codes).clip(max=len(codes_V) - 1)
        places = np.where(codes_V[places] == codes, places, -1)
        # (V, b) places of the children among all nodes, -1 for none. Every process reads the tree.
        self.register_buffer("below", torch.from_numpy(places), persistent=False)

    def forward(self, batch: Batch) -> Tensor:
        user_BW, rows_VW = self.user(tensor_of(batch, USER)), self.nodes(batch)
        last = len(self.sizes) - 1
        level = next((i for i, size in enumerate(self.sizes) if size > self.keep), last)
        begin, num_leaves = sum(self.sizes[:level]), self.sizes[-1]
        places = torch.arange(begin, begin + self.sizes[level], device=rows_VW.device)
        found_BC = places.expand(user_BW.shape[0], -1)
        for _ in range(level, last):
            logits_BC = self._scores(user_BW, rows_VW, found_BC)
            best_BK = logits_BC.topk(min(self.keep, logits_BC.shape[1]), 1).indices
            chosen_BK = found_BC.gather(1, best_BK)
            # What is no node has no children: place -1 reads the last leaf's, which are none.
            found_BC = self.below[chosen_BK].flatten(1)
        logits_BC = self._scores(user_BW, rows_VW, found_BC)
        lowest = torch.finfo(logits_BC.dtype).min
        scores = logits_BC.new_full((user_BW.shape[0], num_leaves + 1), lowest)
        # What is no node goes behind the leaves.
        leaves_BC = torch.where(
            found_BC < 0, num_leaves, found_BC - (rows_VW.shape[0] - num_leaves)
        )
        return scores.scatter(1, leaves_BC, logits_BC)[:, :-1]

    def _scores(self, user_BW: Tensor, rows_VW: Tensor, places_BC: Tensor) -> Tensor:
        logits = _logits(self.mlp, user_BW, rows_VW[places_BC])
        return logits.masked_fill(places_BC < 0, torch.finfo(logits.dtype).min)


@dataclass(frozen=True)
class LayerSamples:
    """Adds "nodes" and "node_labels" to a batch: of each level from `first` on the node on the path
    to the example's leaf, label 1, then drawn other ones, label 0.

    counts: nodes drawn of a level, but for those of one node.
    """

    tree: TreeIndex
    first: int
    counts: tuple[int, ...]
    draws: Draws = field(default_factory=Draws)

    def __call__(self, batch: Batch) -> Batch:
        paths_BL = self.tree.paths(_leaf_places(batch, self.tree), self.first)
        draw, num = self.draws.of(batch), len(paths_BL)
        parts, labels = [], []
        levels = zip(self.tree.layers[self.first :], paths_BL.T, self.counts, strict=True)
        for codes, right, count in levels:
            places = np.searchsorted(codes, right)[:, None]
            drawn = count if len(codes) > 1 else 0
            others = draw.integers(0, max(len(codes) - 1, 1), (num, drawn))
            parts.append(codes[np.hstack([places, others + (others >= places)])])
            labels += [1.0] + [0.0] * drawn
        nodes = np.hstack(parts)
        ends = torch.arange(num + 1) * nodes.shape[1]
        columns: dict[str, Any] = {
            NODES: Ragged(torch.from_numpy(nodes).flatten(), ends),
            LABELS: torch.tensor(labels).expand(num, -1),
        }
        return Batch({**batch.columns, **columns}, batch.bags)


@dataclass(frozen=True)
class AllNodes:
    """Adds "all_nodes" to a batch, and "leaf_place", the place of each example's leaf."""

    tree: TreeIndex

    def __call__(self, batch: Batch) -> Batch:
        place = torch.from_numpy(_leaf_places(batch, self.tree))
        codes = torch.from_numpy(np.concatenate(self.tree.layers))
        return with_items(Batch({**batch.columns, PLACE: place}, batch.bags), ALL_NODES, codes)


def _leaf_places(batch: Batch, tree: TreeIndex) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Raises BadRequest: examples without a leaf, or with several."""
    return tree.places(ids_of(batch, LEAF, 1).squeeze(1).numpy())


def node_loss(logits_BS: Tensor, batch: Batch) -> Tensor:
    """The log loss, the mean over nodes."""
    labels_BS = tensor_of(batch, LABELS)
    return nn.functional.binary_cross_entropy_with_logits(logits_BS, labels_BS)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    tree_path: the tree, a file of PaddleRec's tree_index_builder.py. tree_name has no effect.
    node_emb_size: floats per row of the table "node", default 128.
    x_bert_embed_size: numbers of the user, default 128. item_nums and fea_group have no effect.
    start_sample_layer: first level of which nodes are learned, default 1.
    tdm_layer_counts: from this level on how many nodes are drawn besides the right one, and one
        more; default 1 for levels without.
    seed: of the draws, default 0.
    topk: nodes that an evaluation keeps, and items of its metric, default 100.
    with_att, with_hierachy: false. id_slot: 1.

    Inputs: user_item, unit_id, the id of the item's leaf, and label, which has no effect: all are
    right, and others are drawn.

    Raises BadRequest: other values of the last keys, or a first level that the tree has not.
    """
    hyper = HyperParameters(config)
    for key, value in {"with_att": False, "with_hierachy": False, "id_slot": 1}.items():
        hyper.fixed(key, value)
    for key in ("tree_name", "item_nums", "fea_group"):
        hyper.get(key)
    tree = TreeIndex.read(file_of(config, "hyper_parameters.tree_path"))
    first = hyper.whole("start_sample_layer", 1)
    num_levels = len(tree.layers) - first
    if num_levels < 1:
        raise BadRequest(
            f"hyper_parameters.start_sample_layer: expected a level below {len(tree.layers)},"
            f" found {first}"
        )
    counts = [*hyper.counts("tdm_layer_counts", ()), *[1] * num_levels][:num_levels]
    width, keep = hyper.whole("x_bert_embed_size", 128), hyper.whole("topk", 100)
    model = TDM(hyper.table("node", dim=hyper.whole("node_emb_size", 128)), width=width)
    return hyper.recipe(
        model,
        node_loss,
        schema=Schema([Dense(USER, width), Sparse(LEAF), Label("label")]),
        prepare=LayerSamples(
            tree, first, tuple(n + 1 for n in counts), Draws(hyper.whole("seed", 0, least=0))
        ),
        evaluation=Evaluation(
            model=BeamSearch(model, tree, keep=keep),
            metrics=[TopK(keep, label=PLACE)],
            prepare=AllNodes(tree),
        ),
    )
