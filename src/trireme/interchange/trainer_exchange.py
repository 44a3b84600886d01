"""What a trainer takes from other systems, and gives to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trireme.interchange import models as interchange
from trireme.train.optimizer import DistributedOptimizer


class Exchange:
    """The methods of a Trainer that read and write other systems' formats."""

    optimizer: DistributedOptimizer
    _shows: bool

    def import_fleet(
        self,
        path: str | Path,
        *,
        tables: Mapping[str, int] | None = None,
        dense: Mapping[str, str] | None = None,
        accessor: str | None = None,
        time: int | None = None,
        dense_steps: int = 0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> dict[str, int]:
        """Load what Fleet's `save_persistables` has written: rows with their state and statistics,
        dense parameters with their optimizer's state. All of it comes in, or nothing.

        The rows replace the tables' own. The folder must be on storage that all servers share.

        Args:
            path: the folder that holds 000, 001, ...
            tables: Fleet's number of each table to load; None: the only table is 0.
            dense: names of our parameters by Paddle's, for all of them; None: the n-th
                torch.nn.Linear of the model is Paddle's linear_n. {}: leave them as they are.
            accessor: SparseAccessor, CtrCommonAccessor or CtrDoubleAccessor, whose order of fields
                the text has; None: that of the table's policy.
            time: data time in seconds of the save, from which unseen days count back; None: that
                of `set_time`.
            dense_steps: steps that the dense optimizer has made, which the text does not say; 0:
                its bias correction begins anew, as Fleet's does.

        Returns:
            How many rows each table got.

        Raises:
            DataError: a line is wrong; names file, line and value. BadRequest: a table whose rule
                Fleet does not have, or names that do not fit.
        """
        return interchange.import_fleet(
            self.optimizer,
            path,
            tables=tables,
            dense=dense,
            accessor=accessor,
            time=time,
            dense_steps=dense_steps,
            storage_options=storage_options,
            shows=self._shows,
        )

    def export_fleet(
        self,
        path: str | Path,
        *,
        tables: Mapping[str, int] | None = None,
        dense: Mapping[str, str] | None = None,
        accessor: str | None = None,
        time: int | None = None,
        shard_num: int = 1000,
        compress: bool = False,
    ) -> dict[str, int]:
        """Write what Fleet's `load_model` reads into a new folder; the arguments are those of
        `import_fleet`.

        Args:
            time: data time in seconds that unseen days are counted to; None: that of `set_time`.
            shard_num: that of Fleet's table, which reads as many files.
            compress: gzip the files.
        """
        return interchange.export_fleet(
            self.optimizer,
            path,
            tables=tables,
            dense=dense,
            accessor=accessor,
            time=time,
            shard_num=shard_num,
            compress=compress,
        )

    def import_rows(
        self,
        table: str,
        source: str | Path | Sequence[str] | Mapping[str, Any],
        *,
        columns: Mapping[str, str] | None = None,
        replace: bool = False,
        time: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> int:
        """Put rows of another system into a table; returns how many. All come in, or none.

        Args:
            source: a Parquet file, a folder of them, a list of files; or NumPy arrays by column.
            columns: what the files call a column, by its name here: key, weights, and optionally
                state, show, click, delta_score, feature, time (docs/interchange.md).
            replace: the rows are then all that the table has. Else they take the place of rows of
                the same keys.
            time: data time in seconds of the last push, for rows without a column `time`; None:
                that of `set_time`.
        """
        return interchange.import_rows(
            self.optimizer,
            table,
            source,
            columns=columns,
            replace=replace,
            time=time,
            storage_options=storage_options,
            shows=self._shows,
        )

    def export_rows(
        self,
        path: str | Path,
        *,
        tables: Sequence[str] | None = None,
        state: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> dict[str, int]:
        """Write tables as Parquet, PATH/TABLE/part-*.parquet; returns how many rows each has.

        Args:
            path: a new folder on storage that all processes share, or a location such as
                s3://bucket/key, where a file _SUCCESS comes last.
            tables: default all.
            state: the update rules' state, too.
        """
        return interchange.export_rows(
            self.optimizer, path, tables=tables, state=state, storage_options=storage_options
        )
