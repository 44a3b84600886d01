"""Models in other systems' formats: every worker calls, worker 0 has the servers act."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from trireme.errors import BadRequest, DataError
from trireme.interchange.formats import fleet_dense
from trireme.interchange.formats.fleet_dense import Column
from trireme.interchange.formats.folder import published_folder
from trireme.interchange.worker_side import orders
from trireme.interchange.worker_side.dense_blocks import SCALARS, read_blocks, write_blocks
from trireme.policy import CtrDoubleAccessor
from trireme.progress import display
from trireme.protocol.wire import Array
from trireme.table import Table
from trireme.train.first_worker import let_first_worker
from trireme.train.optimizer import DistributedOptimizer

SPARSE_FILE = re.compile(r"part-\d{3}-\d{5}(\.gz)?")
VARIABLES = "dnn_plugin"  # folder of Paddle's save_inference_model
DENSE_FILE = re.compile(r"part-\d{3}(\.gz)?")


@dataclass(frozen=True)
class DenseNames:
    """Our dense parameters in the order in which Fleet lays them end to end.

    entries: (Paddle's name, ours, whether Paddle keeps it transposed), alphabetically by Paddle's
        name. Weights of linear layers are (in, out) there and (out, in) in torch.
    """

    entries: tuple[tuple[str, str, bool], ...]

    @classmethod
    def of(cls, optimizer: DistributedOptimizer, names: Mapping[str, str] | None) -> DenseNames:
        """
        Args:
            names: ours by Paddle's; None: the n-th torch.nn.Linear of the model is Paddle's
                linear_n, as in models of linear layers alone.

        Raises:
            BadRequest: a parameter without a name, or a name without a parameter.
        """
        ours = list(_parameters(optimizer))
        linears = [
            name for name, module in optimizer.model.named_modules() if type(module) is nn.Linear
        ]
        if names is None:
            names = {
                f"linear_{i}.{theirs}": f"{linear}.{own}"
                for i, linear in enumerate(linears)
                for theirs, own in (("w_0", "weight"), ("b_0", "bias"))
                if f"{linear}.{own}" in ours
            }
        given = list(names.values())
        if sorted(given) != sorted(ours):
            raise BadRequest(
                f"dense: expected each of {sorted(ours)} once as a value of"
                f" dense={{Paddle's name: ours}}, found {sorted(given)}"
            )
        weights = {f"{linear}.weight" for linear in linears}
        return cls(
            tuple((theirs, names[theirs], names[theirs] in weights) for theirs in sorted(names))
        )


def _parameters(optimizer: DistributedOptimizer) -> dict[str, tuple[int, ...]]:
    """Shapes of the dense parameters that the optimizer drives, by name."""
    driven = {spec.param for spec in optimizer.replica.dense.specs}
    return {n: tuple(p.shape) for n, p in optimizer.model.named_parameters() if n in driven}


# ---- Fleet ----


def is_fleet(path: str | os.PathLike[str]) -> bool:
    """Whether a local folder is what Fleet's save_persistables leaves behind."""
    folder = Path(path)
    return any(
        DENSE_FILE.fullmatch(file.name) or SPARSE_FILE.fullmatch(file.name)
        for file in folder.glob("[0-9][0-9][0-9]/part-*")
    )


def import_fleet(
    optimizer: DistributedOptimizer,
    path: str | os.PathLike[str],
    *,
    tables: Mapping[str, int] | None = None,
    dense: Mapping[str, str] | None = None,
    accessor: str | None = None,
    time: int | None = None,
    dense_steps: int = 0,
    storage_options: Mapping[str, Any] | None = None,
    shows: bool = False,
) -> dict[str, int]:
    """See Trainer.import_fleet. shows: how far it is."""
    path = os.fspath(path)
    optimizer.flush()
    optimizer.cluster.client.gather({}, [], purpose="import_fleet")

    def act() -> dict[str, Any]:
        of_table = _tables(optimizer, tables)
        names = DenseNames.of(optimizer, dense) if dense != {} else None
        files = {
            n: _fleet_files(path, i, SPARSE_FILE, storage_options) for n, i in of_table.items()
        }
        values = None
        if names is not None and names.entries:
            values = _read_dense(optimizer, path, names, dense_steps, storage_options)
        optimizer.publish()  # what is not imported stays as it is
        client, counts = optimizer.cluster.client, dict[str, Any]()
        with orders.importing(client, list(of_table), replace=True):
            for table in optimizer.tables:
                if table.name not in of_table:
                    continue
                with _watched(f"import {table.name}", shows) as watch:
                    counts[table.name] = orders.read_fleet_rows(
                        client,
                        table.name,
                        files[table.name],
                        accessor=accessor or _accessor(table),
                        betas=_betas(table),
                        time=_time(optimizer, time),
                        storage_options=storage_options,
                        watch=watch,
                    )
        if values is not None:
            write_blocks(client, values)
        return counts

    counts = let_first_worker(optimizer.cluster, "import_fleet", act)
    optimizer.adopt()
    return counts


@contextmanager
def _watched(what: str, shows: bool) -> Iterator[orders.Watch]:
    with display(what, is_quiet=not shows) as shown:

        def watch(fraction: float) -> None:
            if shown.is_due():
                shown.show_fraction(fraction)

        yield watch


def _time(optimizer: DistributedOptimizer, time: int | None) -> int:
    """A data time in seconds; None: that of the run."""
    return optimizer.data_time() if time is None else time


def _tables(optimizer: DistributedOptimizer, ids: Mapping[str, int] | None) -> dict[str, int]:
    names = [table.name for table in optimizer.tables]
    if ids is None:
        if len(names) > 1:
            raise BadRequest(
                f"tables: expected tables={{name: Fleet's number of it}}, found none for {names}"
            )
        return dict.fromkeys(names, 0)
    unknown = sorted(ids.keys() - set(names))
    if unknown or len(set(ids.values())) < len(ids):
        raise BadRequest(f"tables: expected names among {names}, each with its number, found {ids}")
    return dict(ids)


def _accessor(table: Table) -> str:
    is_double = isinstance(table.policy, CtrDoubleAccessor)
    return "CtrDoubleAccessor" if is_double else "CtrCommonAccessor"


def _betas(table: Table) -> tuple[float, float]:
    beta1, beta2 = table.optimizer.group().get("betas", (0.0, 0.0))
    return float(beta1), float(beta2)


def _fleet_files(
    path: str, number: int, name: re.Pattern[str], storage_options: Mapping[str, Any] | None
) -> list[str]:
    folder = f"{path.rstrip('/')}/{number:03d}"
    found = orders.list_files(folder, storage_options)
    wrong = [file for file in found if not name.fullmatch(file.rpartition("/")[2])]
    if wrong:
        raise DataError(f"{folder}: expected files named {name.pattern}, found {wrong[0]}")
    return found


def _read_dense(
    optimizer: DistributedOptimizer,
    path: str,
    names: DenseNames,
    steps: int,
    storage_options: Mapping[str, Any] | None,
) -> dict[str, dict[str, Array]]:
    """The blocks' tensors: of save_inference_model's variables if there are any, else of the first
    dense table.
    """
    kind, _ = read_blocks(optimizer.cluster.client)
    variables = f"{path.rstrip('/')}/{VARIABLES}"
    if _exists(variables, storage_options):
        state: tuple[Column, ...] = ()
        flat = _from_variables(optimizer, names, variables, storage_options)
    else:
        state = fleet_dense.COLUMNS.get(str(kind), ())
        files = _dense_files(path, storage_options)
        columns = fleet_dense.read_text(files, storage_options)
        if columns.shape[1] != 1 + len(state):
            raise DataError(
                f"{files[0]}: expected a weight and {len(state)} numbers of {kind} in each line,"
                f" found {columns.shape[1]} numbers"
            )
        flat = _from_fleet(optimizer, names, columns, files[0])
    tensors = dict[str, dict[str, Array]]()
    for spec in optimizer.replica.dense.specs:
        part = flat[spec.param][spec.start : spec.start + spec.size]
        of_block = {"weights": part[:, 0]}
        for number, column in enumerate(state, 1):
            if column.name:
                values = part[:1, number] if column.name in SCALARS else part[:, number]
                of_block[column.name] = values * np.float32(column.sign)
        if kind == "Adam" and state:
            of_block["step"] = np.array([steps], np.float32)
        tensors[spec.id] = of_block
    return tensors


def _exists(folder: str, storage_options: Mapping[str, Any] | None) -> bool:
    try:
        return bool(orders.list_files(folder, storage_options))
    except DataError:
        return False


def _from_variables(
    optimizer: DistributedOptimizer,
    names: DenseNames,
    folder: str,
    storage_options: Mapping[str, Any] | None,
) -> dict[str, Array]:
    """Each parameter's elements in our order, (elements, 1), of files by Paddle's names."""
    shapes, flat = _parameters(optimizer), dict[str, Array]()
    for theirs, ours, is_transposed in names.entries:
        values = fleet_dense.read_variable(f"{folder}/{theirs}", storage_options)
        values = values.T if is_transposed else values
        if values.shape != shapes[ours]:
            raise DataError(
                f"{folder}/{theirs}: expected the shape of {ours}, {shapes[ours]}, found"
                f" {values.shape}"
            )
        flat[ours] = values.reshape(-1, 1)
    return flat


def _dense_files(path: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    """Those of the first table whose files have a server's number alone."""
    for number in range(1000):
        found = orders.list_files(f"{path.rstrip('/')}/{number:03d}", storage_options)
        if all(DENSE_FILE.fullmatch(file.rpartition("/")[2]) for file in found):
            return found
    raise DataError(f"{path}: expected a dense table, found none")


def _from_fleet(
    optimizer: DistributedOptimizer, names: DenseNames, columns: Array, where: str
) -> dict[str, Array]:
    """Each parameter's elements in our order, (elements, columns)."""
    shapes, begin = _parameters(optimizer), 0
    expected = sum(int(np.prod(shapes[ours])) for _, ours, _ in names.entries)
    if len(columns) != expected:
        raise DataError(f"{where}: expected {expected} elements in all, found {len(columns)}")
    flat = dict[str, Array]()
    for _, ours, is_transposed in names.entries:
        shape = shapes[ours]
        size = int(np.prod(shape))
        part = columns[begin : begin + size]
        if is_transposed:
            part = part.reshape(shape[1], shape[0], -1).swapaxes(0, 1).reshape(size, -1)
        flat[ours] = part
        begin += size
    return flat


def export_fleet(
    optimizer: DistributedOptimizer,
    path: str | os.PathLike[str],
    *,
    tables: Mapping[str, int] | None = None,
    dense: Mapping[str, str] | None = None,
    accessor: str | None = None,
    time: int | None = None,
    shard_num: int = 1000,
    compress: bool = False,
) -> dict[str, int]:
    """See Trainer.export_fleet."""
    optimizer.flush()
    optimizer.cluster.client.gather({}, [], purpose="export_fleet")

    def act() -> dict[str, Any]:
        of_table = _tables(optimizer, tables)
        names = DenseNames.of(optimizer, dense) if dense != {} else None
        counts = dict[str, Any]()
        if "://" in os.fspath(path):
            raise BadRequest(f"export_fleet: expected a local folder, found {path}")
        with published_folder(path) as place:
            folder = Path(place)
            for table in optimizer.tables:
                if table.name in of_table:
                    counts[table.name] = orders.write_fleet_rows(
                        optimizer.cluster.client,
                        table.name,
                        folder / f"{of_table[table.name]:03d}",
                        accessor=accessor or _accessor(table),
                        betas=_betas(table),
                        time=_time(optimizer, time),
                        shard_num=shard_num,
                        compress=compress,
                    )
            if names is not None and names.entries:
                number = max(of_table.values(), default=-1) + 1
                _write_dense(optimizer, folder / f"{number:03d}", names, compress)
        return counts

    return let_first_worker(optimizer.cluster, "export_fleet", act)


def _write_dense(
    optimizer: DistributedOptimizer, folder: Path, names: DenseNames, compress: bool
) -> None:
    optimizer.publish()
    kind, blocks = read_blocks(optimizer.cluster.client)
    state = fleet_dense.COLUMNS.get(str(kind))
    if state is None:
        raise BadRequest(
            f"export_fleet: expected one of {sorted(fleet_dense.COLUMNS)} as the dense optimizer,"
            f" whose state Fleet has too, found {kind}; pass dense={{}} to leave the dense part out"
        )
    flat = {
        name: np.zeros((int(np.prod(shape)), 1 + len(state)), np.float32)
        for name, shape in _parameters(optimizer).items()
    }
    for spec in optimizer.replica.dense.specs:
        part = flat[spec.param][spec.start : spec.start + spec.size]
        for number, column in enumerate((Column("weights"), *state)):
            if column.name in blocks[spec.id]:  # no state before the first step
                part[:, number] = blocks[spec.id][column.name] * np.float32(column.sign)
    text = fleet_dense.write_text(_to_fleet(optimizer, names, flat))
    folder.mkdir()
    file = folder / f"part-000{'.gz' if compress else ''}"
    file.write_bytes(gzip.compress(text, mtime=0) if compress else text)


def _to_fleet(
    optimizer: DistributedOptimizer, names: DenseNames, flat: Mapping[str, Array]
) -> Array:
    """The inverse of `_from_fleet`."""
    shapes, parts = _parameters(optimizer), []
    for _, ours, is_transposed in names.entries:
        part = flat[ours]
        if is_transposed:
            out, into = shapes[ours]
            part = part.reshape(out, into, -1).swapaxes(0, 1).reshape(out * into, -1)
        parts.append(part)
    return np.concatenate(parts)


# ---- rows alone ----


def import_rows(
    optimizer: DistributedOptimizer,
    table: str,
    source: str | os.PathLike[str] | Sequence[str] | Mapping[str, Array],
    *,
    columns: Mapping[str, str] | None = None,
    replace: bool = False,
    time: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    shows: bool = False,
) -> int:
    """See Trainer.import_rows. shows: how far it is."""
    if table not in [t.name for t in optimizer.tables]:
        known = [t.name for t in optimizer.tables]
        raise BadRequest(f"import_rows: expected a table among {known}, found {table!r}")
    optimizer.flush()
    optimizer.cluster.client.gather({}, [], purpose="import_rows")

    def act() -> dict[str, Any]:
        client = optimizer.cluster.client
        with orders.importing(client, [table], replace=replace):
            if isinstance(source, Mapping):
                count = orders.send_rows(
                    client, table, source, time=_time(optimizer, time), pool=optimizer.cluster.pool
                )
            else:
                files = orders.parquet_files(source, storage_options)
                with _watched(f"import {table}", shows) as watch:
                    count = orders.read_parquet(
                        client,
                        table,
                        files,
                        columns or {},
                        time=_time(optimizer, time),
                        storage_options=storage_options,
                        watch=watch,
                    )
        return {"rows": count}

    return int(let_first_worker(optimizer.cluster, "import_rows", act)["rows"])


def export_rows(
    optimizer: DistributedOptimizer,
    path: str | os.PathLike[str],
    *,
    tables: Sequence[str] | None = None,
    state: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """See Trainer.export_rows."""
    optimizer.flush()
    optimizer.cluster.client.gather({}, [], purpose="export_rows")

    def act() -> dict[str, Any]:
        with published_folder(path, storage_options) as place:
            return {
                name: orders.write_parquet(
                    optimizer.cluster.client,
                    name,
                    f"{place}/{name}",
                    state=state,
                    storage_options=storage_options,
                )
                for name in tables or [table.name for table in optimizer.tables]
            }

    return let_first_worker(optimizer.cluster, "export_rows", act)
