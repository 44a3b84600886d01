"""What a new optimizer finds of the models that were trained before it on the same cluster: it goes
on with them, or begins anew.

A model is known by its modules, as in torch. In an embedded process an optimizer over modules that
were trained here goes on with their rows; over new modules whose tables have the same names it
begins anew, for a cell of a notebook that is run again means a new model. In a job with servers it
goes on by name: a worker may have been restarted.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from trireme.dense.optimizers import optimizer_spec
from trireme.job.cluster import Cluster
from trireme.nn.modules import TableModule
from trireme.nn.session import give_home, lose_rows, session_of
from trireme.train.first_worker import let_first_worker
from trireme.train.modes.setup import TrainingSetup
from trireme.worker.client import WorkerClient

log = logging.getLogger("trireme.train")

DENSE = ""  # beside the names of tables
TWO_MODELS = (
    "for two models at once give their tables other names, or each model a cluster:"
    " Trainer(..., cluster=tr.embedded())"
)


@dataclass(eq=False)
class Trained:
    """Rows of one table, or the dense weights, that this process has trained. steps: of the newest
    optimizer over them; 0 while it trains.
    """

    owners: weakref.WeakSet[Any]  # modules of the table, or parameters
    steps: int = 0

    def is_of(self, objects: Sequence[Any]) -> bool:
        return any(one in self.owners for one in objects)


class Marks:
    """The checkpoints whose state tables or dense weights (DENSE) have, until it is mended."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}

    def set(self, parts: Iterable[str], path: str) -> None:
        self._paths |= dict.fromkeys(parts, path)

    def clear(self, parts: Iterable[str]) -> None:
        for part in parts:
            self._paths.pop(part, None)

    def path(self, parts: Iterable[str]) -> str:
        """The checkpoint of one of the parts that has a mark; empty: none has."""
        return next((self._paths[part] for part in parts if part in self._paths), "")


