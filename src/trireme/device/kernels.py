"""What computes on a block: one meaning, several implementations, chosen once for each block."""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from trireme import _core
from trireme.accelerator import HOST, runs_triton
from trireme.device.block_layout import BlockLayout, RowTensors
from trireme.device.block_statistics import RowStep
from trireme.device.slot_bags import SlotBags
from trireme.device.torch_kernels import CoreKernels, TorchKernels
from trireme.errors import BadRequest, check_choice

log = logging.getLogger("trireme.device")

KERNELS = ("auto", "torch", "core", "triton")


@runtime_checkable
class Kernels(Protocol):
    """Operations on the rows of a block. All implementations give the same bits, on every run.

    Shapes: U rows of the block, B examples, F features, D weights, K distinct slots of the bags.
    """

    name: str

    def pool(self, weights: Tensor, bags: SlotBags) -> Tensor:
        """(B, F, D): the sum of the rows of each bag, each times its weight, in order."""
        ...

    def sum(self, grad: Tensor, bags: SlotBags) -> Tensor:
        """(K, D): the gradient of each distinct slot, from (B, F, D), that of the bags. At most
        CHUNK gradients are summed in order, more by chunks (slot_bags.py).
        """
        ...

    def weights(self, rows: RowTensors, slots: Tensor) -> Tensor:
        """(K, D): the weights of (K,) int32 slots."""
        ...

    def update(self, rows: RowTensors, slots: Tensor, grads: Tensor, step: RowStep) -> None:
        """Apply the rule to rows, (K,) int32 distinct slots, (K, D) gradients; and note it in their
        statistics. Raises as `check_shows`, before anything changes.
        """
        ...

    def sum_and_update(self, rows: RowTensors, bags: SlotBags, grad: Tensor, step: RowStep) -> None:
        """`update` with `sum` of the gradient of the bags."""
        ...


def choose_kernels(
    layout: BlockLayout, device: torch.device, threads: _core.Pool, wanted: str = "auto"
) -> Kernels:
    """The implementation for a block: the core on the CPU; elsewhere Triton's kernels where Triton
    is installed and compiles for the device, else torch operations. Logs each choice once.

    Args:
        threads: of the core.
        wanted: "torch", "core" or "triton" instead.

    Raises:
        BadRequest: an unknown name, or one that is wanted and cannot run here.
    """
    check_choice("RowBlock", KERNELS, kernels=wanted)
    is_host = device.type == HOST.type
    if wanted == "core" and not is_host:
        raise BadRequest(f"RowBlock: expected the CPU for kernels='core', found {device}")
    missing = _without_triton(device, is_forced=wanted == "triton")
    if wanted == "triton" and missing:
        raise BadRequest(f"RowBlock: expected Triton for kernels='triton', found {missing}")
    chosen: Kernels
    if wanted == "core" or (wanted == "auto" and is_host):
        chosen = CoreKernels(layout, threads)
    elif wanted == "torch" or missing:
        chosen = TorchKernels(layout)
    else:
        from trireme.device.triton_kernels import TritonKernels

        chosen = TritonKernels(layout)
    reason = "as asked" if wanted != "auto" else missing or f"the device is {device}"
    log_choice(device, chosen.name, reason)
    return chosen


@functools.cache
def log_choice(device: torch.device, name: str, reason: str) -> None:
    """Once in a process: a job makes many blocks."""
    log.info("rows on %s are computed by %s: %s", device, name, reason)


def _without_triton(device: torch.device, *, is_forced: bool) -> str:
    """Why Triton does not run on this device; "" if it does."""
    is_here = runs_triton(device)
    if not is_here and not is_forced:
        return f"the device is {device}"
    if importlib.util.find_spec("triton") is None:
        return "no module triton: pip install triton"
    if not is_here:
        from trireme.device.triton_rules import is_interpreted

        if not is_interpreted:
            return f"the device is {device}, where kernels run with TRITON_INTERPRET=1 alone"
    return ""
