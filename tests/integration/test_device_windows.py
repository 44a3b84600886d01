"""Windows on a device: streams within a fixed memory, to the bits of a pass; CPUs stand in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.durable_servers import DurableServers
from tests.integration.test_device_passes import (
    RULES,
    assert_equal,
    contents,
    data,
    saved,
    trainer,
)
from tests.long import sampled
from tests.programs import Template
from trireme import _core
from trireme.device import BlockLayout, RowBlock
from trireme.device.block_layout import HOST
from trireme.errors import BadRequest, NotReady, ResourceExhausted
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.train.modes.device_pass import window_rows
from trireme.train.modes.device_pass.key_slots import ABSENT
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


@sampled(keep=6)
@pytest.mark.parametrize("rule", ["adagrad", "adam", "row_adam", "ftrl"])
@pytest.mark.parametrize(("num_rows", "batches"), [(12, 1), (20, 4), (40, 30), (1000, 8)])
def test_a_window_of_any_size_trains_to_the_bits_of_sync(
    rule: str, num_rows: int, batches: int
) -> None:
    assert_equal(trained(rule, num_rows, batches), trained(rule, None))


def test_rows_with_statistics_leave_a_window_and_return() -> None:
    options = {"policy": tr.policy.ScorePolicy()}
    assert_equal(trained("adagrad", 15, 3, **options), trained("adagrad", None, **options))


def reads(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Gets the keys of each filling of a block."""
    filled: list[list[int]] = []
    bring = window_rows.WindowBlock.__init__

    def counting(self: Any, *args: Any) -> None:
        *others, read, give_back = args

        def note(keys: Any) -> Any:
            filled.append(sorted(map(int, keys)))
            return read(keys)

        bring(self, *others, note, give_back)

    monkeypatch.setattr(window_rows.WindowBlock, "__init__", counting)
    return filled


def of_ids(*batches: tuple[int, int]) -> list[dict[str, torch.Tensor]]:
    return [
        {"a": torch.tensor([a]), "b": torch.tensor([b]), "label": torch.ones(1)} for a, b in batches
    ]


LATER = ((1, 2), (2, 3), (3, 5), (5, 6), (3, 6), (5, 7), (8, 9))


@pytest.mark.parametrize(
    ("num_rows", "batches", "ids", "expected"),
    [
        # As many batches as fit are filled together; of rows that none uses, the longest unused
        # leave: 1 and 2 for 6 and 7, then 3 and 6.
        (4, 4, LATER, [[1, 2, 3, 5], [6, 7], [8, 9]]),
        (4, 1, LATER, [[1, 2, 3], [5, 6], [7, 8, 9]]),
        # For 4 and 5 the row leaves that is used last, 3, though it was used after 1.
        (3, 4, ((1, 2), (2, 3), (4, 5), (1, 2), (3, 1)), [[1, 2, 3], [4, 5], [1, 3]]),
    ],
)
def test_rows_leave_that_are_not_used_or_used_last(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    num_rows: int,
    batches: int,
    ids: tuple[tuple[int, int], ...],
    expected: list[list[int]],
) -> None:
    filled = reads(monkeypatch)
    one = trainer(RULES["adagrad"]())
    with one.in_window(batches, memory_of(one, num_rows)):
        one.fit(of_ids(*ids))
    assert filled == expected


