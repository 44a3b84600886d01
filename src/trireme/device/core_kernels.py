"""The implementation on the CPU: the C++ core, on several threads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trireme import _core
from trireme.device.block_layout import BlockLayout, RowTensors
from trireme.device.block_statistics import RowStep, check_shows
from trireme.device.torch_kernels import TorchKernels


class CoreKernels(TorchKernels):
    """As there, but rows are looked up and updated by the core. Bags are pooled and summed by torch
    operations: passes do so by the gather of `trireme.nn`, and give distinct slots.
    """

    name = "the C++ core"

    def __init__(self, layout: BlockLayout, threads: _core.Pool) -> None:
        super().__init__(layout)
        self._layout, self._threads = layout, threads

    def weights(self, rows: RowTensors, slots: Tensor) -> Tensor:
        out = np.empty((len(slots), self._layout.dim), np.float32)
        layout, arrays = self._layout, rows.arrays()
        layout.core.block_weights(arrays, slots.numpy(), out, self._threads, layout.row_class)
        return torch.from_numpy(out)

    def update(self, rows: RowTensors, slots: Tensor, grads: Tensor, step: RowStep) -> None:
        layout, facts = self._layout, step.facts
        check_shows(facts, layout.policy)
        layout.core.update_block(
            rows.arrays(),
            slots.numpy(),
            grads.contiguous().numpy(),
            step.values.exact,
            self._threads,
            layout.row_class,
            time=facts.time,
            version=facts.version,
            show_click=None if facts.show_click is None else facts.show_click.numpy(),
            features=None if facts.features is None else facts.features.numpy(),
        )
