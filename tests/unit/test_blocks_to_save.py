"""Blocks that are saved one after the other, while pushes go on."""

from __future__ import annotations

import numpy as np

from trireme import _core
from trireme.checkpoint.server_side.save import _blocks_to_save
from trireme.protocol.block_spec import BlockSpec
from trireme.server.block_slice import BlockSlice
from trireme.server.block_store import BlockStore
from trireme.server.state import ServerState

GROUPS = [{"lr": 1.0}]
SPECS = [BlockSpec("w", start, 64, 0) for start in (0, 64, 128)]
IDS = [spec.id for spec in SPECS]


def push(store: BlockStore, sequence: int) -> None:
    """Each weight counts the pushes that it has seen, downwards."""
    store.apply(GROUPS, IDS, np.ones(192, np.float32), [(0, sequence)])


def test_a_push_between_two_blocks_of_a_save_is_in_the_later_ones_and_reaches_each_once() -> None:
    server, resumed = ServerState(_core.Pool(1)), BlockStore()
    for store in (server.blocks, resumed):
        store.create("SGD", GROUPS, SPECS, np.zeros(192, np.float32), {})
    push(server.blocks, 1)
    saving = _blocks_to_save(server)
    saved = [next(saving)]
    push(server.blocks, 2)
    saved += saving
    assert [dict(marks) for _, _, marks in saved] == [{0: 1}, {0: 2}, {0: 2}]
    for spec, tensors, marks in saved:
        assert tensors["weights"].tolist() == [-marks[0]] * 64
        resumed.restore(spec.id, [BlockSlice(spec.start, tensors, marks)])
    push(resumed, 2)
    assert resumed.read(IDS).tolist() == [-2.0] * 192
