"""A push: the gradients of one step divided among the servers."""

from collections.abc import Mapping

from trireme import _core
from trireme.protocol.routing import BucketMap, Split
from trireme.protocol.wire import BlocksPush, TablePush
from trireme.table import RowClassId
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.gradients import DenseGradient, TableGradient


def split_tables(
    tables: Mapping[RowClassId, TableGradient], bucket_map: BucketMap, pool: _core.Pool
) -> list[list[TablePush]]:
    """Per server its keys of each table, with their gradients and columns; no table without keys:
    the more servers there are, the more pushes have none.
    """
    by_table = [_split_table(key, part, bucket_map, pool) for key, part in tables.items()]
    servers = range(len(bucket_map.servers))
    return [[p[server] for p in by_table if len(p[server].keys)] for server in servers]


def _split_table(
    class_id: RowClassId, part: TableGradient, bucket_map: BucketMap, pool: _core.Pool
) -> list[TablePush]:
    split = Split(part.keys, bucket_map, pool)
    keys, gradients = split.parts(part.keys), split.parts(part.gradients.numpy())
    columns = {column: split.parts(values) for column, values in part.columns.items()}
    return [
        TablePush(
            class_id.table,
            keys[server],
            gradients[server],
            part.values,
            {column: parts[server] for column, parts in columns.items()},
            class_id.row_class,
        )
        for server in range(len(bucket_map.servers))
    ]


def split_blocks(
    dense: DenseGradient | None, parameters: DenseParameters | None, bucket_map: BucketMap
) -> list[BlocksPush | None]:
    """Per server the gradients of its blocks."""
    num_servers = len(bucket_map.servers)
    if dense is None or parameters is None:
        return [None] * num_servers
    flat = parameters.flat_gradients(dense.gradients)
    pushes = list[BlocksPush | None]()
    for server in range(num_servers):
        block_ids = parameters.blocks_of(bucket_map, server)
        names = parameters.parameters_of(block_ids)
        absent = [name for name in names if dense.gradients[name] is None]
        pushes.append(BlocksPush(dense.groups, parameters.of_blocks(flat, block_ids), absent))
    return pushes
