"""`trireme convert`: tables and models from one format into another, without a training script.

This process holds the tables: it needs as much memory as one server of the whole model.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from trireme import interchange, policy
from trireme.checkpoint.format.manifest import MANIFEST, read_manifest
from trireme.config import Config
from trireme.data.batch import Batch
from trireme.errors import BadRequest, check_choice, is_file
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.launch.init import log_to_stderr
from trireme.models.table_parameters import RULES
from trireme.nn import EmbeddingBag
from trireme.run.model import create_recipe
from trireme.run.settings import Settings
from trireme.storage.storage import open_storage
from trireme.table import Table
from trireme.train import Trainer

log = logging.getLogger("trireme")

Kind = Literal["checkpoint", "fleet", "parquet"]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A conversion. Its options are those of the trainer's imports and exports.

    config: has the model; None: convert only tables, which a checkpoint or the next four options
        describe.
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


def convert(conversion: Conversion) -> None:
    """Read the source, write the target. Raises BadRequest: contradicting options, or a source of
    an unknown kind. Others: as Trainer's methods.
    """
    log_to_stderr()
    kind = _kind_of(conversion.source)
    _check(conversion, kind)
    with embedded() as cluster:
        set_default(cluster)
        trainer = _trainer(conversion, kind)
        counts = _read(trainer, conversion, kind)
        is_dense = next(trainer.model.parameters(), None) is not None
        if kind == "parquet" and conversion.to == "checkpoint" and is_dense:
            log.warning("convert: the dense part is new: %s has none", conversion.source)
        _write(trainer, conversion)
    rows = ", ".join(f"{n:,} rows of {name}" for name, n in counts.items())
    log.info(
        "convert: %s (%s) is now %s (%s): %s",
        conversion.source,
        kind,
        conversion.target,
        conversion.to,
        rows,
    )


def _kind_of(source: str) -> Kind:
    path = Path(source)
    if is_file(path / MANIFEST):
        return "checkpoint"
    if interchange.is_fleet(path):
        return "fleet"
    if path.suffix == ".parquet" or any(path.glob("*.parquet")):
        return "parquet"
    raise BadRequest(
        f"convert: expected a checkpoint (with {MANIFEST}), a folder of Fleet (000/part-*) or"
        f" Parquet files, found none of them at {source!r}"
    )


def _check(conversion: Conversion, kind: Kind) -> None:
    if os.path.lexists(conversion.target):
        raise BadRequest(f"convert: expected a new TARGET, found {conversion.target!r} existing")
    if Path(conversion.source).resolve() in Path(conversion.target).resolve().parents:
        raise BadRequest(
            f"convert: expected a TARGET outside of SOURCE, found {conversion.target!r} in it"
        )
    _check_effects(conversion, kind)
    if conversion.config is None and kind != "checkpoint":
        missing = [name for name in ("table", "dim", "rule") if getattr(conversion, name) is None]
        if missing:
            raise BadRequest(
                f"convert: expected -m config.yaml, or --{', --'.join(missing)}, for a table that"
                f" {conversion.source!r} does not describe"
            )
        if conversion.to == "checkpoint":
            raise BadRequest(
                "convert: expected -m config.yaml to write a checkpoint, found none: a checkpoint"
                " has the values of the tables' policies, which must be those of your model"
            )


def _check_effects(conversion: Conversion, kind: Kind) -> None:
    """Raises BadRequest: an option that this conversion does not read."""
    is_alone = conversion.config is None
    with_fleet = kind == "fleet" or conversion.to == "fleet"
    described = is_alone and kind != "checkpoint", "without -m, and with another SOURCE"
    effects = {
        "table": (kind == "parquet" or described[0], "with Parquet files, or without -m"),
        "dim": described,
        "rule": described,
        "accessor": (with_fleet, "from or to Fleet's folders"),
        "tables": (with_fleet, "from or to Fleet's folders"),
        "time": (with_fleet or kind == "parquet", "with rows that a checkpoint does not date"),
        "dense_steps": (kind == "fleet" and not is_alone, "from Fleet's folders, with -m"),
        "shard_num": (conversion.to == "fleet", "--to fleet"),
        "gzip": (conversion.to == "fleet", "--to fleet"),
        "state": (conversion.to == "parquet", "--to parquet"),
    }
    nothing = {field.name: field.default for field in fields(conversion)}
    for name, (has_effect, where) in effects.items():
        if not has_effect and (value := getattr(conversion, name)) != nothing[name]:
            source = f"a {kind}" if kind == "checkpoint" else kind
            raise BadRequest(
                f"convert: expected --{name} {where}, found {value!r} from {source} to"
                f" {conversion.to}{'' if is_alone else ' with -m'}, where it has no effect"
            )


def _trainer(conversion: Conversion, kind: Kind) -> Trainer:
    if conversion.config is not None:
        recipe = create_recipe(conversion.config, Settings.read(conversion.config))
        return Trainer.from_recipe(recipe)
    if kind != "parquet":
        log.info("convert: a dense part is left out; it needs -m config.yaml with its model")
    if kind == "checkpoint":
        saved = read_manifest(open_storage(conversion.source, None)).tables.values()
        tables = [Table.of_schema(part.schema) for part in saved]
    else:
        tables = _described(conversion)
    model = _TablesOnly(tables)
    return Trainer(model, None, loss=lambda _, batch: model(batch))


def _described(conversion: Conversion) -> list[Table]:
    assert conversion.table is not None
    assert conversion.dim is not None
    check_choice("convert", RULES, **{"--rule": conversion.rule})
    assert conversion.rule is not None
    _, rule, values = RULES[conversion.rule]
    return [
        Table(
            conversion.table,
            dim=conversion.dim,
            optimizer=rule(**values),
            absent="zeros",
            policy=policy.SparseAccessor(),
        )
    ]


class _TablesOnly(nn.Module):
    """A model of tables only."""

    def __init__(self, tables: list[Table]) -> None:
        super().__init__()
        self.rows = nn.ModuleList(EmbeddingBag(table, features=["key"]) for table in tables)

    def forward(self, batch: Batch) -> Tensor:
        raise BadRequest("convert: these tables are not for training")


def _read(trainer: Trainer, conversion: Conversion, kind: Kind) -> dict[str, int]:
    """Read the source. Returns the number of rows of each table."""
    if kind == "checkpoint":
        trainer.load(conversion.source, dense="match" if conversion.config is None else "strict")
        manifest = read_manifest(open_storage(conversion.source, None))
        return {name: part.num_rows for name, part in manifest.tables.items()}
    if kind == "fleet":
        return interchange.import_fleet(
            trainer,
            conversion.source,
            tables=conversion.tables,
            accessor=conversion.accessor,
            time=conversion.time,
            dense_steps=conversion.dense_steps,
        )
    name = _one_table(trainer, conversion)
    return {
        name: interchange.import_parquet(trainer, name, conversion.source, time=conversion.time)
    }


def _one_table(trainer: Trainer, conversion: Conversion) -> str:
    names = [table.name for table in trainer.optimizer.tables]
    if conversion.table is None and len(names) > 1:
        raise BadRequest(f"convert: expected --table among {names}, found none")
    return conversion.table or names[0]


def _write(trainer: Trainer, conversion: Conversion) -> None:
    if conversion.to == "checkpoint":
        trainer.save(conversion.target)
    elif conversion.to == "parquet":
        interchange.export_parquet(trainer, conversion.target, state=conversion.state)
    else:
        interchange.export_fleet(
            trainer,
            conversion.target,
            tables=conversion.tables,
            accessor=conversion.accessor,
            time=conversion.time,
            shard_num=conversion.shard_num,
            compress=conversion.gzip,
        )
