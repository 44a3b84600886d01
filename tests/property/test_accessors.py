"""Accessors count, select and remove rows as Fleet's do, over random histories of pushes, days,
saves and shrinks.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import trireme as tr
from tests.jobs import Job
from tests.long import pick
from tests.property.accessor_model import Accessor
from tests.seeds import SEED, named_in_failure
from tests.tables import POOL, T_ROWS, buckets_of
from trireme import _core
from trireme.checkpoint.format.save_modes import save_mode
from trireme.checkpoint.server_side.rows_to_save import RowsToSave
from trireme.job.cluster import Cluster
from trireme.optim import rule_values, values_of_group
from trireme.policy import ACCESSORS, ScorePolicy
from trireme.rows.core_table import make_core_table
from trireme.rows.row_statistics import DAY_S as DAY
from trireme.rows.row_statistics import faded, unseen_days
from trireme.rows.wide_rows import RowLayout
from trireme.server.served_tables import ServedTable
from trireme.server.state import ServerState
from trireme.worker import expiry_calls
from trireme.worker.gradients import PushHeader, TableGradient
from trireme.worker.passes import PassNote, begin_pass

NUM_HISTORIES = pick(short=80, long=2000)
KEYS = _core.unique(np.arange(24, dtype=np.uint64), POOL)[0]
BUCKETS = sorted(set(buckets_of(KEYS).tolist()))


def drawn_policy(draw: random.Random) -> ScorePolicy:
    """An accessor with the numbers of its kind, or with others."""
    kind = ACCESSORS[draw.choice(sorted(ACCESSORS))]
    if draw.random() < 0.3:
        return kind(embedx_threshold=None)
    return kind(
        nonclk_coeff=draw.uniform(0, 0.5),
        click_coeff=draw.uniform(0.5, 3),
        decay_rate=draw.choice([1.0, draw.uniform(0.3, 1.0)]),
        delete_threshold=draw.uniform(0, 1.5),
        delete_after_unseen_days=draw.choice([None, 0, 2, 5]),
        base_threshold=draw.uniform(0, 4),
        delta_threshold=draw.uniform(0, 3),
        delta_keep_days=draw.choice([None, 0, 1, 4]),
        embedx_threshold=draw.choice([None, 2.5]),
    )


def table_of(policy: ScorePolicy) -> tr.Table:
    return tr.Table("t", dim=3, optimizer=tr.optim.FleetSGD(), absent="zeros", policy=policy)


class Ours:
    """The table as a server has it."""

    def __init__(self, tables: list[ServedTable]) -> None:
        self.tables = tables

    def records(self, table: ServedTable) -> tuple[np.ndarray, np.ndarray]:
        """Keys and statistics of all rows."""
        layout = RowLayout.of(table.schema, table.rows)
        contents = [table.rows.snapshot(bucket) for bucket in BUCKETS]
        keys = np.concatenate([content.keys for content in contents])
        return keys, np.concatenate([layout.statistics(content.rows) for content in contents])

    def save(self, mode: int, time: int) -> set[int]:
        saved: set[int] = set()
        for table in self.tables:
            keys, records = self.records(table)
            choose = RowsToSave(save_mode(mode), time, {}).of(table)
            mask = np.ones(len(keys), np.bool_) if choose is None else choose(records)
            saved.update(keys[mask].tolist())
            if mode in (1, 2):
                gained = records["delta_score"][mask].copy()
                assert table.rows.settle(keys[mask].copy(), gained) == len(gained)
        return saved

    def compare(self, model: Accessor, time: int, day_over: bool) -> None:
        actual: dict[int, Any] = {}
        for table in self.tables:
            keys, records = self.records(table)
            policy = model.numbers
            show, click = faded(policy, records, time, day_over)
            unseen = unseen_days(records, time)
            pulled = np.empty((len(keys), 2))
            table.rows.statistics(keys, pulled, time, day_over, POOL)
            np.testing.assert_array_equal(pulled, np.stack([show, click], 1))
            for i, key in enumerate(keys.tolist()):
                record = records[i]
                actual[key] = (show[i], click[i], record["delta_score"], unseen[i])
                assert record["feature"] == model.rows[key].slot
        expected = {
            key: (row.show, row.click, row.delta_score, row.unseen_days)
            for key, row in model.rows.items()
        }
        assert actual.keys() == expected.keys()
        for key, row in expected.items():
            np.testing.assert_allclose(actual[key], row, rtol=1e-5, atol=1e-6)


class Core(Ours):
    """The core alone."""

    def __init__(self, table: tr.Table) -> None:
        rows = make_core_table(table.schema)
        super().__init__([ServedTable(table.schema, rows)])
        self._values = rule_values(values_of_group(table.optimizer.group(), 1))
        self._sequence = 0

    def push(self, rows: np.ndarray, slots: np.ndarray, shows: np.ndarray, time: int) -> None:
        self._sequence += 1
        self.tables[0].rows.update(
            KEYS[rows],
            np.zeros((len(rows), 3), np.float32),
            [(0, self._sequence)],
            self._values,
            POOL,
            time=time,
            show_click=shows,
            features=slots,
        )

    def shrink(self, time: int) -> int:
        rows = self.tables[0].rows
        return sum(sum(rows.shrink(b, time, True, rows.version)) for b in BUCKETS)


class Servers(Ours):
    """Real servers, reached by a worker's client."""

    def __init__(
        self, table: tr.Table, cluster: Cluster, states: list[ServerState], sync: bool
    ) -> None:
        cluster.client.create_table(table.schema)
        super().__init__([state.tables["t"] for state in states])
        self._cluster, self._sync, self._sequence = cluster, sync, 0
        self._values = values_of_group(table.optimizer.group(), 1)
        if sync:
            begin_pass(cluster.client, PassNote())

    def push(self, rows: np.ndarray, slots: np.ndarray, shows: np.ndarray, time: int) -> None:
        self._sequence += 1
        gradient = torch.zeros(len(rows), 3)
        columns = {"show_click": shows, "feature": slots}
        push = TableGradient(KEYS[rows], gradient, self._values, columns)
        number = self._sequence if self._sync else 0
        step = PushHeader(self._sequence, number, [], examples=1, time=time)
        client = self._cluster.client
        client.push(step, {T_ROWS: push}, staged=self._sync)
        pulled = client.pull({T_ROWS: KEYS}, staged=number, time=time).rows[T_ROWS].numpy()
        assert pulled.shape[1] == self.tables[0].schema.width_of(0)

    def shrink(self, time: int) -> int:
        removed = expiry_calls.shrink(self._cluster.client, time=time, day_over=True)["t"]
        return removed["expired"] + removed["evicted"]


