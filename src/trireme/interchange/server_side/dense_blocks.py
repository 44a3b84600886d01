"""Dense blocks with their optimizer state, for a worker that reads or writes them.

export.blocks   this server's blocks, as `tensors_to_wire` makes arrays of them
import.blocks   the other way: these tensors replace those of the same name
"""

import numpy as np
import torch

from trireme.errors import BadRequest
from trireme.protocol.block_messages import tensors_from_wire, tensors_to_wire
from trireme.protocol.wire import Arrays, need_list
from trireme.rpc import Handler, Reply, Request
from trireme.server.state import ServerState


def block_handlers(server: ServerState) -> dict[str, Handler]:
    return {
        "export.blocks": lambda _: _export(server),
        "import.blocks": lambda request: _import(server, blocks_of(server, request)),
    }


def _export(server: ServerState) -> Reply:
    with server.blocks_lock:
        store = server.blocks
        blocks = {spec.id: store.state_of(spec.id) for spec in store.specs()}
        optimizer = store.class_name
    names, arrays = tensors_to_wire(
        {id: {name: t.numpy() for name, t in tensors.items()} for id, tensors in blocks.items()}
    )
    return Reply({"optimizer": optimizer, "names": names}, arrays)


def _import(server: ServerState, blocks: dict[str, dict[str, torch.Tensor]]) -> None:
    with server.journal.replacing():
        with server.journal.changing():
            server.claim()
        server.replace_blocks(blocks)


def blocks_of(server: ServerState, request: Request) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a message, flat, by block and name. Raises BadRequest and SchemaMismatch: they
    do not fit the blocks.
    """
    arrays, names = Arrays(request.arrays), need_list(request.body, "names", str)
    blocks = tensors_from_wire(names, arrays, np.float32, server.held.room)
    arrays.end()
    read = {
        block_id: {name: torch.from_numpy(values.copy()) for name, values in tensors.items()}
        for block_id, tensors in blocks.items()
    }
    with server.blocks_lock:
        for block_id, tensors in read.items():
            if block_id not in server.blocks:
                raise BadRequest(f"{request.method}: no block {block_id!r} on this server")
            server.blocks.state_with(block_id, tensors)
    return read
