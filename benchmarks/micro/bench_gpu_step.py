"""A step on the rows of a block on a GPU: 1.05 M ids, 350 k distinct, dim 128: ids per second.

gpu_step_sgd, gpu_step_adam   forward, backward, update    fbgemm: its TBE; torch: our reference

A step looks up a row per id, takes a gradient for each and updates the rows. `hbm_fraction`: how
fast it moves the bytes that it must move, over how fast a copy in the GPU's memory reads and
writes. Smoke mode runs on the CPU, with torch operations.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

import trireme as tr
from benchmarks.harness import Absent, Claim, Contest, Run, Settings
from trireme import accelerator
from trireme.device import BlockLayout, RowBlock, SlotBags
from trireme.errors import BadRequest
from trireme.optim import Rule, values_of_group
from trireme.table import Table

RULES: dict[str, Rule] = {"sgd": tr.optim.SGD(lr=0.01), "adam": tr.optim.Adam(lr=0.001)}
FBGEMM_OPTIMIZERS = {"sgd": "EXACT_SGD", "adam": "ADAM"}


def contests(settings: Settings) -> list[Contest]:
    made = []
    for name, rule in RULES.items():
        work = Workload(
            name=name,
            rule=rule,
            is_smoke=settings.is_smoke,
            num_rows=settings.pick(smoke=200, real=1_000_000),
            num_ids=settings.pick(smoke=90, real=1_050_000),
            num_distinct=settings.pick(smoke=30, real=350_000),
            dim=settings.pick(smoke=8, real=128),
            num_steps=settings.pick(smoke=2, real=50),
        )
        metric = f"gpu_step_{name}"
        contestants: dict[str, Callable[[int], Run]] = {
            metric: work.ours("auto"),
            "torch": work.ours("torch"),
            "fbgemm": work.fbgemm,
        }
        claim = Claim(metric, metric, ("fbgemm", "torch"), "ids/s")
        made.append(Contest(contestants, [claim], settings.rounds))
    return made


@dataclass
class Workload:
    """Steps of one rule, on batches of Zipf-like slots."""

    name: str
    rule: Rule
    is_smoke: bool
    num_rows: int
    num_ids: int
    num_distinct: int
    dim: int
    num_steps: int

    @cached_property
    def device(self) -> torch.device:
        if self.is_smoke:
            return accelerator.HOST
        try:
            return accelerator.device_of_label("gpu", {})
        except BadRequest as reason:
            raise Absent(str(reason)) from None

    @cached_property
    def batches(self) -> list[Tensor]:
        """Four times (N,) int32 slots of exactly num_distinct rows."""
        rng = np.random.default_rng(0)
        batches = []
        for _ in range(4):
            rows = rng.permutation(self.num_rows)[: self.num_distinct]
            again = self.num_distinct ** rng.random(self.num_ids - self.num_distinct)
            slots = rng.permutation(np.concatenate([rows, rows[again.astype(np.int64) - 1]]))
            batches.append(torch.from_numpy(slots.astype(np.int32)).to(self.device))
        return batches

    @cached_property
    def grad(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(self.num_ids, 1, self.dim, generator=generator).to(self.device)

    def ours(self, kernels: str) -> Callable[[int], Run]:
        return lambda _: self._ours(kernels)

    def _ours(self, kernels: str) -> Run:
        schema = Table("t", dim=self.dim, optimizer=self.rule).schema
        layout = BlockLayout.of(schema)
        weights = np.random.default_rng(1).standard_normal((self.num_rows, self.dim), np.float32)
        rows = layout.new_rows(weights)
        block = RowBlock(layout, rows, self.device, kernels=kernels, is_fused=True)

        def step(number: int, slots: Tensor) -> None:
            block.pool(SlotBags(slots)).backward(self.grad)
            block.step(values_of_group(self.rule.group(), number))

        elapsed_s = self._timed(step)
        trained = block.tensors.weights.cpu().contiguous()
        digest = hashlib.sha256(trained.numpy()).hexdigest()[:16]
        return self._run(elapsed_s, digest, {"kernels": block.kernels.name})

    def fbgemm(self, _: int) -> Run:
        device = self.device
        if self.is_smoke:
            raise Absent("its kernels need a GPU, which smoke mode does without")
        try:
            ops = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
            common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
            configs = importlib.import_module("fbgemm_gpu.split_embedding_configs")
        except (ImportError, OSError) as reason:
            raise Absent(f"no fbgemm_gpu ({reason}): pip install fbgemm-gpu") from None
        table = (self.num_rows, self.dim, common.EmbeddingLocation.DEVICE, ops.ComputeDevice.CUDA)
        optimizer = getattr(configs.EmbOptimType, FBGEMM_OPTIMIZERS[self.name])
        tbe = ops.SplitTableBatchedEmbeddingBagsCodegen(
            [table], optimizer=optimizer, learning_rate=self.rule.lr, device=device
        )
        offsets = torch.arange(self.num_ids + 1, device=device)
        grad = self.grad.view(self.num_ids, self.dim)

        def step(_: int, slots: Tensor) -> None:
            tbe(slots.long(), offsets).backward(grad)

        return self._run(self._timed(step), None, {})

    def _timed(self, step: Callable[[int, Tensor], None]) -> float:
        """Seconds per step; two more come before."""
        for number in range(1, 3):
            step(number, self.batches[number % 4])
        accelerator.await_device(self.device)
        start = time.perf_counter()
        for number in range(3, 3 + self.num_steps):
            step(number, self.batches[number % 4])
        accelerator.await_device(self.device)
        return (time.perf_counter() - start) / self.num_steps

    def _run(self, elapsed_s: float, digest: str | None, detail: dict[str, Any]) -> Run:
        rate = self._least_bytes / elapsed_s
        detail |= {
            "device": self._device_name,
            "ms": round(1000 * elapsed_s, 4),
            "least_bytes": self._least_bytes,
            "hbm_fraction": round(rate / (2 * self._copied_per_s), 4),
        }
        return Run(self.num_ids / elapsed_s, digest, detail)

    @property
    def _device_name(self) -> str:
        return "cpu" if self.is_smoke else torch.cuda.get_device_name(self.device)

    @property
    def _least_bytes(self) -> int:
        """Ids, outputs and their gradients once; the distinct rows read for the outputs, and read
        and written with their state by the update.
        """
        num_states = 2 if self.name == "adam" else 0
        row_floats = self.dim * (1 + 2 + 2 * num_states)
        return 4 * (self.num_ids * (1 + 2 * self.dim) + self.num_distinct * row_floats)

    @cached_property
    def _copied_per_s(self) -> float:
        """Bytes that a copy within the memory of the device copies per second."""
        source = torch.zeros(1 << (16 if self.is_smoke else 28), device=self.device)
        target = torch.empty_like(source)
        target.copy_(source)
        accelerator.await_device(self.device)
        start = time.perf_counter()
        for _ in range(10):
            target.copy_(source)
        accelerator.await_device(self.device)
        return 10 * 4 * len(source) / (time.perf_counter() - start)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["gpu_step", *sys.argv[1:]]))
