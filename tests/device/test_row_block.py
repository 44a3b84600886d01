"""A block: rows in and out, lookups, and gradients per slot."""

from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np
import pytest
import torch

import trireme as tr
from tests.device.blocks import PLACES, RULES, Place, Twin
from trireme.device import BlockLayout, RowBlock, SlotBags, occurrences, slot_bags
from trireme.device.block_layout import NEVER
from trireme.device.block_statistics import UpdateFacts
from trireme.device.kernels import log_choice
from trireme.device.torch_kernels import pool
from trireme.errors import BadRequest
from trireme.nn.lookup import Lookup
from trireme.nn.op import gather_rows
from trireme.optim import values_of_group
from trireme.policy import ScorePolicy
from trireme.table import Table


def random_bytes(shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, shape, np.uint8)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# ---- rows in and out ----


@pytest.mark.parametrize("policy", [None, ScorePolicy()])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "shared fleet adam"])
def test_raw_rows_come_back_bit_for_bit(name: str, policy: ScorePolicy | None) -> None:
    schema = Table("t", dim=5, optimizer=RULES[name], policy=policy).schema
    layout = BlockLayout.of(schema)
    rows = random_bytes((23, layout.wide.row_bytes))
    np.testing.assert_array_equal(RowBlock(layout, rows).raw_rows(), rows)
    assert RowBlock(layout, rows[:0]).raw_rows().shape == (0, layout.wide.row_bytes)


def test_a_block_has_the_rows_of_one_class() -> None:
    table = Table("t", dims={"a": 5, "b": 3}, salt=True, optimizer=RULES["momentum"])
    layout = BlockLayout.of(table.schema, table.of_feature("b").class_id.row_class)
    assert (layout.dim, layout.wide.dim, layout.state_floats) == (3, 5, 4)
    rows = random_bytes((7, layout.wide.row_bytes))
    with pytest.raises(BadRequest, match="expected rows of dim 3, found a wider"):
        RowBlock(layout, rows)
    layout.wide.weights(rows)[:, 3:] = 0
    layout.wide.state(rows)[:, 3:5] = 0
    np.testing.assert_array_equal(RowBlock(layout, rows).raw_rows(), rows)


def test_new_rows_are_those_that_the_core_makes() -> None:
    rule = tr.optim.Adagrad(lr=0.0, initial_accumulator_value=0.5)
    twin = Twin(rule)
    layout, rows = BlockLayout.of(twin.schema), twin.raw_rows()
    weights = np.array(layout.wide.weights(rows))
    layout.wide.statistics(rows)["version"] = NEVER  # until they are updated
    np.testing.assert_array_equal(layout.new_rows(weights), rows)


@pytest.mark.parametrize("place", PLACES)
def test_lookups_of_a_table_that_gives_zeros_hide_new_rows_until_their_update(place: Place) -> None:
    rule = tr.optim.SGD(lr=0.5)
    schema = Table("t", dim=5, optimizer=rule, absent="zeros").schema
    layout = BlockLayout.of(schema)
    weights = np.arange(1, 21, dtype=np.float32).reshape(4, 5)
    block = RowBlock(layout, layout.new_rows(weights), place.device, kernels=place.kernels)
    slots = torch.tensor([2, 0, 2], dtype=torch.int32, device=place.device)
    assert not block.weights(slots).any()
    grads = torch.ones(1, 5, device=place.device)
    block.update(slots[:1], grads, values_of_group(rule.group(), 1), UpdateFacts(version=1))
    expected = torch.from_numpy(weights[2] - 0.5)
    looked_up = block.weights(slots).cpu()
    assert [row.tolist() for row in looked_up] == [expected.tolist(), [0.0] * 5, expected.tolist()]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "bfloat16"}, "expected dtype float32, found bfloat16"),
        ({"policy": ScorePolicy(embedx_threshold=1.0)}, "embedx_threshold"),
        ({"policy": ScorePolicy(pulls_statistics=True)}, "pulls_statistics"),
    ],
)
def test_rows_that_a_block_cannot_update_are_refused(options: dict, reason: str) -> None:
    schema = Table("t", dim=5, optimizer=RULES["sgd"], **options).schema
    with pytest.raises(BadRequest, match=reason):
        BlockLayout.of(schema)


