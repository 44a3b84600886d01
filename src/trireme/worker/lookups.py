"""The rows that forward passes look up for training, until a push carries their gradients."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from trireme import accelerator
from trireme.errors import BadRequest
from trireme.protocol.columns import KeyColumns
from trireme.protocol.routing import Keys
from trireme.table import Table

log = logging.getLogger("trireme.worker")

PENDING_MAX, PENDING_PER_TABLE = 1024, 64  # that wait for a step: of all tables, or fewer of one


@dataclass(frozen=True, eq=False)
class RowLookup:
    """Rows of one table that a forward pass has looked up for training."""

    table: Table
    keys: Keys  # (K,) distinct
    rows: Tensor  # (K, W), a leaf; its gradient, times `scale`, is the push
    scale: Tensor | None = None  # (K, 1); None: 1
    columns: KeyColumns = field(default_factory=dict)  # see protocol/columns.py

    def gradients(self) -> Tensor | None:
        """(K, D): gradients of the weights alone, without `scale`, on the device of the rows; None
        if the loss did not depend on the rows.
        """
        if (grad_KW := self.rows.grad) is None:
            return None
        return grad_KW[:, self.table.width - self.table.dim :].contiguous()


def pushed_gradients(entries: Sequence[RowLookup], *, on_host: bool = True) -> list[Tensor | None]:
    """(K, D) of each lookup times its `scale`, on the CPU or where its rows are; None as above."""
    gradients = [entry.gradients() for entry in entries]
    if on_host:
        there = [grad_KD for grad_KD in gradients if grad_KD is not None]
        moved = iter(accelerator.to_host(there))
        gradients = [None if grad_KD is None else next(moved) for grad_KD in gradients]
    return [
        grad_KD
        if grad_KD is None or entry.scale is None
        else grad_KD * entry.scale.to(grad_KD.device)
        for grad_KD, entry in zip(gradients, entries, strict=True)
    ]


@dataclass
class PendingLookups:
    """Lookups of the forward passes since the last step, whose gradients the next push carries."""

    entries: list[RowLookup] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # by table
    push_counts: list[int] = field(default_factory=list)  # per server, of the oldest pull
    examples: int = 0  # of the largest batch
    left: set[str] = field(default_factory=set)  # tables whose gradients nobody will push
    reported: set[str] = field(default_factory=set)  # those of them that were

    def add(self, looked_up: RowLookup, examples: int = 0) -> None:
        """Raises BadRequest: too many lookups since the last step(); a call is probably missing."""
        name = looked_up.table.name
        if len(self.entries) >= PENDING_MAX and self.counts[name] >= PENDING_PER_TABLE:
            raise BadRequest(
                f"forward: expected an optimizer.step() within {PENDING_MAX} lookups, found"
                f" {len(self.entries)}, {self.counts[name]} of them of table {name!r}; use"
                " model.eval() or torch.no_grad() to look up without training"
            )
        self.entries.append(looked_up)
        self.counts[name] += 1
        self.examples = max(self.examples, examples)

    def pulled_at(self, push_counts: Sequence[int]) -> None:
        """Note the push counters of the servers at a pull."""
        if not self.push_counts:
            self.push_counts = list(push_counts)
        else:
            self.push_counts = list(map(min, self.push_counts, push_counts))

    def tables_with_gradients(self) -> set[str]:
        """Names of tables whose rows a backward has given gradients that are not pushed yet."""
        return {entry.table.name for entry in self.entries if entry.rows.grad is not None}

    def report_left(self) -> None:
        """Warn of the rows that have gradients which nobody pushes, once for each table."""
        names = (self.left & self.tables_with_gradients()) - self.reported
        self.reported |= names
        for name in sorted(names):
            log.warning(
                "forward: the rows of table %r have gradients of the last backward that nobody has"
                " pushed, so they are not trained: torch's optimizers do not know rows; wrap yours,"
                " `optimizer = tr.DistributedOptimizer(optimizer, model)`, and call its step()",
                name,
            )

    def take(self) -> PendingLookups:
        """Return all lookups and keep none."""
        taken = PendingLookups(self.entries, self.counts, self.push_counts, self.examples)
        self.entries, self.counts, self.push_counts, self.examples = [], Counter(), [], 0
        self.left = set()
        return taken