def test_rows_leave_a_large_window_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, evict = [], window_rows.WindowBlock._evict

    def counting(self: Any, num: int, *arguments: Any) -> None:
        wanted.append(num)
        evict(self, num, *arguments)

    monkeypatch.setattr(window_rows.WindowBlock, "_evict", counting)
    num_rows, size, pool = 1600, 10, _core.Pool(1)
    schema = tr.Table("t", dim=2, optimizer=tr.optim.SGD(lr=0.1)).schema
    layout = BlockLayout.of(schema)
    rows = RowBlock(layout, layout.zeros(num_rows, HOST), HOST, threads=pool)

    def read(keys: np.ndarray) -> np.ndarray:
        return np.zeros((len(keys), layout.wide.row_bytes), np.uint8)

    block = window_rows.WindowBlock(schema, rows, 1, pool, read, lambda *_: None)
    for number in range(4 * num_rows // size):
        keys = np.arange(number * size, (number + 1) * size, dtype=np.uint64)
        block.bring(keys, (), ())
        assert (block.find(keys) != ABSENT).all()
    assert len(wanted) == 3 * window_rows.SPARE_SHARE


def test_a_window_keeps_within_its_memory_and_says_how_much_it_lacks(cluster: Cluster) -> None:
    one = trainer(RULES["adam"]())
    one.fit(data(0))
    before = contents(cluster)
    memory = memory_of(one, 30)

    def train(batches: list[dict[str, torch.Tensor]]) -> None:
        with one.in_window(8, memory):
            one.fit(stream(0))
            mode = one.optimizer.mode
            assert isinstance(mode, DevicePass)
            assert mode.rows is not None
            [block] = mode.rows.blocks.values()
            parts = [*block._block.tensors, block._block.is_changed]
            assert sum(part.nbytes for part in parts) <= memory
            assert_equal(contents(cluster), before)
            one.fit(batches)

    with pytest.raises(ResourceExhausted, match=r"at most 30 rows .* found [345]\d rows"):
        train(data(1))  # more than 30 ids in a batch
    assert_equal(contents(cluster), before)
    train(stream(1))
    assert contents(cluster).keys() > before.keys()


def test_evaluate_within_a_window_sees_rows_that_have_left_it(cluster: Cluster) -> None:
    one = trainer(RULES["adagrad"]())
    with one.in_window(2, memory_of(one, 13)):
        one.fit(iter(stream(0)))
        within = one.evaluate(stream(2))["loss"]
    assert one.evaluate(stream(2))["loss"] == within


def test_a_loop_of_ones_own_trains_in_a_window(cluster: Cluster) -> None:
    one = trainer(RULES["adagrad"]())
    with one.in_window(2, memory_of(one, 13)):
        for batch in stream(0):
            loss = one.loss(one.model(tr.data.Batch(batch)), batch["label"])
            loss.backward()
            one.optimizer.step()
            one.model.zero_grad()
    actual = contents(cluster)
    with embedded() as opened:
        set_default(opened)
        other = trainer(RULES["adagrad"]())
        other.fit(stream(0))
        assert_equal(actual, contents(opened))


def trained_by_a_loop(begin: Callable[[tr.Trainer], Any]) -> dict[str, np.ndarray]:
    with embedded() as opened:
        set_default(opened)
        one = trainer_of_two_tables()
        with begin(one):
            for batch in stream(0):
                loss = one.loss(one.model(tr.data.Batch(batch)), batch["label"])
                loss.backward()
                one.optimizer.step()
                one.model.zero_grad()
        return contents(opened)


def test_a_loop_of_ones_own_looks_up_one_table_after_the_other_in_a_window() -> None:
    expected = trained_by_a_loop(lambda _: nullcontext())
    # Of 10 rows of each of three row classes: a batch has at most 6.
    actual = trained_by_a_loop(lambda one: one.in_window(2, memory_of_two_tables(one, 10)))
    assert_equal(actual, expected)


def test_wrong_windows_are_refused(cluster: Cluster) -> None:
    one = trainer(RULES["adagrad"]())
    cases: tuple[tuple[Any, int | str, str], ...] = (
        *(
            (wrong, "1MiB", rf"batches as an integer in \[1, 1024\], found {wrong!r}")
            for wrong in (0, -1, 1025, 2.5, True, "8", None)
        ),
        (2, 0, "expected a number of bytes such as 2GiB, found 0"),
        (2, "much", "expected a number of bytes such as 2GiB, found 'much'"),
    )
    for batches, memory, message in cases:
        with pytest.raises(BadRequest, match=message):
            one.begin_window(batches, memory)
    one.begin_window(2, 10)
    with pytest.raises(ResourceExhausted, match=r"rows of 41 bytes of table 'keys', found 10"):
        one.fit(stream(0))
    one.abandon_pass()
    one.fit(stream(0))


def test_a_window_whose_server_or_worker_was_killed_is_repeated_whole(
    programs: Template, tmp_path: Path
) -> None:
    expected = trained("adam", None)
    with DurableServers(programs, 2, tmp_path) as servers:
        old = servers.join(0, 1)
        set_default(old)
        one = trainer(RULES["adam"]())
        memory = memory_of(one, 15)

        def train(in_the_middle: bool) -> None:
            with one.in_window(3, memory):
                one.fit(stream(0))
                if in_the_middle:
                    servers.kill(1)
                    servers.start(1)
                one.fit(stream(0))

        with pytest.raises(NotReady, match="or this server was restarted; import again"):
            train(in_the_middle=True)
        train(in_the_middle=False)
        one.begin_window(3, memory)
        one.fit(stream(1))
        old.abandon()
        new = servers.join(0, 1)
        set_default(new)
        one = trainer(RULES["adam"]())
        for number in (0, 0, 1):  # the script again: the first had failed, the second had ended
            with one.in_window(3, memory):
                one.fit(stream(number))
                one.fit(stream(number))
        actual = saved(one, tmp_path / "saved")
        new.close()
    assert_equal(actual, expected)


class Two(nn.Module):
    """Two tables, of which one has rows of two dims."""

    def __init__(self) -> None:
        super().__init__()
        one = tr.Table("one", dims={"a": 3, "b": 5}, salt=True, optimizer=tr.optim.Adam(lr=0.01))
        two = tr.Table("two", dim=2, optimizer=tr.optim.Adagrad(lr=0.1))
        self.one = tr.nn.EmbeddingBag(one, features=["a", "b"])
        self.two = tr.nn.EmbeddingBag(two, features=["a"])
        self.top = nn.Linear(10, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        rows = torch.cat([self.one(batch).flatten(1), self.two(batch).flatten(1)], 1)
        return self.top(rows).squeeze(1)


def trainer_of_two_tables() -> tr.Trainer:
    torch.manual_seed(3)
    model = Two()
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), 0.01),
        strategy=tr.Strategy("sync"),
        loss=nn.functional.binary_cross_entropy_with_logits,
        progress=False,
    )


def memory_of_two_tables(one: tr.Trainer, num_rows: int) -> int:
    """Of so many rows of each row class."""
    parts = [
        (table, part.class_id.row_class) for table in one.optimizer.tables for part in table.parts
    ]
    return num_rows * sum(BlockLayout.of(t.schema, number).device_bytes for t, number in parts)


def trained_on_two_tables(begin: Callable[[tr.Trainer], Any]) -> dict[str, np.ndarray]:
    with embedded() as opened:
        set_default(opened)
        one = trainer_of_two_tables()
        with begin(one):
            one.fit(stream(0), epochs=2)
        return contents(opened)


def test_tables_and_row_classes_share_passes_and_windows() -> None:
    expected = trained_on_two_tables(lambda _: nullcontext())
    assert_equal(trained_on_two_tables(lambda one: one.on_device(stream(0))), expected)
    assert_equal(trained_on_two_tables(lambda one: one.in_window(4, 3000)), expected)
