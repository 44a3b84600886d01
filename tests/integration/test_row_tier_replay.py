"""Starts that replay a log over rows on SSD."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trireme as tr
from tests.integration.test_row_tier import Kept
from tests.seeds import SEED
from trireme import _core
from trireme.errors import Corruption
from trireme.optim import values_of_group
from trireme.protocol.routing import buckets_of
from trireme.protocol.wire import Push, TablePush
from trireme.server.log import fetch_ahead
from trireme.server.row_tier import RowTier

DIM, BUCKETS = 16, range(0, 4096, 8)
RULES = {"t": tr.optim.SGD(lr=1.0), "second": tr.optim.Adam(lr=0.1)}


class Logged(Kept):
    """Pushes are recorded. Those of the same number are the same for all servers."""

    def begin(self) -> None:
        super().begin()
        second = tr.Table("second", dim=DIM, optimizer=RULES["second"])
        self.ask("ps.create_table", {"schema": second.schema.to_wire()}, [])
        for _ in range(8):
            self.push_some(20_000)

    def push_some(self, num_keys: int) -> None:
        self.number += 1
        rng, parts = np.random.default_rng([SEED, self.number]), []
        for name, rule in RULES.items():
            drawn = rng.choice(self.KEYS, num_keys, replace=False)
            keys = _core.unique(drawn, self.state.pool)[0]
            gradients = rng.normal(size=(num_keys, DIM)).astype(np.float32)
            values = values_of_group(rule.group(), self.number)
            parts.append(TablePush(name, keys, gradients, values))
        push = Push(
            stream=1, sequence=self.number, incarnation=1, step=0, staged=False, computed_at=0,
            examples=8, position=(self.number,), time=0, map_version=1, tables=parts, blocks=None,
        )  # fmt: skip
        self.ask("ps.push", *push.to_wire())

    def content(self) -> list[tuple[bytes, bytes]]:
        """Keys and rows, with all of their state, of some buckets of each table."""
        result = []
        for name in RULES:
            for bucket in BUCKETS:
                content = self.state.tables[name].rows.snapshot(bucket)
                order = np.argsort(content.keys)
                rows = content.rows.reshape(len(order), -1)
                result.append((content.keys[order].tobytes(), rows[order].tobytes()))
        return result

    def use(self, name: str) -> dict[str, int]:
        use = self.state.tables[name].rows.tier
        assert use is not None
        return use


class InMemory(Logged):
    def open(self, *, has_tier: bool = False) -> None:
        super().open(has_tier=has_tier)


def opened(server: Logged) -> Iterator[Any]:
    server.memory = "14MiB"
    server.close()
    server.open()
    server.begin()
    yield server
    server.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Logged]:
    yield from opened(Logged(tmp_path / "state", [tmp_path / "first", tmp_path / "second"]))


@pytest.fixture
def undisturbed(tmp_path: Path) -> Iterator[Logged]:
    server = InMemory(tmp_path / "undisturbed", [])
    server.begin()
    yield server
    server.close()


@pytest.mark.parametrize("num_records", [3, 4096])
def test_rows_are_those_of_an_undisturbed_server_after_any_number_of_starts(
    server: Logged, undisturbed: Logged, monkeypatch: pytest.MonkeyPatch, num_records: int
) -> None:
    monkeypatch.setattr(fetch_ahead, "_RECORDS_MAX", num_records)
    for round_number in range(4):
        for _ in range(10):
            server.push_some(2000)
            undisturbed.push_some(2000)
        if round_number == 1:
            server.snapshot()
            continue
        server.close()
        server.open()
        for name in RULES:
            assert server.use(name)["fetched"] > 1000
            assert server.use(name)["rows"] > 20_000
            memory = server.use(name)["memory_bytes"]
            assert server.use(name)["bytes"] <= memory
        assert server.content() == undisturbed.content()


def test_a_replay_reads_pages_once_that_many_records_need(
    server: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.snapshot()
    for _ in range(40):
        server.push_some(300)

    def reads_of_a_start(num_records: int) -> int:
        monkeypatch.setattr(fetch_ahead, "_RECORDS_MAX", num_records)
        server.close()
        server.open()
        return server.state.num_ssd_reads()

    assert reads_of_a_start(4096) < reads_of_a_start(1) * 0.8


def test_a_page_that_cannot_be_read_is_an_error_of_the_record_that_needs_it(
    server: Logged, caplog: pytest.LogCaptureFixture
) -> None:
    server.snapshot()
    for _ in range(2):
        server.push_some(5000)
    server.close()
    for file in server.kept_files():
        content = bytearray(file.read_bytes())
        content[2000::4096] = bytes(b ^ 16 for b in content[2000::4096])
        file.write_bytes(content)
    with pytest.raises(Corruption, match=r"the record at offset \d+ \(ps.push\).*bucket"):
        server.open()
    assert "rows cannot be read ahead" in caplog.text


def test_what_was_replayed_counts_as_log(server: Logged) -> None:
    server.snapshot()
    server.push_some(20_000)
    first = server.state.journal.lag().num_bytes
    assert first is not None
    assert first > 2 * 20_000 * 4 * DIM
    for _ in range(3):
        server.close()
        server.open()
        again = server.state.journal.lag().num_bytes
        assert again is not None
        assert first <= again < first + (1 << 15)  # what a segment begins with is in it


def test_rows_that_records_use_stay_in_memory_while_others_are_fetched(tmp_path: Path) -> None:
    some = np.arange(1_600_000, dtype=np.uint64)
    keys = some[buckets_of(some) < 256]  # so that a bucket has rows for many pages
    tier, pool = RowTier(7 << 20, [tmp_path]), _core.Pool(1)
    rows = tier.make_rows(tr.Table("t", dim=DIM, optimizer=RULES["t"]).schema)
    for number, part in enumerate(np.array_split(keys, 50), 1):
        grads = np.ones((len(part), DIM), np.float32)
        rows.update(part, grads, [(0, number)], _core.RuleValues(lr=1.0), pool)
    cold = rows.note_uses(keys, pool)
    hot = np.setdiff1d(keys, cold)
    assert len(cold) > 10_000
    assert len(hot) > 10_000
    used, others = hot[::4].copy(), np.setdiff1d(hot, hot[::4])
    for _ in range(4):
        assert len(rows.note_uses(used, pool)) == 0
    rows.fetch(_core.unique(cold[: len(hot) // 4], pool)[0], pool)
    num_used, num_others = (len(rows.note_uses(some, pool)) for some in (used, others))
    assert num_others > 1000
    assert num_used / len(used) < num_others / len(others) / 4
    del rows
    tier.close()
