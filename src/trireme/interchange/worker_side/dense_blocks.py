"""Dense blocks with their optimizer state, read from the servers and written to them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from trireme.protocol.block_messages import BlockTensors, tensors_from_wire, tensors_to_wire
from trireme.protocol.wire import Array, Arrays
from trireme.rpc import Call
from trireme.worker.client import WorkerClient

TIMEOUT_S = 3600.0  # for one request

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
    client.servers.call_all(block_calls(client, "import.blocks", {}, blocks), TIMEOUT_S)


def block_calls(
    client: WorkerClient,
    method: str,
    body: Mapping[str, Any],
    blocks: Mapping[str, Mapping[str, Array]],
) -> list[Call]:
    """Calls of all servers, each with the tensors of the blocks that it owns."""
    calls = []
    for server, endpoint in enumerate(client.servers.map.servers):
        owned = {
            block_id: {name: np.asarray(v, np.float32) for name, v in blocks[block_id].items()}
            for block_id in client.servers.map.blocks_of(server)
            if block_id in blocks
        }
        names, arrays = tensors_to_wire(owned)
        calls.append(Call(endpoint, method, {**body, "names": names}, arrays))
    return calls
