"""Passes on a device train to the same bits as training without them; a CPU is the device here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.durable_servers import DurableServers
from tests.programs import Template
from tests.tables import rows_of
from trireme.errors import BadRequest
from trireme.interchange.worker_side.import_requests import importing, send_rows
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.train.modes.device_pass import pass_rows
from trireme.worker import whole_rows

ROUNDS = 2
RULES: dict[str, Callable[[], Any]] = {
    "sgd": lambda: tr.optim.SGD(lr=0.1),
    "momentum": lambda: tr.optim.SGD(lr=0.1, momentum=0.9),
    "adagrad": lambda: tr.optim.Adagrad(lr=0.1),
    "shared_adagrad": lambda: tr.optim.Adagrad(lr=0.1, shared=True),
    "adam": lambda: tr.optim.Adam(lr=0.01),
    "row_adam": lambda: tr.optim.Adam(lr=0.01, bias_correction="row"),
    "ftrl": lambda: tr.optim.FTRL(lr=0.1),
}


class Net(nn.Module):
    def __init__(self, table: tr.Table) -> None:
        super().__init__()
        self.rows = tr.nn.EmbeddingBag(table, features=["a", "b"])
        self.top = nn.Linear(2 * table.dim, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.top(self.rows(batch).flatten(1)).squeeze(1)


def data(seed: int) -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(4):
        ids = torch.randint(0, 60, (32, 2), generator=drawn)
        label = (ids.sum(1) % 2).float()
        batches.append({"a": ids[:, 0], "b": ids[:, 1], "label": label})
    return batches


def trainer(
    rule: Any,
    mode: str = "sync",
    *,
    fresh: bool | None = None,
    accumulate: int = 1,
    **options: Any,
) -> tr.Trainer:
    """Of a new model. options: of its table."""
    torch.manual_seed(3)
    table = tr.Table("keys", dim=4, optimizer=rule, **options)
    model = Net(table)
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), 0.01),
        strategy=tr.Strategy(mode),
        loss=nn.functional.binary_cross_entropy_with_logits,
        fresh=fresh,
        accumulate=accumulate,
        progress=False,
    )


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with embedded() as opened:
        set_default(opened)
        yield opened


def contents(cluster: Cluster) -> dict[str, np.ndarray]:
    """Every byte of the rows, by key, and of the blocks."""
    assert cluster.server is not None
    actual: dict[str, np.ndarray] = {}
    for name, table in cluster.server.tables.items():
        for key, row in zip(*rows_of(table.rows), strict=True):
            actual[f"{name}:{key}"] = np.array(row)
    blocks = cluster.server.blocks
    for spec in blocks.specs():
        for tensor, values in blocks.state_with(spec.id, {}).items():
            actual[f"{spec.id}:{tensor}"] = np.copy(values.numpy())
    return actual


def assert_equal(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values, err_msg=name)


def trained(rule: Any, mode: str, *, in_passes: bool, **options: Any) -> dict[str, np.ndarray]:
    with embedded() as opened:
        set_default(opened)
        one = trainer(rule, mode, **options)
        for number in range(ROUNDS):
            if in_passes:
                with one.on_device(data(number)):
                    one.fit(data(number), epochs=2)
            else:
                one.fit(data(number), epochs=2)
        one.optimizer.flush()
        result = contents(opened)
        assert one.optimizer.num_steps == 4 * 2 * ROUNDS
    return result


@pytest.mark.parametrize("rule", RULES)
def test_a_pass_trains_to_the_bits_of_sync(rule: str) -> None:
    expected = trained(RULES[rule](), "sync", in_passes=False)
    assert len(expected) > 50
    assert_equal(trained(RULES[rule](), "sync", in_passes=True), expected)


@pytest.mark.parametrize("mode", ["async", "collective"])
def test_a_pass_trains_as_sync_in_other_modes(mode: str) -> None:
    expected = trained(RULES["adagrad"](), "sync", in_passes=False)
    assert_equal(trained(RULES["adagrad"](), mode, in_passes=True), expected)


def test_passes_and_steps_without_one_alternate(cluster: Cluster) -> None:
    one = trainer(RULES["adam"]())
    with one.on_device(data(0)):
        one.fit(data(0))
    one.fit(data(1))
    with one.on_device(data(2)):
        one.fit(data(2))
    actual = contents(cluster)
    with embedded() as opened:
        set_default(opened)
        other = trainer(RULES["adam"]())
        for number in range(3):
            other.fit(data(number))
        assert_equal(actual, contents(opened))


def test_servers_have_the_rows_of_the_beginning_until_the_end(cluster: Cluster) -> None:
    one = trainer(RULES["adagrad"]())
    one.fit(data(0))
    before = contents(cluster)
    one.begin_pass(data(1))
    one.fit(data(1))
    assert_equal(contents(cluster), before)
    one.end_pass()
    assert contents(cluster).keys() > before.keys()


def test_a_failed_pass_changes_nothing(cluster: Cluster) -> None:
    one = trainer(RULES["adagrad"]())
    one.fit(data(0))
    before, weights = contents(cluster), one.model.top.weight.detach().clone()

    def fail() -> None:
        with one.on_device(data(1)):
            one.fit(data(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert_equal(contents(cluster), before)
    torch.testing.assert_close(one.model.top.weight.detach(), weights, rtol=0, atol=0)
    one.fit(data(1))
    assert one.optimizer.num_steps == 8


def test_evaluate_within_a_pass_sees_what_it_has_trained(cluster: Cluster) -> None:
    one = trainer(RULES["adagrad"]())
    other_keys = [{name: values + 40 for name, values in b.items()} for b in data(5)]
    for batch in other_keys:
        batch["label"] = batch["label"] - 40
    with one.on_device(data(0)):
        one.fit(data(0), epochs=3)
        within = one.evaluate(other_keys)["loss"]
    assert one.evaluate(other_keys)["loss"] == within


def test_a_pass_refuses_what_servers_cannot_do_meanwhile(cluster: Cluster, tmp_path: Path) -> None:
    one = trainer(RULES["adagrad"]())
    with pytest.raises(BadRequest, match="expected begin_pass before"):
        one.end_pass()
    one.begin_pass(data(0))
    for call in (
        lambda: one.save(tmp_path / "saved"),
        lambda: one.load(tmp_path / "saved"),
        lambda: one.resume(tmp_path),
        lambda: one.shrink(),
        lambda: one.begin_pass(data(0)),
        lambda: one.fit(data(0), checkpoints=tr.Checkpoints(tmp_path, every_steps=1)),
    ):
        with pytest.raises(BadRequest, match="between passes on a device"):
            call()
    beyond = [{name: values + 1000 for name, values in batch.items()} for batch in data(0)]
    with pytest.raises(BadRequest, match=r"found 10\d\d of table 'keys'"):
        one.fit(beyond)
    one.abandon_pass()


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("sync", {"admit": tr.policy.CountFilter(2)}, "admission filter"),
        ("sync", {"policy": tr.policy.Policy(max_rows=100000)}, "without max_rows"),
        ("sync", {"dtype": "bfloat16"}, "float32"),
        ("hybrid", {}, "rows and dense weights are on the servers"),
    ],
)
def test_a_pass_refuses_tables_and_modes(
    cluster: Cluster, mode: str, options: dict[str, Any], message: str
) -> None:
    one = trainer(RULES["adagrad"](), mode, **options)
    with pytest.raises(BadRequest, match=message):
        one.begin_pass(data(0))
    one.fit(data(0))


def test_a_pass_refuses_an_iterator(cluster: Cluster) -> None:
    one = trainer(RULES["adagrad"]())
    with pytest.raises(BadRequest, match="read twice"):
        one.begin_pass(iter(data(0)))


def numbers_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the number of rows of each reading from the servers."""
    numbers = []
    read = whole_rows.read_parts

    def counting(how: Any, keys: Any, *others: Any) -> Any:
        if len(keys):
            numbers.append(len(keys))
        return read(how, keys, *others)

    for module in (whole_rows, pass_rows):
        monkeypatch.setattr(module, "read_parts", counting)
    return numbers


