"""The model in training on a cluster: what its forward passes, pipelines and optimizer share."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, cast

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from trireme.errors import Superseded
from trireme.job.cluster import Cluster
from trireme.job.default import default
from trireme.nn.planner import BatchPlan
from trireme.table import RowClassId, Table
from trireme.worker.client import WorkerClient
from trireme.worker.gradients import KeysByClass
from trireme.worker.lookups import PendingLookups, RowLookup
from trireme.worker.pull import Pulled


class RowSource(Protocol):
    """What has the rows of a model in training: its optimizer, which asks the mode."""

    @property
    def tables(self) -> tuple[Table, ...]: ...

    @property
    def dense_parameters(self) -> Iterable[Tensor]: ...

    def pull_rows(self, keys: KeysByClass, *, training: bool) -> Pulled: ...


class Session:
    """`session_of` makes one for each cluster. It does not keep its row source alive."""

    def __init__(self, client: WorkerClient) -> None:
        self._client = client
        self._pending = PendingLookups()
        self._thread = threading.local()
        self.row_source: Callable[[], RowSource | None] = lambda: None  # the newest optimizer
        self.is_prefetching = False  # a pipeline pulls rows and blocks for the coming steps
        self.position: tuple[int, ...] = ()  # epoch and batches so far of a loop over prefetch

    def train_with(self, source: RowSource) -> None:
        """Forward passes get their rows from this optimizer from now on."""
        self.row_source = weakref.ref(source)

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped. If it has weights of the model in training, and the gradients
        of rows are still there, it has left them: nobody pushes.
        """
        source, pending = self.row_source(), self.pending
        if (
            source is None
            or cast(object, source) is optimizer
            or not (names := pending.tables_with_gradients())
        ):
            return
        own = set(map(id, source.dense_parameters))
        groups = optimizer.param_groups
        if any(id(parameter) in own for group in groups for parameter in group["params"]):
            pending.left |= names

    def note_untrained(
        self, pending: PendingLookups, tables: Iterable[Table], module: Module | None = None
    ) -> None:
        """A forward pass looks up rows for training: nobody pushes those of tables that are not of
        the newest optimizer, or that `module` reads, if no optimizer has it.
        """
        source = self.row_source()
        has_optimizer = source is not None and (module is None or module in _homes)
        trained = source.tables if source is not None and has_optimizer else ()
        pending.left |= {t.name for t in tables} - {t.name for t in trained}

    @property
    def pending(self) -> PendingLookups:
        """The lookups of the calling thread, whose gradients its next push carries."""
        pending: PendingLookups = getattr(self._thread, "pending", self._pending)
        return pending

    def use_pending(self, pending: PendingLookups) -> None:
        """Let the calling thread, which trains a replica, collect its lookups here."""
        self._thread.pending = pending

    def pull(self, keys: KeysByClass, *, training: bool = False) -> Pulled:
        """Fetch the rows of a forward pass; for training, as the mode of the optimizer does."""
        source = self.row_source()
        if source is None:
            return self._client.pull(keys)
        return source.pull_rows(keys, training=training)


_sessions: weakref.WeakKeyDictionary[Cluster, Session] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def session_of(cluster: Cluster) -> Session:
    """The session of a cluster. Threads may call it."""
    with _lock:
        return _sessions.setdefault(cluster, Session(cluster.client))


def _note_step(optimizer: Optimizer, *_: object) -> None:
    """torch calls this after the step of any optimizer."""
    with _lock:
        sessions = list(_sessions.values())
    for session in sessions:
        session.note_step(optimizer)


register_optimizer_step_post_hook(_note_step)


_homes: weakref.WeakKeyDictionary[Module, weakref.ref[Cluster]] = weakref.WeakKeyDictionary()
_losses: weakref.WeakKeyDictionary[Module, str] = weakref.WeakKeyDictionary()
CLOSED = "its rows, found their cluster closed; make the model and its Trainer again"


def give_home(module: Module, cluster: Cluster) -> None:
    """The rows of this embedding module are trained on this cluster."""
    _homes[module] = weakref.ref(cluster)
    _losses.pop(module, None)


def home_of(module: Module) -> Cluster:
    """Where the rows of an embedding module are: at the cluster of its optimizer, else the default.
    Raises Superseded: they are gone.
    """
    home = _homes[module]() if module in _homes else default()
    if home is None or (home.is_closed and module in _homes):
        lose_rows(module, CLOSED)
    if why := why_lost([module]):
        raise Superseded(why)
    assert home is not None
    return home


def lose_rows(module: Module, why: str) -> None:
    """Another model has taken the rows of this embedding module."""
    _losses[module] = why


def why_lost(modules: Iterable[Module]) -> str:
    """Why the rows of one of these modules are gone; empty: they are not."""
    lost = (m for m in modules if m in _losses) if _losses else ()
    return next((f"{type(m).__name__}: expected {_losses[m]}" for m in lost), "")


def collect(
    pending: PendingLookups, plan: BatchPlan, leaves: Mapping[RowClassId, Tensor], pulled: Pulled
) -> None:
    """Let the next step push the gradients of the leaves that `plan` made of pulled rows."""
    if pending.left:
        pending.report_left()
    for part in plan.tables:
        leaf = leaves[part.table.class_id]
        looked_up = RowLookup(part.table, part.keys, leaf, part.scale, part.columns)
        pending.add(looked_up, plan.num_examples)
    pending.pulled_at(pulled.push_counts)
