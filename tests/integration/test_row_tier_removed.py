"""What a server with rows on SSD knows of removed keys when it is started again."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.integration.test_row_tier import Kept
from trireme import _core
from trireme.checkpoint.format.row_files import Places, read_places
from trireme.errors import BadRequest
from trireme.policy import Policy
from trireme.protocol.routing import NUM_BUCKETS, Keys
from trireme.server.log import snapshot as snapshots
from trireme.storage.storage import Storage

DAY_S = 86_400
COME_BACK, STAY_AWAY, NEW = np.split(Kept.KEYS, [60_000, 80_000])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Kept]:
    """At version 3: rows of COME_BACK and STAY_AWAY were removed with version 2, those of COME_BACK
    were made again before version 3, and half of all lie on SSD.
    """
    server = Kept(tmp_path / "state", [tmp_path / "ssd"])
    server.begin(policy=Policy(ttl_s=DAY_S))
    push(server, np.concatenate([COME_BACK, STAY_AWAY]), day=1)
    server.state.raise_version(2)
    rows = server.state.tables["t"].rows
    for bucket in range(NUM_BUCKETS):
        rows.shrink(bucket, 3 * DAY_S, True, 2)
    assert rows.rows == 0
    push(server, COME_BACK, day=4)
    server.state.raise_version(3)
    push(server, NEW, day=4)
    assert rows.tier is not None
    assert rows.tier["rows"] > 10_000
    yield server
    server.close()


def push(server: Kept, keys: Keys, day: int) -> None:
    for some in np.array_split(keys, 60):
        server.push(some, time=day * DAY_S)


def changes(server: Kept, since: int) -> tuple[set[int], set[int]]:
    """The keys that a delta removes, and those whose rows it has."""
    rows = server.state.tables["t"].rows
    delta = _core.snapshot_columns(rows, 0, NUM_BUCKETS, since, since, [rows.row_bytes])
    return set(delta.removed.tolist()), set(delta.keys.tolist())


def start_again(server: Kept) -> None:
    server.snapshot()
    server.close()
    server.open()


def test_a_delta_after_a_start_removes_no_row_that_has_come_back(server: Kept) -> None:
    for _ in range(2):
        removed, changed = changes(server, since=1)
        assert removed - changed == set(STAY_AWAY.tolist())
        assert changed == set(COME_BACK.tolist()) | set(NEW.tolist())
        assert changes(server, since=2) == (set(), set(NEW.tolist()))
        start_again(server)


def test_a_delta_after_a_start_from_an_older_snapshot_asks_for_all_rows(
    server: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def older(storage: Storage, path: str) -> Iterator[Places]:
        """As saved without the versions of removals: a number, its keys, and its versions."""
        for offsets, places in read_places(storage, path):
            parts = [bytes(places[low:high]) for low, high in pairwise(offsets)]
            cut = [part[: len(part) - 8 - 12 * _num_removals(part)] for part in parts]
            ends = np.cumsum([0, *map(len, cut)], dtype=np.int64)
            yield ends, np.frombuffer(b"".join(cut), np.uint8)

    monkeypatch.setattr(snapshots, "read_places", older)
    start_again(server)
    for since in (1, 2):
        with pytest.raises(BadRequest, match="removed before are forgotten; save all rows"):
            changes(server, since)
    assert changes(server, since=3) == (set(), set())
    expected = np.zeros(len(server.KEYS))
    expected[np.concatenate([COME_BACK, NEW]).astype(np.int64)] = 1
    np.testing.assert_array_equal(server.read(), expected)


def _num_removals(part: bytes) -> int:
    """Of a bucket's places, whose removals were all made with version 2."""
    for num in reversed(range(len(part) // 12)):  # a key may look like a lower number
        (stated,) = struct.unpack_from("<Q", part, len(part) - 8 - 12 * num)
        if stated == num and part.endswith(struct.pack("<I", 2) * num):
            return num
    raise AssertionError("expected removals")
