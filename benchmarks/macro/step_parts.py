"""What a step computes, part by part and on one thread, without a service around it.

parts_b512   reading, planning, the rows' lookup, the model with its embedding, AUC, and the updates
             of rows and of dense weights, each called directly: the least that a job has to do
mlp_b512     the MLP alone, on one batch in memory: what the dense bound has

The second divided by the first is how near a step without any cost of its own comes to the bound.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

import trireme as tr
from benchmarks.criteo import tsv_files
from benchmarks.harness import Claim, Contest, Run, Settings, say
from benchmarks.macro.ctr import DIM
from benchmarks.macro.job import CTR, FEATURES, NUM_DENSE, RULES, cross_entropy
from trireme import _core
from trireme.data.batch import Batch
from trireme.nn import Planner
from trireme.optim import rule_values, values_of_group
from trireme.rows.core_table import make_core_table
from trireme.train.loop.scoring import column_of

_NUM_WARM, _NUM_TIMED = 1, 4  # files


def contests(settings: Settings, batches: list[int]) -> list[Contest]:
    return [_contest(settings, batch) for batch in batches]


def _contest(settings: Settings, batch: int) -> Contest:
    parts, mlp = f"parts_b{batch}", f"mlp_b{batch}"
    return Contest(
        {parts: lambda _: _parts(settings, batch), mlp: lambda _: _mlp(settings, batch)},
        [Claim(parts, parts, (mlp,), unit="ms/step")],
        settings.rounds,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Clock:
    """Milliseconds of this thread's CPU, by part."""

    def __init__(self) -> None:
        self.ms: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        started = time.thread_time()
        yield
        self.ms[part].append(1000 * (time.thread_time() - started))

    def medians(self) -> dict[str, float]:
        return {part: statistics.median(ms) for part, ms in self.ms.items()}


class _Job:
    """CTR-DNN and its rows, on one thread."""

    def __init__(self) -> None:
        table = tr.Table("ctr", dim=DIM, optimizer=RULES["adam"])
        self.pool, self.rows, self.model = _core.Pool(1), make_core_table(table.schema), CTR(table)
        self.planner = Planner(self.model, pool=self.pool)
        self.dense = torch.optim.Adam(self.model.parameters(), 1e-3, fused=True)
        self.auc, self.num_steps = tr.metrics.AUC(), 0

    def step(self, batch: Batch, clock: _Clock) -> None:
        self.num_steps += 1
        with clock.measure("plan"):
            plan = self.planner.plan(batch)
        [(class_id, keys_K)] = plan.keys().items()
        labels_B = column_of(batch, "label", "step")
        with clock.measure("look rows up"):
            weights_KD = np.empty((len(keys_K), DIM), np.float32)
            self.rows.lookup(keys_K, weights_KD, self.pool)
        with clock.measure("forward"):
            leaves = plan.attach(batch, {class_id: torch.from_numpy(weights_KD)}, train=True)
            logits_B2 = self.model(batch)
            loss = cross_entropy(logits_B2, labels_B)
        with clock.measure("backward"):
            loss.backward()
        with clock.measure("AUC"):
            self.auc.update(logits_B2.detach(), labels_B)
        with clock.measure("update dense"):
            self.dense.step()
            self.dense.zero_grad()
        gradient_KD, ids = leaves[class_id].grad, [(0, self.num_steps)]
        assert gradient_KD is not None
        with clock.measure("update rows"):
            values = rule_values(values_of_group(RULES["adam"].group(), self.num_steps))
            self.rows.update(keys_K, gradient_KD.numpy(), ids, values, self.pool)


def _parts(settings: Settings, batch: int) -> Run:
    files, job, clock = tsv_files(settings).train, _Job(), _Clock()
    with _one_thread():
        for one in _read(files[:_NUM_WARM], batch):
            job.step(one, _Clock())
        started = time.process_time()  # reading has threads of its own
        batches = _read(files[_NUM_WARM : _NUM_WARM + _NUM_TIMED], batch)
        read_ms = 1000 * (time.process_time() - started) / len(batches)
        for one in batches:
            job.step(one, clock)
    ms = {"read": read_ms, **clock.medians()}
    for part, value in ms.items():
        say(f"step: {part:14}{value:8.3f} ms")
    return Run(sum(ms.values()), detail={part: round(value, 3) for part, value in ms.items()})


def _read(files: Sequence[str], batch: int) -> list[Batch]:
    data = tr.data.QueueDataset(list(files), schema=tr.data.criteo(), batch_size=batch)
    return list(data.stream(0, 1))


def _mlp(settings: Settings, batch: int) -> Run:
    mlp, clock = CTR(tr.Table("ctr", dim=DIM, optimizer=RULES["adam"])).mlp, _Clock()
    inputs_BN = torch.randn(batch, len(FEATURES) * DIM + NUM_DENSE)
    labels_B, num_steps = torch.ones(batch), settings.pick(smoke=4, real=400)
    adam = torch.optim.Adam(mlp.parameters(), 1e-3, fused=True)
    with _one_thread():
        for number in range(num_steps):
            with (clock if number >= num_steps // 4 else _Clock()).measure("step"):
                cross_entropy(mlp(inputs_BN), labels_B).backward()
                adam.step()
                adam.zero_grad()
    return Run(clock.medians()["step"])
