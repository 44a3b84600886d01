"""Dense blocks with their optimizer state, for a worker that reads or writes them.

export.blocks   this server's blocks: body {"optimizer", "blocks": [[id, [tensor's name, ...]]]},
                the tensors in that order
import.blocks   the other way: these tensors replace those of the same name
"""

import numpy as np
import torch

from trireme.errors import BadRequest
from trireme.protocol.wire import Arrays, need_list
from trireme.rpc import Handler, Reply, Request
from trireme.server.block_slice import BlockSlice
from trireme.server.state import ServerState


def block_handlers(server: ServerState) -> dict[str, Handler]:
    return {
        "export.blocks": lambda _: _export(server),
        "import.blocks": lambda request: _import(server, _read(request)),
    }


def _export(server: ServerState) -> Reply:
    with server.blocks_lock:
        store = server.blocks
        blocks = {spec.id: store.state_of(spec.id) for spec in store.specs()}
        optimizer = store.class_name
    names = [[block_id, list(tensors)] for block_id, tensors in blocks.items()]
    arrays = [t.numpy().reshape(-1) for tensors in blocks.values() for t in tensors.values()]
    return Reply({"optimizer": optimizer, "blocks": names}, arrays)


def _import(server: ServerState, blocks: dict[str, dict[str, torch.Tensor]]) -> None:
    store, states = server.blocks, dict[str, dict[str, torch.Tensor]]()
    with server.blocks_lock:
        for block_id, tensors in blocks.items():
            if block_id not in store:
                raise BadRequest(f"import.blocks: no block {block_id!r} on this server")
            states[block_id] = store.state_with(block_id, tensors)
    with server.journal.replacing(), server.blocks_lock:
        for block_id, state in states.items():
            store.restore(block_id, [BlockSlice(0, state, store.marks_of(block_id))])


def _read(request: Request) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a message, flat, by block and name."""
    arrays, blocks = Arrays(request.arrays), dict[str, dict[str, torch.Tensor]]()
    for entry in need_list(request.body, "blocks", list):
        block_id, names = entry if len(entry) == 2 else (None, None)
        if not isinstance(block_id, str) or not isinstance(names, list):
            raise BadRequest(f"import.blocks: expected [id, names], found {entry!r}"[:300])
        tensors = blocks.setdefault(block_id, {})
        for name in need_list({"names": names}, "names", str):
            values = arrays.take(f"{block_id} {name}", np.float32, (None,))
            tensors[name] = torch.from_numpy(values.copy())
    arrays.end()
    return blocks
