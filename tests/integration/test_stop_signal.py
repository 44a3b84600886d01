"""What SIGTERM does to one process that trains embedded."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import trireme as tr
from trireme.cluster import embedded
from trireme.errors import Stopped

NUM_BATCHES, TOLD_AT = 500, 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = tr.nn.EmbeddingBag(
            tr.Table("rows", dim=2, optimizer=tr.optim.Adagrad(lr=0.1)), features=["a"]
        )
        self.head = nn.Linear(2, 1)
        self.heeded: set[Any] = set()
        self.num_steps = 0

    def forward(self, batch: tr.data.Batch) -> torch.Tensor:
        self.heeded.add(signal.getsignal(signal.SIGTERM))
        self.num_steps += 1
        if self.num_steps == TOLD_AT and self.training:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.head(self.rows(batch).flatten(1)).squeeze(1)


def batches(num: int) -> list[dict[str, torch.Tensor]]:
    return [{"a": torch.tensor([i % 7, 1]), "label": torch.tensor([0.0, 1.0])} for i in range(num)]


@contextmanager
def trainer() -> Iterator[tr.Trainer]:
    assert threading.current_thread() is threading.main_thread()  # or SIGTERM would end the tests
    with embedded(threads=1) as cluster:
        model = Model()
        yield tr.Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss=nn.functional.binary_cross_entropy_with_logits,
            progress=False,
            cluster=cluster,
        )


def test_a_fit_without_checkpoints_says_that_nothing_was_saved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with trainer() as fitting:
        with pytest.raises(Stopped) as stopped:
            fitting.fit(batches(NUM_BATCHES), epochs=2)
        assert fitting.model.num_steps == TOLD_AT
        assert fitting.optimizer.num_steps == TOLD_AT
    assert stopped.value.code == 0
    assert "worker 0 has got SIGTERM: training has stopped after a step; nothing was" in caplog.text


def test_a_script_that_heeds_sigterm_itself_is_left_alone() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with trainer() as fitting:
            fitting.fit(batches(2 * TOLD_AT))
            assert fitting.model.num_steps == 2 * TOLD_AT
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert heard == [signal.SIGTERM]


def test_outside_of_a_fit_sigterm_ends_the_process() -> None:
    with trainer() as fitting:
        fitting.fit(batches(TOLD_AT - 1))
        assert signal.SIG_DFL not in fitting.model.heeded
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        fitting.model.heeded.clear()
        fitting.evaluate(batches(TOLD_AT))
        assert fitting.model.heeded == {signal.SIG_DFL}
