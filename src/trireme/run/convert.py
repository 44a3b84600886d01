"""`trireme convert`: tables and models from one format into another, without a training script.

The tables are in this process: it takes as much memory as a server of the whole model would.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from trireme import interchange, optim, policy
from trireme.checkpoint.format.manifest import MANIFEST, read_manifest
from trireme.config import Config
from trireme.data.batch import Batch
from trireme.errors import BadRequest
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.launch.init import log_to_stderr
from trireme.nn import EmbeddingBag
from trireme.run.model import create_recipe
from trireme.run.settings import Settings
from trireme.storage.location import open_storage
from trireme.table import Table
from trireme.train import Trainer

log = logging.getLogger("trireme")

Kind = Literal["checkpoint", "fleet", "parquet"]
RULES: Mapping[str, optim.FleetRule] = {
    "SparseNaiveSGDRule": optim.FleetSGD(),
    "SparseAdaGradSGDRule": optim.FleetAdagrad(),
    "StdAdaGradSGDRule": optim.FleetAdagrad(shared=False),
    "SparseAdaGradV2SGDRule": optim.FleetAdagradV2(),
    "SparseAdamSGDRule": optim.FleetAdam(),
    "SparseSharedAdamSGDRule": optim.FleetSharedAdam(),
}


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What to convert, and how; the options are those of `trireme.interchange`.

    config: says the model; None: its tables alone, as a checkpoint says, or the next four.
    """

    source: str
    target: str
    to: Kind
    config: Config | None = None
    table: str | None = None
    dim: int | None = None
    rule: str | None = None
    accessor: str | None = None
    tables: Mapping[str, int] | None = None
    time: int = 0
    dense_steps: int = 0
    shard_num: int = 1000
    gzip: bool = False
    state: bool = False


def convert(what: Conversion) -> None:
    """Read the source, write the target.

    Raises:
        BadRequest: options that do not fit, or a source of no known kind. Others: as Trainer's
            methods.
    """
    log_to_stderr()
    kind = _kind_of(what.source)
    _check(what, kind)
    with embedded() as cluster:
        set_default(cluster)
        trainer = _trainer(what, kind)
        counts = _read(trainer, what, kind)
        is_dense = next(trainer.model.parameters(), None) is not None
        if kind == "parquet" and what.to == "checkpoint" and is_dense:
            log.warning("convert: the dense part is new: %s has none", what.source)
        _write(trainer, what)
    rows = ", ".join(f"{n:,} rows of {name}" for name, n in counts.items())
    log.info("convert: %s (%s) is now %s (%s): %s", what.source, kind, what.target, what.to, rows)


def _kind_of(source: str) -> Kind:
    path = Path(source)
    if (path / MANIFEST).is_file():
        return "checkpoint"
    if interchange.is_fleet(path):
        return "fleet"
    if path.suffix == ".parquet" or any(path.glob("*.parquet")):
        return "parquet"
    raise BadRequest(
        f"convert: expected a checkpoint (with {MANIFEST}), a folder of Fleet (000/part-*) or"
        f" Parquet files, found none of them at {source!r}"
    )


def _check(what: Conversion, kind: Kind) -> None:
    if os.path.lexists(what.target):
        raise BadRequest(f"convert: expected a new TARGET, found {what.target!r} existing")
    if what.config is None and kind != "checkpoint":
        missing = [name for name in ("table", "dim", "rule") if getattr(what, name) is None]
        if missing:
            raise BadRequest(
                f"convert: expected -m config.yaml, or --{', --'.join(missing)}, for a table that"
                f" {what.source!r} does not describe"
            )
        if what.to == "checkpoint":
            raise BadRequest(
                "convert: expected -m config.yaml to write a checkpoint, found none: it holds the"
                " numbers of the tables' policies, which must be those of your model"
            )


def _trainer(what: Conversion, kind: Kind) -> Trainer:
    if what.config is not None:
        recipe = create_recipe(what.config, Settings.read(what.config))
        return Trainer.from_recipe(recipe)
    if kind != "parquet":
        log.info("convert: a dense part is left out; -m config.yaml would say the model it is of")
    tables = _described(what) if kind != "checkpoint" else _saved(what.source)
    return Trainer(_TablesAlone(tables), None, loss=lambda _, __: _no_loss())


def _described(what: Conversion) -> list[Table]:
    assert what.table is not None
    assert what.dim is not None
    if what.rule is None or what.rule not in RULES:
        raise BadRequest(f"convert: expected --rule {', '.join(RULES)}, found {what.rule!r}")
    kept = policy.SparseAccessor()
    rule = RULES[what.rule]
    return [Table(what.table, dim=what.dim, optimizer=rule, absent="zeros", policy=kept)]


def _saved(source: str) -> list[Table]:
    manifest = read_manifest(open_storage(source, None))
    return [Table.of_schema(part.schema) for part in manifest.tables.values()]


class _TablesAlone(nn.Module):
    """A model of tables and nothing else."""

    def __init__(self, tables: list[Table]) -> None:
        super().__init__()
        self.rows = nn.ModuleList(EmbeddingBag(table, features=["key"]) for table in tables)

    def forward(self, batch: Batch) -> Tensor:
        raise BadRequest("convert: these tables are not for training")


def _no_loss() -> Tensor:
    raise BadRequest("convert: these tables are not for training")


def _read(trainer: Trainer, what: Conversion, kind: Kind) -> dict[str, int]:
    """Returns how many rows each table has."""
    if kind == "checkpoint":
        trainer.load(what.source, dense="match" if what.config is None else "strict")
        manifest = read_manifest(open_storage(what.source, None))
        return {name: part.num_rows for name, part in manifest.tables.items()}
    if kind == "fleet":
        return interchange.import_fleet(
            trainer,
            what.source,
            tables=what.tables,
            accessor=what.accessor,
            time=what.time,
            dense_steps=what.dense_steps,
        )
    name = _one_table(trainer, what)
    return {name: interchange.import_parquet(trainer, name, what.source, time=what.time)}


def _one_table(trainer: Trainer, what: Conversion) -> str:
    names = [table.name for table in trainer.optimizer.tables]
    if what.table is None and len(names) > 1:
        raise BadRequest(f"convert: expected --table among {names}, found none")
    return what.table or names[0]


def _write(trainer: Trainer, what: Conversion) -> None:
    if what.to == "checkpoint":
        trainer.save(what.target)
    elif what.to == "parquet":
        interchange.export_parquet(trainer, what.target, state=what.state)
    else:
        interchange.export_fleet(
            trainer,
            what.target,
            tables=what.tables,
            accessor=what.accessor,
            time=what.time,
            shard_num=what.shard_num,
            compress=what.gzip,
        )
