"""Dense blocks with their optimizer state, read from the servers and written to them."""

from collections.abc import Mapping

import numpy as np

from trireme.interchange.worker_side.import_requests import TIMEOUT_S
from trireme.protocol.block_messages import BlockTensors, tensors_from_wire, tensors_to_wire
from trireme.protocol.wire import Array, Arrays
from trireme.rpc import Call
from trireme.worker.client import WorkerClient

# In the states of optimizers: one number for the whole block.
SCALARS = ("step", "n", "eta", "mu", "mu_product")


def read_blocks(client: WorkerClient) -> tuple[str | None, BlockTensors]:
    """The class of the dense optimizer, and all blocks: by id, then by tensor's name, flat."""
    optimizer, blocks = None, BlockTensors()
    for reply in client.servers.everywhere("export.blocks", {}, timeout_s=TIMEOUT_S):
        optimizer = reply.body["optimizer"] or optimizer
        blocks |= tensors_from_wire(reply.body["names"], Arrays(reply.arrays), None)
    return optimizer, blocks


def write_blocks(client: WorkerClient, blocks: Mapping[str, Mapping[str, Array]]) -> None:
    """Send these tensors, by block id and name, to the servers that own the blocks."""
    calls = []
    for server, endpoint in enumerate(client.servers.map.servers):
        owned = {
            block_id: {name: np.asarray(v, np.float32) for name, v in blocks[block_id].items()}
            for block_id in client.servers.map.blocks_of(server)
            if block_id in blocks
        }
        names, arrays = tensors_to_wire(owned)
        calls.append(Call(endpoint, "import.blocks", {"names": names}, arrays))
    client.servers.call_all(calls, TIMEOUT_S)