def distinct(*passes: list[dict[str, torch.Tensor]]) -> set[int]:
    return {int(k) for batches in passes for b in batches for f in "ab" for k in b[f].flatten()}


DAYS = [
    [{**b, "a": b["a"] + 30 * day, "b": b["b"] + 30 * day} for b in data(day)] for day in (0, 1, 2)
]


@pytest.mark.parametrize("scored", [False, True])
def test_a_pass_that_follows_reads_what_the_one_before_lacks(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scored: bool
) -> None:
    options: dict[str, Any] = {"policy": tr.policy.ScorePolicy()} if scored else {}
    numbers = numbers_read(monkeypatch)
    one = trainer(RULES["adam"](), **options)
    for day, following in zip(DAYS, [*DAYS[1:], None], strict=True):
        with one.on_device(day, following):
            one.fit(day)
        one.save(tmp_path / f"day{one.num_epochs}")  # raises the version, and changes no row
    first, second, third = (distinct(day) for day in DAYS)
    assert numbers == [len(first), len(second - first), len(third - second)]
    actual = contents(cluster)
    with embedded() as opened:
        set_default(opened)
        other = trainer(RULES["adam"](), **options)
        for day in DAYS:
            other.fit(day)
            other.save(tmp_path / f"other{other.num_epochs}")
        assert_equal(actual, contents(opened))