@dataclass(eq=False)
class EarlierModels:
    """What has been trained on one cluster; `earlier_models` makes one for each."""

    tables: dict[str, Trained] = field(default_factory=dict)
    dense: dict[str, weakref.ref[Tensor]] = field(default_factory=dict)
    blocks: Any = None  # how the dense parameters were cut, and their optimizer
    options: Any = None  # on which the workers have agreed
    half_loaded: Marks = field(default_factory=Marks)  # by loads that ended half way
    # Loaded to continue an epoch: some rows have seen more pushes than others.
    unfinished: Marks = field(default_factory=Marks)

    # ---- what the new optimizer has ----

    def begin(self, setup: TrainingSetup, model: nn.Module, fresh: bool | None, steps: int) -> int:
        """Drop what the new optimizer must not find; returns the steps that its model was trained
        for. Called when the optimizer before, which has made `steps`, has finished.
        """
        cluster, modules = setup.cluster, _modules_by_table(model)
        for trained in self.tables.values():
            trained.steps = trained.steps or steps
        known = {name: self.tables[name] for name in modules if name in self.tables}
        others = [name for name, trained in known.items() if not trained.is_of(modules[name])]
        is_same = self._has_parameters(setup) and self.blocks == _blocks_of(setup)
        drops, drops_blocks = list[str](), False
        if fresh:
            drops, drops_blocks = list(modules), True
            begin_anew_together(cluster, drops)
        elif fresh is None and cluster.is_embedded:
            drops, drops_blocks = others, bool(self.dense) and not is_same
            if drops or drops_blocks or self.options not in (None, _options_of(setup)):
                cluster.client.begin_anew(drops, blocks=drops_blocks)
        own_steps = [known[name].steps for name in known.keys() - {*others, *drops}]
        kept = max(own_steps, default=0)
        self._say(cluster, drops, kept, is_forced=bool(fresh))
        for marks in (self.half_loaded, self.unfinished):
            marks.clear([*drops, *([] if is_same and not drops_blocks else [DENSE])])
        for name in drops:
            self._lose(name, model, modules[name])
            for module in modules[name]:
                module.table.features.restore({})
        cluster.client.forget_tables(drops)
        if drops or drops_blocks:
            session_of(cluster).pending.take()  # what a cell that failed has left
        self._adopt(setup, modules, drops)
        return kept

    def _has_parameters(self, setup: TrainingSetup) -> bool:
        own = setup.replica.dense.parameters
        known = {name: reference() for name, reference in self.dense.items()}
        return own.keys() == known.keys() and all(own[name] is known[name] for name in own)

    def _say(self, cluster: Cluster, drops: Sequence[str], kept: int, *, is_forced: bool) -> None:
        if cluster.worker != 0 or cluster.client.script.is_behind:
            return
        if kept:
            log.info(
                "train: continues a model trained for %d steps; `tr.reset()` or"
                " `Trainer(fresh=True)` begins anew",
                kept,
            )
        trained = {name: self.tables[name].steps for name in drops if name in self.tables}
        if any(trained.values()):
            steps = (f"{name!r} ({steps} steps)" for name, steps in trained.items())
            log.info(
                "train: begins anew: drops the rows of table%s %s%s",
                "s" if len(trained) > 1 else "",
                ", ".join(steps),
                "" if is_forced else ", of another model; `Trainer(fresh=False)` keeps them",
            )

    def _lose(self, name: str, model: nn.Module, own: Sequence[TableModule]) -> None:
        """The modules that had the rows of a table say so when they are used next."""
        for module in self.tables[name].owners if name in self.tables else ():
            if not any(module is one for one in own):
                lose_rows(
                    module,
                    f"the rows of table {name!r}, found them dropped, because a new"
                    f" {type(model).__name__} has begun anew with this name; {TWO_MODELS}",
                )

    def _adopt(
        self, setup: TrainingSetup, modules: dict[str, list[TableModule]], drops: Sequence[str]
    ) -> None:
        """This optimizer is the newest."""
        for name, own in modules.items():
            if name in drops or name not in self.tables:
                self.tables[name] = Trained(weakref.WeakSet())
            trained = self.tables[name]
            trained.owners.update(own)
            trained.steps = 0
            for module in own:
                give_home(module, setup.cluster)
        parameters = setup.replica.dense.parameters
        self.dense = {name: weakref.ref(parameter) for name, parameter in parameters.items()}
        self.blocks, self.options = _blocks_of(setup), _options_of(setup)


def begin_anew_together(cluster: Cluster, tables: Sequence[str]) -> None:
    """Every worker calls it: worker 0 drops tables and all dense parameters, unless a predecessor
    of it has.
    """
    script, client = cluster.client.script, cluster.client
    with script.section("begin anew"):
        if script.is_behind:
            return
        client.coordinator.gather({}, [], purpose="begin anew", patient=True)
        let_first_worker(cluster, "begin anew", lambda: _drop(client, tables))


def _drop(client: WorkerClient, tables: Sequence[str]) -> dict[str, Any]:
    client.begin_anew(tables, blocks=True)
    return {}


def _modules_by_table(model: nn.Module) -> dict[str, list[TableModule]]:
    modules: dict[str, list[TableModule]] = {}
    for part in model.modules():
        if isinstance(part, TableModule):
            modules.setdefault(part.table.name, []).append(part)
    return modules


def _blocks_of(setup: TrainingSetup) -> Any:
    """All that the blocks of the dense parameters were made of, but for their values."""
    optimizer = setup.optimizer
    if optimizer is None:
        return None
    kind = (optimizer_spec(optimizer), len(optimizer.param_groups), repr(setup.blocks))
    return kind, tuple(setup.replica.dense.specs)


def _options_of(setup: TrainingSetup) -> Any:
    return repr(setup.strategy), repr(setup.blocks)


_by_cluster: weakref.WeakKeyDictionary[Cluster, EarlierModels] = weakref.WeakKeyDictionary()


def earlier_models(cluster: Cluster) -> EarlierModels:
    """What has been trained on a cluster."""
    return _by_cluster.setdefault(cluster, EarlierModels())
