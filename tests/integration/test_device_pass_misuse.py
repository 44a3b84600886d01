"""What a script may do wrong within a pass on a device, and what it may do without losing updates:
errors with a name, and the bits of training without passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.test_device_passes import (
    RULES,
    Net,
    assert_equal,
    contents,
    data,
    trainer,
)
from tests.integration.test_device_windows import memory_of, stream
from trireme.errors import BadRequest, DataError, ResourceExhausted, Unavailable
from trireme.inference.export import export_model
from trireme.interchange.plain_rows import export_parquet, import_parquet, remove_rows
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.train import row_life
from trireme.train.checkpointing.checkpoint_location import Location
from trireme.train.checkpointing.save import save
from trireme.train.modes.device_pass.pass_mode import DevicePass
from trireme.train.online.passes import Pass
from trireme.train.online.train_passes import train_passes
from trireme.worker import passes

Batches = list[dict[str, torch.Tensor]]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with embedded() as opened:
        set_default(opened)
        yield opened


def contents_after(work: Callable[[], None]) -> dict[str, np.ndarray]:
    with embedded() as opened:
        set_default(opened)
        work()
        return contents(opened)


def trained(*seeds: int) -> dict[str, np.ndarray]:
    """The contents after these data without passes."""

    def work() -> None:
        one = trainer(RULES["adagrad"]())
        for seed in seeds:
            one.fit(data(seed))

    return contents_after(work)


def test_a_pass_that_begins_without_data_names_the_keys_of_other_data(cluster: Cluster) -> None:
    one = trainer(RULES["adagrad"]())
    one.begin_pass([])
    with pytest.raises(DataError, match="found none at any worker"):
        one.fit([])
    with pytest.raises(BadRequest, match=r"keys of the data that it began with, found \d+"):
        one.fit(data(0))
    one.end_pass()
    one.fit(data(0))
    assert_equal(contents(cluster), trained(0))


def test_a_count_of_steps_that_is_set_within_a_pass_loses_nothing(cluster: Cluster) -> None:
    one = trainer(RULES["adagrad"]())
    before = one.optimizer.state_dict()
    with one.on_device(data(0)):
        one.fit(data(0))
        one.optimizer.load_state_dict(before)
    assert_equal(contents(cluster), trained(0))


def test_another_optimizer_is_refused_within_a_pass_which_ends_well(cluster: Cluster) -> None:
    one = trainer(RULES["adagrad"]())
    one.begin_pass(data(0))
    one.fit(data(0))
    with pytest.raises(BadRequest, match="DistributedOptimizer: expected to be called between"):
        trainer(RULES["adagrad"]())
    one.fit(data(0))
    one.end_pass()
    trainer(RULES["adagrad"](), fresh=False).fit(data(0))
    assert_equal(contents(cluster), trained(0, 0, 0))


def test_a_script_that_ends_within_a_pass_is_told_what_is_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with embedded() as opened:
        set_default(opened)
        one = trainer(RULES["adagrad"]())
        one.begin_pass(data(0))
        one.fit(data(0))
    with embedded() as opened:
        set_default(opened)
        trainer(RULES["adagrad"]()).begin_pass(data(0))  # nothing is forgotten
    assert [r.levelno for r in caplog.records if "is forgotten" in r.message] == [logging.WARNING]


def test_what_would_read_or_change_rows_of_the_beginning_is_refused_within_a_pass(
    cluster: Cluster, tmp_path: Path
) -> None:
    one = trainer(RULES["adagrad"]())
    one.fit(data(0))
    export_parquet(one, tmp_path / "rows", tables=["keys"])
    one.begin_pass(data(0))
    one.fit(data(0))
    calls: tuple[Callable[[], Any], ...] = (
        lambda: export_model(one, tmp_path / "model", batch=data(0)[0]),
        lambda: export_parquet(one, tmp_path / "again"),
        lambda: import_parquet(one, "keys", tmp_path / "rows" / "keys"),
        lambda: remove_rows(one, "keys", [1]),
        lambda: save(one.optimizer, Location(tmp_path / "saved")),
        lambda: row_life.shrink(one.optimizer, day_over=True),
        lambda: list(
            train_passes(one, iter([Pass(day="20260101", number=1, open=lambda: data(1))]))
        ),
    )
    for call in calls:
        with pytest.raises(BadRequest, match="to be called between passes on a device"):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
    one.end_pass()
    assert_equal(contents(cluster), trained(0, 0))


def accumulating(begin: Callable[[tr.Trainer, Batches], Any]) -> Callable[[], None]:
    """A loop whose steps are of three batches."""

    def work() -> None:
        one, batches = trainer(RULES["adagrad"]()), stream(0)
        with begin(one, batches):
            for number, batch in enumerate(batches):
                one.loss(one.model(tr.data.Batch(batch)), batch["label"]).backward()
                if number % 3 == 2:
                    one.optimizer.step()
                    one.model.zero_grad()

    return work


def test_a_step_of_several_batches_keeps_their_rows_in_a_window() -> None:
    """Rows of the first must not leave for those of the last."""
    expected = contents_after(accumulating(lambda *_: nullcontext()))
    in_pass = accumulating(lambda one, batches: one.on_device(batches))
    assert_equal(contents_after(in_pass), expected)
    in_window = accumulating(lambda one, _: one.in_window(2, memory_of(one, 32)))
    assert_equal(contents_after(in_window), expected)
    too_small = accumulating(lambda one, _: one.in_window(2, memory_of(one, 14)))
    with pytest.raises(ResourceExhausted, match=r"expected \d batches, of one step, of at most 14"):
        contents_after(too_small)


def test_a_window_with_more_memory_than_there_is_says_how_much(cluster: Cluster) -> None:
    one = trainer(RULES["adagrad"]())
    for memory in ("100TiB", 1 << 70):
        one.begin_window(2, memory)
        with pytest.raises(ResourceExhausted, match=r"memory of cpu for \d+ rows of 41 bytes, \d+"):
            one.fit(data(0))
        one.abandon_pass()
    one.fit(data(0))
    assert_equal(contents(cluster), trained(0))


class WithoutElements(Net):
    """A scalar, and a parameter with no elements, which no server has."""

    def __init__(self, table: tr.Table) -> None:
        super().__init__(table)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch) * self.scale + self.nothing.sum()


@pytest.mark.parametrize("mode", ["sync", "geo", "hybrid"])
def test_parameters_without_elements_are_trained_with(mode: str) -> None:
    def training(begin: Callable[[tr.Trainer], Any], mode: str) -> Callable[[], None]:
        def work() -> None:
            torch.manual_seed(3)
            model = WithoutElements(tr.Table("keys", dim=4, optimizer=tr.optim.SGD(lr=0.1)))
            one = tr.Trainer(
                model,
                torch.optim.Adam(model.parameters(), 0.01),
                strategy=tr.Strategy("geo", k=2) if mode == "geo" else tr.Strategy(mode),
                loss=nn.functional.binary_cross_entropy_with_logits,
                progress=False,
            )
            with begin(one):
                one.fit(data(0), epochs=2)
            assert torch.isfinite(model.scale)
            assert model.scale.item() != 1.5

        return work

    expected = contents_after(training(lambda _: nullcontext(), mode))
    assert len(expected) > 50
    if mode == "sync":
        for begin in (lambda one: one.on_device(data(0)), lambda one: one.in_window(2, "1MiB")):
            assert_equal(contents_after(training(begin, mode)), expected)


@pytest.mark.parametrize("is_decided", [False, True])
@pytest.mark.parametrize("again", ["end", "abandon"])
def test_after_an_end_whose_answer_was_lost_no_step_is_made_that_may_be_forgotten(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_decided: bool, again: str
) -> None:
    """The servers may have the rows of its moment already, and end the pass no second time."""
    one = trainer(tr.optim.Adagrad(lr=0.1))
    one.begin_pass(data(0))
    one.fit(data(0))
    decide = passes.end_device_pass

    def lost(*args: Any, **options: Any) -> bool:
        if is_decided:
            decide(*args, **options)
        raise Unavailable("lost")

    with monkeypatch.context() as patch:
        patch.setattr(passes, "end_device_pass", lost)
        with pytest.raises(Unavailable, match="lost"):
            one.end_pass()
    with pytest.raises(BadRequest, match="expected no training after end_pass"):
        one.fit(data(0))
    if again == "abandon" and not is_decided:
        one.abandon_pass()
        assert one.optimizer.num_steps == 0
        one.fit(data(0))
    else:
        if again == "abandon":
            with pytest.raises(BadRequest, match="the servers have its rows"):
                one.abandon_pass()
        one.end_pass()
    assert one.optimizer.num_steps == len(data(0))
    assert_equal(contents(cluster), trained(0))


def test_a_pass_uses_the_memory_of_the_one_before(cluster: Cluster) -> None:
    one, places = trainer(tr.optim.Adagrad(lr=0.1)), []
    for _ in range(3):
        with one.on_device(data(0)):
            one.fit(data(0))
            mode = one.optimizer.mode
            assert isinstance(mode, DevicePass)
            assert mode.rows is not None
            [block] = mode.rows.blocks.values()
            assert block.wide_rows is not None
            places.append(block.wide_rows.ctypes.data)
    assert len(set(places)) == 1