def live(ours: Core | Servers, model: Accessor, draw: random.Random, num_days: int) -> int:
    """Some days of pushes and saves in both; at the end of each shrink, base and batch model.
    Returns the day after.
    """
    rng = np.random.default_rng(draw.getrandbits(32))
    day = draw.randrange(1, 40_000)
    for _ in range(num_days):
        for _ in range(draw.randrange(4)):
            time = day * DAY + draw.randrange(DAY)
            rows = np.sort(rng.choice(len(KEYS), draw.randrange(1, 9), replace=False))
            shows = rng.integers(0, 6, (len(rows), 2)).astype(np.float32)
            shows[:, 1] = np.minimum(shows[:, 0], shows[:, 1])
            slots = rng.integers(0, 400, len(rows)).astype(np.uint32)
            ours.push(rows, slots, shows, time)
            for row, slot, (show, click) in zip(rows, slots.tolist(), shows.tolist(), strict=True):
                model.update(int(KEYS[row]), slot, show, click)
            if draw.random() < 0.3:
                mode = draw.choice([0, 1])
                assert ours.save(mode, time) == model.save(mode)
        ours.compare(model, day * DAY, day_over=False)
        assert ours.shrink(day * DAY) == model.shrink()
        assert ours.shrink(day * DAY) == 0
        ours.compare(model, day * DAY, day_over=True)
        for mode in (2, 3):
            assert ours.save(mode, day * DAY) == model.save(mode)
        day += 1
        ours.compare(model, day * DAY, day_over=False)
    return day


def test_random_histories_in_the_core() -> None:
    at = 0
    with named_in_failure(lambda: f"history {at}"):
        for at in range(NUM_HISTORIES):
            draw = random.Random(f"{SEED} {at}")
            policy = drawn_policy(draw)
            live(Core(table_of(policy)), Accessor(policy), draw, draw.randrange(1, 12))


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_random_history_on_servers(mode: str) -> None:
    for at in range(3):
        draw = random.Random(f"{SEED} {mode} {at}")
        policy = drawn_policy(draw)
        table, model = table_of(policy), Accessor(policy)
        with Job(2) as job, named_in_failure(lambda at=at: f"history {at}"):
            states = [server.state for server in job.servers]

            def work(cluster: Cluster) -> None:
                ours = Servers(table, cluster, states, mode == "sync")  # noqa: B023
                live(ours, model, draw, 6)  # noqa: B023

            job.run(1, work)


def test_days_without_data_may_be_left_out() -> None:
    """A row fades by the days that pass, however seldom something looks at it."""
    at = 0
    with named_in_failure(lambda: f"history {at}"):
        for at in range(20):
            draw = random.Random(f"{SEED} idle {at}")
            policy = drawn_policy(draw)
            ours, model = Core(table_of(policy)), Accessor(policy)
            day = live(ours, model, draw, 3)
            idle = draw.randrange(1, 9)
            for _ in range(idle):
                model.shrink()
                model.save(3)
            ours.shrink((day + idle - 1) * DAY)
            ours.compare(model, (day + idle) * DAY, day_over=False)
