"""Dense blocks with their optimizer state, read and written from a worker.

export.blocks   this server's blocks: body {"optimizer", "blocks": [[id, [tensor's name, ...]]]},
                the tensors in that order
import.blocks   the same the other way: these tensors take the place of those of the same name
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from trireme.errors import BadRequest
from trireme.interchange.worker_side.orders import TIMEOUT_S
from trireme.protocol.wire import Array, Arrays, need_list
from trireme.rpc import Call, Handler, Reply, Request
from trireme.server.block_store import Part
from trireme.server.state import ServerState
from trireme.worker.client import Client

# Of a whole block, in the states of optimizers.
SCALARS = ("step", "n", "eta", "mu", "mu_product")

BlockTensors = dict[str, dict[str, Array]]


class BlockHandlers:
    """The methods `export.blocks` and `import.blocks`."""

    def __init__(self, server: ServerState) -> None:
        self._server = server

    def handlers(self) -> dict[str, Handler]:
        return {"export.blocks": self._on_export, "import.blocks": self._on_import}

    def _on_export(self, request: Request) -> Reply:
        del request
        with self._server.blocks_lock:
            blocks = self._server.blocks
            found = {spec.id: blocks.state_of(spec.id) for spec in blocks.specs()}
            optimizer = blocks.class_name
        names = [[block_id, list(tensors)] for block_id, tensors in found.items()]
        arrays = [t.numpy().reshape(-1) for tensors in found.values() for t in tensors.values()]
        return Reply({"optimizer": optimizer, "blocks": names}, arrays)

    def _on_import(self, request: Request) -> None:
        given = _given(request)
        with self._server.journal.replacing(), self._server.blocks_lock:
            blocks, states = self._server.blocks, dict[str, dict[str, torch.Tensor]]()
            for block_id, tensors in given.items():
                if block_id not in blocks:
                    raise BadRequest(f"import.blocks: no block {block_id!r} on this server")
                states[block_id] = blocks.state_with(block_id, tensors)
            for block_id, state in states.items():
                blocks.restore(block_id, [Part(0, state, blocks.marks_of(block_id))])


def _given(request: Request) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a message, flat, by block and name."""
    arrays, given = Arrays(request.arrays), dict[str, dict[str, torch.Tensor]]()
    for entry in need_list(request.body, "blocks", list):
        block_id, names = entry if len(entry) == 2 else (None, None)
        if not isinstance(block_id, str) or not isinstance(names, list):
            raise BadRequest(f"import.blocks: expected [id, names], found {entry!r}"[:300])
        tensors = given.setdefault(block_id, {})
        for name in need_list({"names": names}, "names", str):
            values = arrays.take(f"{block_id} {name}", np.float32, (None,))
            tensors[name] = torch.from_numpy(values.copy())
    arrays.end()
    return given


def read_blocks(client: Client) -> tuple[str | None, BlockTensors]:
    """The class of the dense optimizer, and all blocks: by id, then by tensor's name, flat."""
    optimizer, found = None, BlockTensors()
    for reply in client.everywhere("export.blocks", {}, timeout_s=TIMEOUT_S):
        optimizer = reply.body["optimizer"] or optimizer
        rest = iter(reply.arrays)
        for block_id, names in reply.body["blocks"]:
            found[block_id] = {name: next(rest) for name in names}
    return optimizer, found


def write_blocks(client: Client, blocks: Mapping[str, Mapping[str, Array]]) -> None:
    """Give these tensors, by block id and name, to the servers that own the blocks."""
    calls = []
    for server, endpoint in enumerate(client.map.servers):
        owned = [block_id for block_id in client.map.blocks_of(server) if block_id in blocks]
        body = {"blocks": [[block_id, list(blocks[block_id])] for block_id in owned]}
        arrays = [
            np.ascontiguousarray(values, np.float32)
            for block_id in owned
            for values in blocks[block_id].values()
        ]
        calls.append(Call(endpoint, "import.blocks", body, arrays))
    client.call_all(calls, TIMEOUT_S)
