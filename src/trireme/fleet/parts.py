"""One table, or the dense parameters, of a model: saved and loaded by themselves; and the time of
the data.

A table is a folder of Parquet files with the state of its update rule, dense parameters are a file
of safetensors.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from trireme.errors import BadRequest, check_kind, check_known
from trireme.fleet.calls import job
from trireme.fleet.days import seconds_of_day
from trireme.fleet.executor import check_scope
from trireme.fleet.saving import check_folder, saved
from trireme.interchange import export_parquet, import_parquet
from trireme.storage.atomic_folder import new_folder
from trireme.table import Table
from trireme.train.first_worker import let_first_worker

DENSE = "dense.safetensors"


def save_one_table(table_id: int | str, path: str, mode: int = 0) -> int:
    """Write a table into PATH/TABLE, a new folder; every worker calls it. Returns the number of
    rows.

    table_id: the name of a table, or its place among those of the model. mode: 0, everything.
    """
    _check_mode("save_one_table", mode)
    check_folder("fleet.save_one_table", "path", path)
    table = _table("save_one_table", table_id)
    return export_parquet(job.trained(), path, tables=[table.name], state=True)[table.name]


def load_one_table(table_id: int | str, path: str, mode: int = 0) -> int:
    """Read what save_one_table has written, in place of the rows that the table has; every worker
    calls it. Returns the number of rows.
    """
    _check_mode("load_one_table", mode)
    check_folder("fleet.load_one_table", "path", path)
    table = _table("load_one_table", table_id)
    return import_parquet(job.trained(), table.name, f"{path}/{table.name}", replace=True)


def save_dense_params(
    executor: Any,
    dirname: str,
    scope: Any = None,
    program: Any = None,
    var_names: Collection[str] | None = None,
) -> None:
    """Write the dense parameters into a new folder, as dense.safetensors, which
    safetensors.torch.load_file reads; every worker calls it.

    executor, scope, program: Fleet's, as of static.Executor. var_names: of parameters; None: all.

    Raises BadRequest: the folder exists, or there is no parameter of a name.
    """
    optimizer = saved("save_dense_params", executor, program)
    check_scope("fleet.save_dense_params", scope)
    check_folder("fleet.save_dense_params", "dirname", dirname)
    parameters = dict(optimizer.model.named_parameters())
    names = list(parameters if var_names is None else var_names)
    check_known("fleet.save_dense_params", "var_names of", parameters, names)
    optimizer.flush()
    optimizer.cluster.client.coordinator.gather({}, [], purpose="save_dense_params")
    optimizer.refresh()

    def act() -> dict[str, Any]:
        tensors = {name: parameters[name].detach().cpu().contiguous() for name in names}
        with new_folder(Path(dirname).absolute()) as folder:
            save_file(tensors, Path(folder, DENSE))
        return {}

    let_first_worker(optimizer.cluster, "save_dense_params", act)


def set_date(table_id: int | str | None, day_id: str) -> None:
    """Set the day (UTC) of the data, as "20190720", by which rows fade and expire.

    table_id: None: a push has one time, for all tables; the table of a model that has one.
    """
    optimizer = job.trained()
    if table_id is not None and len(optimizer.tables) != 1:
        raise BadRequest(
            f"fleet.set_date: expected table_id None, found {table_id!r}: all tables of a model"
            " have the time of the data"
        )
    if table_id is not None:
        _table("set_date", table_id)
    optimizer.set_time(seconds_of_day("fleet.set_date", day_id))


def _table(method: str, table_id: int | str) -> Table:
    if not isinstance(table_id, str):
        check_kind(f"fleet.{method}", "table_id", table_id, int, "a name or a place")
    tables = list(job.trained().tables)
    if isinstance(table_id, str):
        matching = [table for table in tables if table.name == table_id]
    else:
        matching = tables[table_id : table_id + 1] if table_id >= 0 else []
    if not matching:
        known = ", ".join(f"{i} {table.name!r}" for i, table in enumerate(tables))
        raise BadRequest(
            f"fleet.{method}: expected a table of the model ({known}), found {table_id!r}"
        )
    return matching[0]


def _check_mode(method: str, mode: int) -> None:
    if mode != 0:
        raise BadRequest(
            f"fleet.{method}: expected mode 0, found {mode}: deltas are of all tables together, by"
            " fleet.save_persistables(mode=1)"
        )