@pytest.mark.parametrize("change", ["fit", "load", "shrink", "remove", "pass", "none"])
def test_rows_that_were_read_ahead_are_read_again_if_they_changed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str
) -> None:
    numbers = numbers_read(monkeypatch)
    one = trainer(RULES["adagrad"]())
    one.save(tmp_path / "empty")
    with one.on_device(DAYS[0], DAYS[1]):
        one.fit(DAYS[0])
    if change == "fit":
        one.fit(DAYS[2])
    elif change == "load":
        one.load(tmp_path / "empty")
    elif change == "shrink":
        one.shrink()
    elif change == "remove":
        tr.interchange.remove_rows(one, "keys", [min(distinct(DAYS[1]) - distinct(DAYS[0]))])
    elif change == "pass":
        with one.on_device(DAYS[2]):
            one.fit(DAYS[2])
    with one.on_device(DAYS[1]):
        one.fit(DAYS[1])
    first, second, third = (distinct(day) for day in DAYS)
    read_whole = {"none": [], "pass": [third, second]}.get(change, [second])
    whole = Counter(map(len, [first, *read_whole]))
    assert whole <= Counter(numbers)
    # They are read in a thread: before the pass ends or after, and in part or not for another.
    ahead = list((Counter(numbers) - whole).elements())
    assert ahead == [len(second - first)] or (change != "none" and sum(ahead) < len(second - first))


def test_what_has_changed_all_the_same_is_not_overwritten(cluster: Cluster) -> None:
    one = trainer(RULES["adagrad"]())
    assert cluster.server is not None
    with importing(cluster.client, ["keys"], replace=False) as id:
        rows = {"key": np.arange(3, dtype=np.uint64), "weights": np.ones((3, 4), np.float32)}
        send_rows(cluster.client, "keys", rows, time=0, pool=cluster.pool, id=id)
        one.begin_pass(data(0))
        one.fit(data(0))
        lease = cluster.server.leases.newest
        cluster.server.leases.end()  # as if the import had been under way at the beginning
    assert lease is not None
    cluster.server.leases.begin(lease)
    before = contents(cluster)
    with pytest.raises(BadRequest, match=r"tables \['keys'\] that nobody else changes"):
        one.end_pass()
    one.abandon_pass()
    assert_equal(contents(cluster), before)


def test_data_that_follows_is_refused_if_reading_it_would_disturb_training(
    cluster: Cluster,
) -> None:
    one, today = trainer(RULES["adagrad"]()), data(0)
    with pytest.raises(BadRequest, match="without a generator"):
        one.begin_pass(today, torch.utils.data.DataLoader(today, batch_size=None))
    with pytest.raises(BadRequest, match="found the same"):
        one.begin_pass(today, today)
    one.fit(today)


def test_an_error_of_data_that_follows_is_raised_where_its_pass_begins(cluster: Cluster) -> None:
    one, broken = trainer(RULES["adagrad"]()), [*data(1), {"a": torch.zeros(2)}]
    with one.on_device(data(0), broken):
        one.fit(data(0))
    with pytest.raises(BadRequest):
        one.begin_pass(broken)
    one.fit(data(0))


def saved(one: tr.Trainer, path: Path) -> dict[str, np.ndarray]:
    """The contents of a checkpoint, through a job of one process."""
    one.save(path)
    with embedded() as opened:
        set_default(opened)
        trainer(RULES["adam"]()).load(path)
        return contents(opened)


def test_passes_over_servers_give_the_same_bits_though_one_is_killed_within(
    programs: Template, tmp_path: Path
) -> None:
    with DurableServers(programs, 2, tmp_path) as servers:
        cluster = servers.join(0, 1)
        set_default(cluster)
        one = trainer(RULES["adam"]())
        one.begin_pass(data(0))
        one.fit(data(0), epochs=2)
        servers.kill(1)
        servers.start(1)
        one.end_pass()
        servers.kill(0)
        servers.start(0)
        with one.on_device(data(1)):
            one.fit(data(1), epochs=2)
        actual = saved(one, tmp_path / "passes")
        cluster.close()
    expected = trained(RULES["adam"](), "sync", in_passes=False)
    assert_equal(actual, expected)
