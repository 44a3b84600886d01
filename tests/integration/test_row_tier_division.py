"""Tables share the memory of a server by their rows, anew now and then. What waits for a disk then
holds nothing that requests need, and runs once at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from tests.conditions import WAIT_S, wait_until
from tests.integration.pushed_server import PushedServer
from trireme.server.row_tier import RowTier
from trireme.server.server_stats import stats_of

MEMORY = 14 << 20


@dataclass
class Disk:
    """Rows leave memory for it as long as it does not hang. most: moves at a time, so far."""

    may_go: Event = field(default_factory=Event)
    waits: Event = field(default_factory=Event)
    moves: int = 0
    most: int = 0

    def slows(self, move: Callable[..., None]) -> Callable[..., None]:
        def slowed(*parts: object) -> None:
            self.moves += 1
            self.most = max(self.most, self.moves)
            self.waits.set()
            assert self.may_go.wait(WAIT_S)
            move(*parts)
            self.moves -= 1

        return slowed


class Server(PushedServer):
    def __init__(self, tier: RowTier, disk: Disk) -> None:
        super().__init__(tier)
        self.disk = disk

    def parts(self) -> dict[str, int]:
        tiers = {name: table.rows.tier for name, table in self.state.tables.items()}
        return {name: tier["memory_bytes"] for name, tier in tiers.items() if tier is not None}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    tier, disk = RowTier(MEMORY, [tmp_path]), Disk()
    server = Server(tier, disk)
    for name in ("large", "small"):
        server.create(name)
    monkeypatch.setattr(RowTier, "_set_parts", staticmethod(disk.slows(tier._set_parts)))
    yield server
    disk.may_go.set()
    server.state.tables.clear()
    tier.close()


def in_time(work: Callable[[], None]) -> None:
    """Run it in a thread that must end."""
    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(WAIT_S / 2)
    assert not thread.is_alive()


def test_a_disk_that_hangs_while_memory_is_divided_holds_no_request_up(server: Server) -> None:
    keys = np.arange(100_000, dtype=np.uint64)

    def train() -> None:
        for number in range(600):
            server.push("large", keys[100 * number : 100 * (number + 1)])

    before = server.parts()
    in_time(train)
    assert server.disk.waits.wait(WAIT_S)
    assert server.parts() == before
    in_time(lambda: stats_of(server.state) and None)
    server.disk.may_go.set()
    wait_until(lambda: server.disk.moves == 0)
    assert server.disk.most == 1
    after = server.parts()
    assert after["small"] < before["small"] < after["large"]
    assert sum(after.values()) <= MEMORY


def test_a_disk_that_hangs_while_a_table_is_made_holds_no_request_up(server: Server) -> None:
    maker = Thread(target=server.create, args=("third",), daemon=True)
    maker.start()
    assert server.disk.waits.wait(WAIT_S)
    in_time(lambda: server.push("small", np.arange(10, dtype=np.uint64)))
    in_time(lambda: stats_of(server.state) and None)
    assert set(server.parts()) == {"large", "small"}
    server.disk.may_go.set()
    maker.join(WAIT_S)
    assert set(server.parts()) == {"large", "small", "third"}
    assert sum(server.parts().values()) <= MEMORY
    assert server.state.tables["third"].rows.marks(0).min() == 1


def test_memory_is_divided_while_a_change_waits_for_room(server: Server) -> None:
    """In sync the pushes of a step hold their rows until the last of them has found room."""
    before = server.parts()
    server.disk.may_go.set()
    server.push("large", np.arange(60_000, dtype=np.uint64))
    assert server.parts() == before
    server.state.with_room(lambda: wait_until(lambda: server.parts()["large"] > before["large"]))
