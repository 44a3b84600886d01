"""Tables with admission equal a plain model under random operations: the same rows, rejections and
pending bytes for any number of threads and servers.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from tests.property.admission_model import Model
from tests.property.table_model import bucket_of, key_at
from tests.seeds import SEED, named_in_failure
from tests.tables import RULES, clear, restore
from trireme import _core

VALUES = _core.RuleValues(lr=1.0)
BUCKETS = [0, 7, 63, 64, 1000, 4095]
TTL_S = 3000
FILTERS: dict[str, dict[str, Any]] = {
    "counts": {"name": "count_filter", "n": 4},
    "sketch": {"name": "count_filter", "n": 4, "sketch_bytes": 4096 * 64},
    "wide sketch": {"name": "count_filter", "n": 300, "sketch_bytes": 4096 * 97},
    "probability": {"name": "probability", "p": 0.3},
    "score": {"name": "score_filter", "threshold": 0.75},
}


class Servers:
    """Tables that own every n-th bucket each."""

    def __init__(self, num_servers: int, threads: int, settings: dict[str, Any]) -> None:
        self.is_scored = settings["name"] == "score_filter"
        self.pool = _core.Pool(threads)
        self.tables = [
            _core.Table(
                dims=[1],
                **RULES["count"],
                initializer="constant",
                init_a=0.0,
                init_b=0.0,
                seed=9,
                policy=_core.PolicyConfig(is_scored=self.is_scored, ttl_s=TTL_S),
                admission=_core.AdmissionConfig(**settings),
            )
            for _ in range(num_servers)
        ]

    def table_of(self, bucket: int) -> _core.Table:
        return self.tables[bucket % len(self.tables)]

    def push(
        self,
        keys: list[int],
        counts: list[int],
        shows: list[tuple[float, float]],
        ids: list[tuple[int, int]],
        time: int,
    ) -> None:
        for table in self.tables:
            mine = [i for i, key in enumerate(keys) if self.table_of(bucket_of(key)) is table]
            table.update(
                np.array(keys, np.uint64)[mine],
                np.ones((len(mine), 1), np.float32),
                ids,
                VALUES,
                self.pool,
                time=time,
                show_click=np.array(shows, np.float32).reshape(-1, 2)[mine]
                if self.is_scored
                else None,
                counts=np.array(counts, np.uint32)[mine],
            )

    def erase(self, keys: list[int]) -> None:
        for table in self.tables:
            table.erase(np.array(keys, np.uint64), self.pool)

    def rows(self, bucket: int) -> dict[int, int]:
        actual = self.table_of(bucket).snapshot(bucket)
        weights = np.ascontiguousarray(actual.rows[:, :4]).view(np.float32)[:, 0]
        return dict(zip(actual.keys.tolist(), weights.astype(int).tolist(), strict=True))

    def counter(self, name: str) -> int:
        return sum(table.counters[name] for table in self.tables)


def random_push(random: Random, keys: list[int], is_wide: bool) -> tuple[Any, ...]:
    size = random.choice([0, 1, 5, 30, 30, 300])
    some = random.choices(keys, k=size)
    if random.random() < 0.8:
        some = list(dict.fromkeys(some))
    counts = [random.randrange(100 if is_wide else 3) for _ in some]
    shows = [
        (float(show), float(random.randint(0, show)))
        for show in random.choices(range(5), k=len(some))
    ]
    return some, counts, shows


@pytest.mark.parametrize(("num_servers", "threads"), [(1, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("name", FILTERS)
def test_random_operations_agree_with_the_model(name: str, num_servers: int, threads: int) -> None:
    settings = FILTERS[name]
    random = Random(SEED)
    servers = Servers(num_servers, threads, settings)
    model = Model(9, settings, TTL_S)
    keys = [key_at(bucket, random.randrange(2**52)) for bucket in BUCKETS for _ in range(60)]
    push: tuple[Any, ...] = ([], [], [], [(0, 1)], 0)
    has_time = random.random() < 0.9
    with named_in_failure():
        for number in range(1, 400):
            bucket, time = random.choice(BUCKETS), 100 * number if has_time else 0
            match random.choices(range(5), [70, 10, 6, 6, 8])[0]:
                case 0:
                    ids = [(3, number), (1, number)][random.randrange(2) :]
                    push = (*random_push(random, keys, settings.get("n", 0) > 255), ids, time)
                    servers.push(*push)
                    model.push(*push)
                case 1:  # a retry
                    servers.push(*push)
                    model.push(*push)
                case 2:
                    some = random.choices(keys, k=20)
                    servers.erase(some)
                    model.erase(some)
                case 3:
                    servers.table_of(bucket).shrink(bucket, time, False, 0)
                    model.shrink(bucket, time)
                case 4:
                    table = servers.table_of(bucket)
                    actual = table.snapshot(bucket)
                    clear(table, bucket)
                    if random.random() < 0.1:
                        model.clear(bucket)
                        table.restore(bucket, *empty(table), actual.marks)
                    elif random.random() < 0.5:
                        restore(table, bucket, actual)
                    else:
                        table.restore(bucket, *empty(table), actual.marks)
                        rows = (actual.keys, actual.classes, actual.rows)
                        table.apply(bucket, *rows, np.empty(0, np.uint64), actual.pending)
                        table.apply(bucket, *empty(table), np.empty(0, np.uint64))
            for chosen in [bucket] if number % 20 else BUCKETS:
                assert servers.table_of(chosen).snapshot(
                    chosen
                ).pending.tobytes() == model.filter.save(chosen)
                expected = {
                    key: row[0] for key, row in model.rows.items() if bucket_of(key) == chosen
                }
                assert servers.rows(chosen) == expected
        assert servers.counter("admitted") == model.num_admitted > 0
        assert servers.counter("rejected") == model.num_rejected > 0


def empty(table: _core.Table) -> tuple[Any, ...]:
    return np.empty(0, np.uint64), np.empty(0, np.uint8), np.empty((0, table.row_bytes), np.uint8)
