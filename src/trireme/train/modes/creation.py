"""What the workers of a job create on its servers before they train."""

from trireme.blocks import Blocks
from trireme.protocol.dense_optimizers import optimizer_spec
from trireme.train.modes.local_training import LocalTraining
from trireme.train.stream_checks import agree_on_model


def create_on_servers(local: LocalTraining) -> None:
    """Create the tables and blocks, with worker 0's weights. Every worker calls it.

    Raises:
        SchemaMismatch: workers differ in the strategy, blocks or model, or the servers have another
            table of that name.
    """
    cluster, optimizer, dense = local.cluster, local.optimizer, local.replica.dense
    client, blocks = cluster.client, local.blocks or Blocks()
    client.agree("strategy", repr(local.strategy))
    kind = "no optimizer" if optimizer is None else type(optimizer).__name__
    agree_on_model(cluster, local.tables, dense, kind)
    for table in local.tables:
        cluster.ensure_table(table)
    if optimizer is not None:
        client.agree("blocks", repr(blocks))
        names = [block.param for block in dense.specs]
        client.create_blocks(
            optimizer_spec(optimizer),
            local.group_values(),
            dense,
            lambda servers: blocks.owners(names, servers),
        )
