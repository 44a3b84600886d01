"""Windows on a device: streams within a fixed memory, to the bits of a pass; a CPU is the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trireme as tr
from tests.integration.durable_servers import DurableServers
from tests.integration.test_device_passes import (
    RULES,
    Net,
    assert_equal,
    contents,
    data,
    saved,
    trainer,
)
from tests.programs import Template
from trireme.device import BlockLayout
from trireme.errors import BadRequest, NotReady, ResourceExhausted
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.train.modes.device_pass import window_block
from trireme.train.modes.device_pass.pass_mode import DevicePass


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with embedded() as opened:
        set_default(opened)
        yield opened


def stream(seed: int, num_batches: int = 30) -> list[dict[str, torch.Tensor]]:
    """Batches of 12 ids, some of which return after a while."""
    drawn = torch.Generator().manual_seed(seed)
    batches = []
    for number in range(num_batches):
        ids = torch.randint(0, 25, (6, 2), generator=drawn) + 10 * (number % 7)
        batches.append({"a": ids[:, 0], "b": ids[:, 1], "label": (ids.sum(1) % 2).float()})
    return batches


def memory_of(one: tr.Trainer, num_rows: int) -> int:
    [table] = one.optimizer.tables
    return num_rows * BlockLayout.of(table.schema).device_bytes


def trained(rule: str, num_rows: int | None, batches: int = 1, **options: Any) -> Any:
    """The contents after two streams, in windows of so many rows; None: without."""
    with embedded() as opened:
        set_default(opened)
        one = trainer(RULES[rule](), **options)
        for number in range(2):
            if num_rows is None:
                one.fit(stream(number), epochs=2)
                continue
            with one.in_window(batches, memory_of(one, num_rows)):
                one.fit(stream(number), epochs=2)
        return contents(opened)


@pytest.mark.parametrize("rule", ["adagrad", "adam", "row_adam", "ftrl"])
@pytest.mark.parametrize(("num_rows", "batches"), [(12, 1), (20, 4), (40, 30), (1000, 8)])
def test_a_window_of_any_size_trains_to_the_bits_of_sync(
    rule: str, num_rows: int, batches: int
) -> None:
    assert_equal(trained(rule, num_rows, batches), trained(rule, None))


def test_rows_with_statistics_leave_a_window_and_return() -> None:
    options = {"policy": tr.policy.ScorePolicy()}
    assert_equal(trained("adagrad", 15, 3, **options), trained("adagrad", None, **options))
