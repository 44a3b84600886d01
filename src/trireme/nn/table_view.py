"""A look at the rows of a table while it trains, by the values that training takes.

Shapes: N values, D weights of a row, Q vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trireme import _core
from trireme.errors import BadRequest, check_counts, check_kind
from trireme.job.cluster import Cluster
from trireme.job.default import default
from trireme.nn.ids import Keys, keys_of_values
from trireme.protocol.wire import Arrays
from trireme.rows.core_table import make_core_table
from trireme.rows.row_statistics import numbers_of
from trireme.rows.wide_rows import RowLayout
from trireme.rpc import Reply
from trireme.table import Table
from trireme.worker.whole_rows import TIMEOUT_S, Reading, read_now

METRICS = ("dot", "cosine")


@dataclass(frozen=True)
class Ranked:
    """values: the best first. numbers: the statistic or similarity of each."""

    values: list[Any]
    numbers: list[float]


class TableView:
    """The rows of a feature's values, read from the servers, where rows are in memory or on SSD. A
    look changes nothing, waits for no other worker, and any worker may take one alone.

    It sees what the servers have: each row as of one moment, without pushes that are in flight
    (`trainer.optimizer.flush()` waits for one's own), in geo and hybrid without what workers have
    not sent yet.

    Args:
        table: which the servers make if they do not have it.
        feature: whose values are given. None: of all rows, which only `top` and `len` tell of, by
            their keys.
        values: N distinct values of the feature, integers or strings as in training, for `top` and
            `nearest`: rows have no names, as keys of strings are hashes.
        cluster: default the one that `trireme.init()` made.

    Raises:
        BadRequest: a feature by which no module reads the table; values of another kind than in
            training, missing ones, one given twice, or no feature for them.

    Threads: any, one at a time.
    """

    def __init__(
        self,
        table: Table,
        feature: str | None = None,
        values: Any = (),
        *,
        cluster: Cluster | None = None,
    ) -> None:
        if not isinstance(table, Table):
            raise BadRequest(f"TableView: expected a Table, found {table!r}")
        if feature is not None:
            check_kind("TableView", "feature", feature, str, "a name, such as 'movie'")
        if cluster is not None:
            check_kind("TableView", "cluster", cluster, Cluster, "what tr.init() returns")
        self._cluster = default() if cluster is None else cluster
        self._table = table if feature is None else table.of_feature(feature)
        self.feature = feature
        if feature is not None:
            table.features.check_name(table.name, feature)
        self.values = _listed(feature, values)
        self._keys = self._keys_of(values) if self.values else np.empty(0, np.uint64)
        if len(np.unique(self._keys)) < len(self._keys):
            raise BadRequest(f"TableView: expected distinct values of {feature!r}, found one twice")
        self._cluster.client.create_table(table.schema)

    def __len__(self) -> int:
        """Rows of the table, of all features, on all servers."""
        name = self._table.name
        return sum(int(stats["tables"][name]["rows"]) for stats in self._cluster.client.stats())

    def __getitem__(self, values: Any) -> Tensor:
        """The weights that a lookup of these values gets: (N, D) float32; (D,) of a single value.
        One without a row has initial weights, as in training. Raises BadRequest: as the class.
        """
        if isinstance(values, (int, str, np.integer)):
            return self[[values]][0]
        keys, inverse = np.unique(self._keys_of(values), return_inverse=True)
        ordered: Keys = _core.distinct([keys], self._cluster.pool)
        pulled = self._cluster.client.pull({self._table.class_id: ordered})
        place = np.argsort(ordered)  # of each of `keys`, which ascend
        rows = pulled.rows[self._table.class_id][torch.from_numpy(place[inverse])]
        return rows[:, self._table.width - self._table.dim :]

    def top(self, by: str, k: int, *, time: int = 0) -> Ranked:
        """The values whose rows have the largest statistic; without a feature the keys, as ints,
        of all rows of the table, which servers read one after the other, those on SSD too.

        Args:
            by: "time", the data time of the last push; with a ScorePolicy also "show", "click" and
                "score".
            time: data time to which shows and clicks have faded; 0: of each row's last push.

        Raises:
            BadRequest: another statistic; k below 1, or without a feature above 10,000; a feature
                without values.
        """
        if self.feature is None:
            return self._top_of_all(by, k, time)
        present, layout, rows = self._rows()
        numbers = numbers_of(self._table.schema, layout.statistics(rows), by, time)
        return self._ranked(present, numbers, _checked(k))

    def _top_of_all(self, by: str, k: int, time: int) -> Ranked:
        body = {"table": self._table.name, "by": by, "k": _checked(k), "time": time}
        servers = self._cluster.client.servers

        def attempt(left_s: float) -> list[Reply]:
            return servers.everywhere("ps.top", body, timeout_s=left_s, aside=True)

        replies = servers.until_current("ps.top", attempt, TIMEOUT_S)
        arrays = [Arrays(reply.arrays) for reply in replies]
        keys = np.concatenate([one.take("keys", np.uint64, (None,)) for one in arrays])
        numbers = np.concatenate([one.take("numbers", np.float64, (None,)) for one in arrays])
        best = np.lexsort((keys, -numbers))[:k]
        return Ranked(keys[best].tolist(), numbers[best].tolist())

    def nearest(
        self, vectors: Any, k: int, *, metric: str = "dot", faiss: bool = False
    ) -> Ranked | list[Ranked]:
        """The values whose weights are nearest to a vector: all of them are compared.

        Args:
            vectors: (D,), or (Q, D) for a list of Q answers.
            metric: "dot", or "cosine".
            faiss: compare by FAISS (`pip install trireme-ps[faiss]`), which is faster for many
                vectors; in float32, where sums are otherwise float64.

        Raises:
            BadRequest: vectors of another form or with NaN or infinities, another metric, k below
                1, or no FAISS.
        """
        k, numbers = _checked(k), _numbers(vectors)
        queries = np.atleast_2d(numbers)
        if queries.ndim != 2 or queries.shape[1] != self._table.dim or metric not in METRICS:
            raise BadRequest(
                f"TableView.nearest: expected (D,) or (Q, D) with D = {self._table.dim}, and metric"
                f" one of {', '.join(METRICS)}, found {queries.shape} and {metric!r}"
            )
        if not np.isfinite(queries).all():
            row = int((~np.isfinite(queries)).any(1).argmax())
            raise BadRequest(
                "TableView.nearest: expected vectors without NaN and infinities, found"
                f" {queries[row].tolist()} at {row}"
            )
        present, layout, rows = self._rows()
        weights = layout.weights(rows)[:, : self._table.dim]
        if metric == "cosine":
            queries, weights = _unit(queries), _unit(weights)
        if faiss:
            ranked = self._by_faiss(present, queries, weights, k)
        else:
            similar = queries.astype(np.float64) @ weights.astype(np.float64).T
            ranked = [self._ranked(present, similarities, k) for similarities in similar]
        return ranked[0] if numbers.ndim == 1 else ranked

    def _by_faiss(
        self, present: NDArray[np.intp], queries: Any, weights: Any, k: int
    ) -> list[Ranked]:
        try:
            import faiss
        except ImportError as error:
            raise BadRequest(
                "TableView.nearest: expected FAISS with faiss=True, found none: pip install"
                " trireme-ps[faiss]"
            ) from error
        index = faiss.IndexFlatIP(self._table.dim)
        index.add(np.ascontiguousarray(weights, np.float32))
        wanted = np.ascontiguousarray(queries, np.float32)
        numbers_QK, places_QK = index.search(wanted, min(k, len(present)))
        return [
            Ranked([self.values[present[i]] for i in places], numbers.tolist())
            for numbers, places in zip(numbers_QK, places_QK, strict=True)
        ]

    def _rows(self) -> tuple[NDArray[np.intp], RowLayout, NDArray[np.uint8]]:
        """Which of the values have a row, and these rows."""
        if not self.values:
            raise BadRequest(
                f"TableView: expected values of {self.feature!r} to choose among, found none: rows"
                " have no names; TableView(table).top(...) ranks the keys of all rows"
            )
        core = make_core_table(self._table.schema)
        layout = RowLayout.of(self._table.schema, core)
        client, pool = self._cluster.client, self._cluster.pool
        how = Reading(
            client=client, table=self._table.name, row_bytes=layout.row_bytes, pool=pool, aside=True
        )
        is_present, rows = read_now(how, self._keys)
        return np.flatnonzero(is_present), layout, rows[is_present]

    def _ranked(self, present: NDArray[np.intp], numbers: NDArray[np.float64], k: int) -> Ranked:
        """The k largest; of equal ones the earlier value."""
        best = np.argsort(-numbers, kind="stable")[:k]
        return Ranked([self.values[present[i]] for i in best], numbers[best].tolist())

    def _keys_of(self, values: Any) -> Keys:
        if self.feature is None:
            raise BadRequest(
                "TableView: expected a feature whose values these are, found none: give"
                " TableView(table, feature, values)"
            )
        return keys_of_values(self._table, self.feature, values)

    def __repr__(self) -> str:
        return f"TableView({self._table}, {self.feature!r}, {len(self.values)} values)"


def _checked(k: Any) -> int:
    check_counts("TableView", k=k)
    return int(k)


def _numbers(vectors: Any) -> NDArray[Any]:
    try:
        return np.asarray(torch.as_tensor(vectors).detach().cpu().numpy())
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadRequest(
            "TableView.nearest: expected vectors as a tensor or array of numbers, found"
            f" {type(vectors).__name__}: {error}; view[value] is that of a value"
        ) from error


def _unit(vectors: NDArray[Any]) -> NDArray[Any]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, np.finfo(np.float32).tiny))


def _listed(feature: str | None, values: Any) -> Sequence[Any]:
    """Raises BadRequest: a single value, or none."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise BadRequest(
            f"TableView: expected values of feature {feature!r} as a list, found {values!r}; the"
            " row of one is TableView(table, feature)[value]"
        )
    return list(values)