@pytest.mark.parametrize("policy", [None, ScorePolicy()])
def test_rows_are_replaced_by_slot(policy: ScorePolicy | None) -> None:
    layout = BlockLayout.of(Table("t", dim=5, optimizer=RULES["adam"], policy=policy).schema)
    rows, others = np.split(random_bytes((12, layout.wide.row_bytes)), [9])
    block = RowBlock(layout, rows)
    block.is_changed[1] = True
    slots = int32(7, 0, 3)
    block.fill(slots, others)
    rows[slots.numpy()] = others
    np.testing.assert_array_equal(block.raw_rows(), rows)
    np.testing.assert_array_equal(block.raw_rows(int32(3, 8)), rows[[3, 8]])
    assert block.is_changed.tolist() == [i == 1 for i in range(9)]
    leaf, weights = block.rows.detach(), block.tensors.weights
    assert torch.equal(leaf.view(torch.int32), weights.view(torch.int32))
    with pytest.raises(BadRequest, match="a row for each of 3 slots, found 2"):
        block.fill(slots, others[:2])


def test_rows_that_two_blocks_need_move_with_what_computes_on_them() -> None:
    layout = BlockLayout.of(Table("t", dim=3, optimizer=RULES["adam"]).schema)
    rows = random_bytes((4, layout.wide.row_bytes))
    block = RowBlock(layout, rows, kernels="torch")
    moved = block.moved(int32(3, 1), int32(0, 2), 3)
    np.testing.assert_array_equal(moved.raw_rows(int32(0, 2)), rows[[3, 1]])
    assert not moved.raw_rows(int32(1)).any()
    assert not moved.is_changed.any()
    assert moved.kernels.name == "torch operations"
    assert moved.threads is block.threads


def test_rows_of_another_size_are_refused() -> None:
    layout = BlockLayout.of(Table("t", dim=5, optimizer=RULES["sgd"]).schema)
    with pytest.raises(BadRequest, match=r"shape \(U, 28\), found uint8 of shape \(2, 27\)"):
        RowBlock(layout, np.zeros((2, 27), np.uint8))


# ---- bags ----


def test_occurrences_are_in_the_order_of_positions() -> None:
    found_at = occurrences(int32(4, -1, 2, 4, 2, 2, -1, 9))
    assert found_at.slots.tolist() == [2, 4, 9]
    assert found_at.starts.tolist() == [2, 5, 7, 8]
    assert found_at.order.tolist() == [1, 6, 2, 4, 5, 0, 3, 7]


@pytest.mark.parametrize("slots", [[], [-1, -1]])
def test_a_batch_without_rows_has_no_occurrences(slots: list[int]) -> None:
    bags = SlotBags(int32(*slots))
    block = Twin(RULES["adam"]).block()
    before = block.raw_rows()
    assert bags.occurrences.slots.tolist() == []
    out = block.pool(bags)
    assert out.shape == (len(slots), 1, 5)
    assert not out.any()
    out.sum().backward()
    block.step(Twin(RULES["adam"]).values())
    np.testing.assert_array_equal(block.raw_rows(), before)


