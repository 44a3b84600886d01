"""Embedding modules: they look up the ids of a batch's features in a table.

A module declares its features and takes the whole batch, so that the keys of the next batches can
be planned and pulled before the model needs them. Rows are not parameters of the module: they are
in the table, and `optimizer.step()` pushes their gradients.

Shapes: B examples, F features, L ids per example, D columns, K rows, N ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trireme import _core, accelerator
from trireme.accelerator import HOST
from trireme.data.batch import Batch
from trireme.data.foreign import as_batch
from trireme.errors import BadRequest, SchemaMismatch, check_choice, check_kind
from trireme.nn.ids import Columns
from trireme.nn.lookup import Lookup, LookupSpec
from trireme.nn.on_device import SentBatch
from trireme.nn.op import gather_rows
from trireme.nn.planner import Planner
from trireme.nn.session import collect, home_of, session_of
from trireme.table import Table, differing_fields
from trireme.torch_compiler import not_compiled

POOLINGS = ("sum", "mean", "sqrt")


class TableModule(nn.Module):
    """A module that looks up rows of a table.

    In training, a module whose batch was not planned pulls the rows itself, and the default cluster
    keeps them until the next `optimizer.step()`. In evaluation nothing is kept.

    Attributes:
        rows_device: where rows come to and outputs are; `to()` of the model moves it.
    """

    def __init__(
        self, table: Table, features: str | Sequence[str], padding_key: int | None
    ) -> None:
        super().__init__()
        if not isinstance(table, Table):
            raise BadRequest(
                f"{type(self).__name__}: expected a table, found {table!r}; make one:"
                f" {type(self).__name__}(tr.Table({str(table)[:40]!r}, dim=8), features=...)"
            )
        self.table = table
        if not isinstance(features, Iterable):
            raise self._wrong("features as a name or a list of names", features)
        self.features = (features,) if isinstance(features, str) else tuple(features)
        if not self.features or len(set(self.features)) != len(self.features):
            raise self._wrong("distinct features, at least one", self.features)
        if not all(isinstance(name, str) and name for name in self.features):
            raise self._wrong("names of features", self.features)
        if any(name != name.encode(errors="replace").decode() for name in self.features):
            raise self._wrong("names that UTF-8 can write", self.features)
        if padding_key is not None:
            check_kind(type(self).__name__, "padding_key", padding_key, int, "a whole number")
        if padding_key is not None and not -(2**63) <= padding_key < 2**64:
            raise self._wrong("a padding_key of 64 bits", padding_key)
        self.padding_key = None if padding_key is None else padding_key % 2**64
        self.lookup_specs: tuple[LookupSpec, ...] = ()
        self.rows_device = HOST

    def _apply(self, fn: Any, recurse: bool = True) -> TableModule:
        """What torch calls to move a module or to change its type."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.rows_device = fn(torch.empty(0, device=self.rows_device)).device
        return self

    def requires_grad_(self, requires_grad: bool = True) -> TableModule:
        """Raises BadRequest: False, for rows are no parameters that torch could freeze."""
        if not requires_grad:
            raise self._wrong(
                "requires_grad_(True), as rows are no parameters: .detach() what the module"
                " returns to freeze them",
                requires_grad,
            )
        return self

    def _lookups(self, batch: Columns) -> tuple[int, list[Lookup], _core.Pool | None]:
        """B, the lookup of each spec, and threads: from the plan of the batch, or pulled now."""
        if isinstance(batch, Batch) and batch.lookups:
            num_examples, lookups, pool = batch.num_examples, batch.lookups, batch.pool
        else:
            num_examples, lookups, pool = self._pull(batch)
        own = []
        for spec in self.lookup_specs:
            if spec.name not in lookups:
                raise self._wrong(f"lookup {spec.name!r} in the planned batch", list(lookups))
            own.append(lookups[spec.name])
        if self._is_learning() and not all(lookup.rows.requires_grad for lookup in own):
            raise self._wrong("a batch planned for training, as this module is in training", "not")
        return num_examples, own, pool

    def _gathered(self, batch: Columns) -> list[Tensor]:
        """The outputs that replace the lookups of a batch while a model is exported, one for each
        spec. Empty for other batches.
        """
        lookups = batch.lookups if isinstance(batch, Batch) else {}
        values = [lookups.get(spec.name) for spec in self.lookup_specs]
        return [value for value in values if isinstance(value, Tensor)]

    @not_compiled
    def _pull(self, batch: Columns) -> tuple[int, dict[str, Lookup], _core.Pool]:
        home, training = home_of(self), self._is_learning()
        session = session_of(home)
        plan = Planner(self, pool=home.pool).plan(as_batch(batch), train=training)
        home.client.create_table(self.table.schema)
        pulled = session.pull(plan.keys(), training=training)
        link = accelerator.link_to(self.rows_device)
        sent = SentBatch(link, Batch({}), plan)
        sent.send_rows(pulled.rows)
        _, plan, rows = sent.receive()
        leaves = plan.leaves(rows, train=training)
        if training:
            session.note_untrained(session.pending, [self.table], self)
            collect(session.pending, plan, leaves, pulled)
        return plan.num_examples, plan.lookups(leaves), plan.pool

    def _is_learning(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def get_extra_state(self) -> Tensor:
        """The table's identity as JSON bytes in a tensor, as a state_dict needs."""
        text = json.dumps(self._identity(), sort_keys=True)
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Check that a state_dict was made with the same table. Raises SchemaMismatch."""
        saved = json.loads(bytes(state.tolist()))
        if saved != self._identity():
            raise SchemaMismatch(
                f"{type(self).__name__}.load_state_dict: table {self.table.name!r}:"
                f" {differing_fields(self._identity(), saved)}"
            )

    def _identity(self) -> dict[str, Any]:
        dims = [self.table.of_feature(name).dim for name in self.features]
        dim = dims[0] if len(set(dims)) == 1 else dims
        return {"table": self.table.name, "dim": dim, "salt": self.table.salt}

    def _wrong(self, expected: str, value: object) -> BadRequest:
        return BadRequest(
            f"{type(self).__name__} of table {self.table.name!r}: "
            f"expected {expected}, found {value}"
        )

    def extra_repr(self) -> str:
        padding = "" if self.padding_key is None else f", padding_key={self.padding_key}"
        return f"{self.table}, features={list(self.features)}{padding}"


class Embedding(TableModule):
    """One row per id.

    Args:
        table: where the rows live.
        features: one name, or several.
        padding_key: ids equal to it give zeros, and have no row and no gradient. A negative number
            stands for its uint64 bits.

    Raises:
        BadRequest: features are missing, repeated or not names; padding_key has more than 64 bits.
    """

    def __init__(
        self, table: Table, features: str | Sequence[str], *, padding_key: int | None = None
    ) -> None:
        super().__init__(table, features, padding_key)
        self.returns_tuple = not isinstance(features, str)
        for name in self.features:  # one by one: often those of one sequence and what follows it
            table.features.declare((name,))
        self.lookup_specs = tuple(
            LookupSpec(table.of_feature(name), (name,), "none", self.padding_key)
            for name in self.features
        )

    def forward(self, batch: Columns) -> Tensor | tuple[Tensor, ...]:
        """Look up the ids of the batch.

        Args:
            batch: a Batch, or a mapping of name -> (B,) or (B, L) int64 tensor, or Ragged; or
                TorchRec's KeyedJaggedTensor.

        Returns:
            For one name a tensor, for a list of names a tuple of tensors. A feature that is a
            tensor of ids gives (B, D) or (B, L, D). A Ragged feature gives (N, D): all ids of its
            bags in order. D is the dim of the feature. Weights of ids are not applied.

        Raises:
            BadRequest: a feature is missing or has another form; the message names it.
        """
        batch = as_batch(batch)
        rows = tuple(self._gathered(batch))
        if not rows:
            _, lookups, pool = self._lookups(batch)
            outs = [gather_rows(lookup, lookup.index.shape[0], 1, pool) for lookup in lookups]
            columns = [batch[spec.features[0]] for spec in self.lookup_specs]
            rows = tuple(
                out.view(*c.shape, out.shape[-1]) if isinstance(c, Tensor) else out.squeeze(1)
                for out, c in zip(outs, columns, strict=True)
            )
        return rows if self.returns_tuple else rows[0]


class EmbeddingBag(TableModule):
    """The sum of the rows of each bag, for many features in one fused operation (one for each dim
    if features of a table have different dims).

    Attributes:
        dims: columns of each feature in the output.

    Args:
        table: where the rows live.
        features: names, in the order of the output.
        mode: "sum" (each row times the weight of its id, if ids have weights), "mean": sum / n, or
            "sqrt": sum / sqrt(n), for a bag of n ids.
        padding_key: ids equal to it have no row and no gradient, and do not count in n. A negative
            number stands for its uint64 bits.

    Raises:
        BadRequest: features are missing, repeated or not names; an unknown mode; padding_key has
            more than 64 bits.
    """

    def __init__(
        self,
        table: Table,
        features: str | Sequence[str],
        *,
        mode: str = "sum",
        padding_key: int | None = None,
    ) -> None:
        super().__init__(table, features, padding_key)
        check_choice(type(self).__name__, POOLINGS, mode=mode)
        self.mode = mode
        table.features.declare(self.features)
        parts = [table.of_feature(name) for name in self.features]
        self.dims = tuple(part.width for part in parts)
        by_part: dict[Table, list[str]] = {}
        for name, part in zip(self.features, parts, strict=True):
            by_part.setdefault(part, []).append(name)
        self.lookup_specs = tuple(
            LookupSpec(part, tuple(names), mode, self.padding_key)
            for part, names in by_part.items()
        )
        self._order = [name for names in by_part.values() for name in names]

    def forward(self, batch: Columns) -> Tensor:
        """Look up the bags of the batch.

        Args:
            batch: a Batch, or a mapping of name -> (B,) or (B, L) int64 tensor (bags of 1 or L
                ids), or Ragged; or TorchRec's KeyedJaggedTensor.

        Returns:
            (B, F, D) float32, contiguous: `.flatten(1)` is a view. An empty bag gives zeros.
            If the features have different dims, (B, sum of dims) with the features side by side,
            as in TorchRec's KeyedTensor; `output.split(module.dims, 1)` separates them.

        Raises:
            BadRequest: a feature is missing or has another form (the message names it), or ids have
                weights and the mode is not "sum".
        """
        outputs = self._gathered(batch)
        if not outputs:
            num_examples, lookups, pool = self._lookups(batch)
            outputs = [
                gather_rows(lookup, num_examples, len(spec.features), pool)
                for spec, lookup in zip(self.lookup_specs, lookups, strict=True)
            ]
        if len(outputs) == 1:
            return outputs[0]
        columns = [column for output in outputs for column in output.unbind(1)]
        by_name = dict(zip(self._order, columns, strict=True))
        return torch.cat([by_name[name] for name in self.features], dim=1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"