@pytest.mark.parametrize(
    ("bags", "reason"),
    [
        ({"slots": torch.zeros(3, dtype=torch.int64)}, "slots as contiguous torch.int32"),
        ({"weights": torch.ones(2)}, "a weight for each of 3 slots, found 2"),
        ({"offsets": torch.tensor([0, 3]), "num_features": 2}, "bags of 2 features"),
        ({"offsets": int32(0, 3)}, "offsets as contiguous torch.int64"),
    ],
)
def test_bags_that_do_not_fit_are_refused(bags: dict, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        SlotBags(**{"slots": int32(0, 1, 2), **bags})


def ragged(twin: Twin, *, num_bags: int = 12, weighted: bool = False) -> SlotBags:
    """Bags of 0 to 5 ids of two features, with padding."""
    sizes = twin.rng.integers(0, 6, num_bags)
    slots = twin.rng.integers(-1, len(twin.keys), int(sizes.sum())).astype(np.int32)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    weights = torch.rand(len(slots)) if weighted else None
    return SlotBags(torch.from_numpy(slots), offsets, weights, num_features=2)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_lookup_equals_that_of_a_module(place: Place, weighted: bool) -> None:
    twin = Twin(RULES["sgd"])
    block, bags = twin.block(place), ragged(twin, weighted=weighted)
    on_device = bags_on(place.device, bags)
    out = block.pool(on_device)
    grad = torch.randn(out.shape)
    out.backward(grad.to(place.device))
    slots, order, starts = bags.occurrences
    rows = block.tensors.weights.cpu().clone().requires_grad_()
    dense = torch.zeros(len(block) + 1, dtype=torch.int64)
    dense[slots.long() + 1] = starts.diff().long()
    begin = int(starts[0])
    weights = torch.empty(0) if bags.weights is None else bags.weights
    lookup = Lookup(
        rows=rows,
        index=bags.slots,
        order=order[begin:].contiguous(),
        starts=dense.cumsum(0).to(torch.int32),
        bags=bags.bag_of,
        offsets=bags.offsets,
        weights=weights,
    )
    expected = gather_rows(lookup, bags.num_examples, 2)
    expected.backward(grad)
    assert torch.equal(out.cpu(), expected)
    assert torch.equal(block.gradient()[0].cpu(), slots)
    assert torch.equal(block.rows.grad.cpu().to_dense(), rows.grad)


def bags_on(device: str, bags: SlotBags) -> SlotBags:
    parts = (bags.slots, bags.offsets, bags.weights)
    moved = (part if part is None else part.to(device) for part in parts)
    return SlotBags(*moved, num_features=bags.num_features)


@pytest.mark.parametrize("place", PLACES)
def test_a_lookup_of_one_id_per_bag_copies_rows(place: Place) -> None:
    block = Twin(RULES["sgd"]).block(place)
    slots = int32(3, -1, 0, 3, 7, 7).to(place.device)
    out = block.pool(SlotBags(slots, num_features=2))
    weights = block.tensors.weights
    zeros = torch.zeros_like(weights[0])
    rows = [weights[3], zeros, weights[0], weights[3], weights[7], weights[7]]
    expected = torch.stack(rows).view(2, 3, -1).transpose(0, 1)
    assert torch.equal(out, expected)


def test_a_mean_does_not_count_padding() -> None:
    bags = SlotBags(int32(0, -1, 1, 2, -1), torch.tensor([0, 2, 4, 4, 5])).mean()
    weights = torch.tensor([[1.0], [2.0], [4.0]])
    assert pool(weights, bags).flatten().tolist() == [1.0, 3.0, 0.0, 0.0]
    with pytest.raises(BadRequest, match="found weights"):
        bags.mean()


@pytest.mark.parametrize("place", PLACES)
def test_a_hot_row_is_summed_by_chunks(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_bags, "CHUNK", 4)
    kernels = Twin(RULES["sgd"]).block(place).kernels
    slots = int32(*[1] * 11, -1, *[0] * 4)
    torch.manual_seed(0)
    grad = torch.randn(16, 1, 3) * torch.logspace(3, 0, 16)[:, None, None]
    values = grad[:, 0].numpy()

    def in_order(rows: np.ndarray) -> np.ndarray:
        total = np.zeros(3, np.float32)
        for row in rows:
            total = total + row
        return total

    chunks = np.stack([in_order(values[:4]), in_order(values[4:8]), in_order(values[8:11])])
    expected = np.stack([in_order(values[12:]), in_order(chunks)])
    sums = kernels.sum(grad.to(place.device), SlotBags(slots.to(place.device)))
    np.testing.assert_array_equal(sums.cpu().numpy(), expected)
    assert (in_order(values[:11]) != expected[1]).any(), "a sum that depends on the chunks"


# ---- steps ----


@pytest.mark.parametrize("is_fused", [False, True])
def test_lookups_of_one_step_are_summed(is_fused: bool) -> None:
    twin, other = Twin(RULES["adagrad"]), Twin(RULES["adagrad"])
    block = twin.block(is_fused=is_fused)
    first, second = ragged(twin), ragged(twin)
    outs = [block.pool(first), block.pool(second), block.pool(first)]
    sum(out.pow(2).sum() for out in outs).backward()
    assert (block.rows.grad is None) == is_fused
    slots, grads = block.gradient()
    rows = other.block().tensors.weights.requires_grad_()
    sum(pool_plain(rows, bags).pow(2).sum() for bags in (first, second, first)).backward()
    torch.testing.assert_close(grads, rows.grad[slots.long()], rtol=1e-6, atol=1e-6)
    values = twin.values()
    block.step(values)
    assert block.rows.grad is None
    other.num_steps = 1
    other.update_core(slots, grads, values)
    np.testing.assert_array_equal(block.raw_rows(), other.raw_rows())
    assert block.is_changed.nonzero().flatten().tolist() == slots.tolist()
    assert len(block.gradient()[0]) == 0


def pool_plain(rows: torch.Tensor, bags: SlotBags) -> torch.Tensor:
    """Bags by torch's own embedding_bag."""
    weights = (bags.slots >= 0).to(torch.float32)
    ids = bags.slots.clamp(min=0).long()
    offsets = bags.offsets[:-1]
    return torch.nn.functional.embedding_bag(
        ids, rows, offsets, mode="sum", per_sample_weights=weights
    )


@pytest.mark.parametrize("name", ["adam", "fleet adam"])
@pytest.mark.parametrize("place", PLACES)
def test_every_run_gives_the_same_bits_fused_or_not(
    place: Place, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_bags, "CHUNK", 3)
    rows = []
    for is_fused in (False, True, False, True):
        twin = Twin(RULES[name], num_rows=6)
        torch.manual_seed(0)
        block = twin.block(place, is_fused=is_fused)
        for _ in range(2):
            bags = bags_on(place.device, ragged(twin, weighted=True))
            block.pool(bags).pow(2).sum().backward()
            block.step(twin.values())
        rows.append(block.raw_rows())
    for others in rows[1:]:
        np.testing.assert_array_equal(others, rows[0])


def test_an_update_that_is_refused_changes_nothing() -> None:
    twin = Twin(RULES["adam"])
    block = twin.block()
    before = block.raw_rows()
    slots, grads = twin.draw()
    with pytest.raises(BadRequest, match="beta1"):
        block.update(slots, grads, {**twin.values(), "beta1": 1.0})
    with pytest.raises(
        BadRequest, match=r"shape \(30, 5\), found torch.float32 of shape \(30, 4\)"
    ):
        block.update(slots, grads[:, :4], twin.values())
    np.testing.assert_array_equal(block.raw_rows(), before)
    assert not block.is_changed.any()


# ---- the choice ----


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log_choice.cache_clear()
    with caplog.at_level(logging.INFO, "trireme.device"):
        for _ in range(2):
            block = Twin(RULES["sgd"]).block()
            block.pool(SlotBags(int32(0)))
    assert [record.getMessage() for record in caplog.records] == [
        "rows on cpu are computed by the C++ core: the device is cpu"
    ]
    with pytest.raises(BadRequest, match="one of"):
        Twin(RULES["sgd"]).block(Place("cpu", "fast"))


def test_a_block_on_the_cpu_loads_no_triton() -> None:
    program = """
import sys
import trireme.launch.init, trireme.train.trainer
from tests.device.blocks import PLACES, RULES, Place, Twin
twin = Twin(RULES["sgd"])
block = twin.block()
block.update(*twin.draw(), twin.values())
assert not [name for name in sys.modules if name.split(".")[0] == "triton"]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
