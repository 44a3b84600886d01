"""What a server cannot do is refused before its log has it, and the log has pushes in the order in
which they were applied: a server that starts again is what it was.
"""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import trireme as tr
from tests.property.test_recovery import GROUPS, Requests, Served
from tests.tables import snapshot
from trireme.errors import BadRequest, Corruption
from trireme.job.durability import Durability, parse_records
from trireme.optim import values_of_group
from trireme.protocol.wire import BlocksPush, Push, TablePush

Ask = tuple[str, dict[str, Any], list[Any]]
COUNTED = tr.Table(
    "counted",
    dim=2,
    optimizer=tr.optim.Adagrad(lr=0.1),
    admit=tr.policy.CountFilter(3),
)
EVICTED = tr.Table(
    "evicted",
    dim=2,
    optimizer=tr.optim.SGD(lr=0.1),
    policy=tr.policy.ScorePolicy(max_rows=4096, show_click=tr.policy.ShowClick("show", "click")),
)


def served(folder: Path, mode: str) -> tuple[Served, Requests]:
    server, requests = Served(folder), Requests(Random(3), mode)
    for request in requests.first():
        server.ask(*request)
    for table in (COUNTED, EVICTED):
        server.ask("ps.create_table", {"schema": table.schema.to_wire()})
    return server, requests


def push_of(
    requests: Requests, stream: int, sequence: int, tables: list[TablePush], **other: Any
) -> Ask:
    values: dict[str, Any] = {
        "incarnation": 1, "step": 0, "staged": False, "computed_at": 0, "examples": 8,
        "position": (sequence,), "time": 0, "map_version": requests.map, "blocks": None,
    }  # fmt: skip
    push = Push(stream=stream, sequence=sequence, tables=tables, **{**values, **other})
    return "ps.push", *push.to_wire()


def part_of(table: tr.Table, keys: np.ndarray, rng: np.random.Generator) -> TablePush:
    columns: dict[str, np.ndarray] = {"count": np.ones(len(keys), np.uint32)}
    if table is EVICTED:
        columns = {
            "show_click": rng.random((len(keys), 2), np.float32),
            "feature": np.zeros(len(keys), np.uint32),
        }
    gradients = rng.normal(size=(len(keys), table.dim)).astype(np.float32)
    values = values_of_group(table.optimizer.group(), 1)
    return TablePush(table.name, keys.astype(np.uint64), gradients, values, columns)


def test_recovery_gives_the_rows_of_concurrent_pushes(tmp_path: Path) -> None:
    """Which keys a count filter admits, and which rows an eviction spares, depends on the order."""
    server, requests = served(tmp_path, "async")

    def push(stream: int) -> None:
        rng = np.random.default_rng(stream)
        for sequence in range(1, 25):
            keys = rng.choice(9000, 3000, replace=False)
            parts = [part_of(table, keys, rng) for table in (COUNTED, EVICTED)]
            server.ask(*push_of(requests, stream, sequence, parts))

    threads = [threading.Thread(target=push, args=(stream,)) for stream in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = server.content()
    server.restart()
    after = server.content()
    server.close()
    for name, content in before.items():
        assert after[name] == content, name


def test_values_that_blocks_have_no_state_for_are_not_logged(tmp_path: Path) -> None:
    server, requests = served(tmp_path, "async")

    def push(sequence: int, **values: Any) -> Ask:
        groups = [group | values for group in GROUPS]
        blocks = BlocksPush(groups, np.ones(13, np.float32), [])
        return push_of(requests, 0, sequence, [], blocks=blocks)

    server.ask(*push(1))
    before = server.content()
    with pytest.raises(BadRequest, match=r"Adam cannot step with .* where weights have the state"):
        server.ask(*push(2, amsgrad=True))
    server.restart()
    assert server.content() == before
    server.ask(*push(2))
    server.close()


def test_shows_that_sum_to_infinity_in_a_step_are_not_logged(tmp_path: Path) -> None:
    server, requests = served(tmp_path, "sync")
    part = part_of(EVICTED, np.arange(3), np.random.default_rng(0))
    huge = np.full((3, 2), 2e38, np.float32)
    pushed = replace(part, columns={**part.columns, "show_click": huge})
    with pytest.raises(BadRequest, match=r"shows and clicks of table 'evicted' in \[0, "):
        server.ask(*push_of(requests, 0, 1, [pushed], staged=True, step=1))
    server.restart()
    assert not server.state.staging.staged()
    server.close()


def rows_of(server: Served) -> dict[str, Any]:
    """What tables and blocks hold, without marks."""
    rows: dict[str, Any] = {
        name: [content[:-1] for content in snapshot(table.rows).values()]
        for name, table in server.state.tables.items()
    }
    blocks = server.state.blocks
    return rows | {"blocks": blocks.read([spec.id for spec in blocks.specs()]).tolist()}


def test_a_record_that_fails_is_named_and_left_out_by_hand_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has a push that fails whenever it is applied, as an earlier version may have left."""
    server, requests = served(tmp_path, "async")
    rng = np.random.default_rng(0)
    server.ask(*push_of(requests, 0, 1, [part_of(EVICTED, np.arange(5), rng)]))
    before = rows_of(server)
    bad = push_of(requests, 0, 2, [], blocks=BlocksPush(GROUPS[:1], np.ones(13, np.float32), []))
    server.state.journal.record(*bad)
    server.close()
    with pytest.raises(
        Corruption, match=r"log-00000001: the record at offset \d+ .*ValueError"
    ) as e:
        server.open()
    name = re.search(r"--skip_records (\S+)", str(e.value))[1]
    server.skips = parse_records(f"{name},{tmp_path}/log-00000009:64")
    server.open()
    assert "left out the record" in caplog.text
    assert "has no record" in caplog.text
    assert rows_of(server) == before
    server.skips = frozenset()
    server.restart()
    assert server.state.applied_streams() == [[0, 2, [2]]]
    server.ask(*push_of(requests, 0, 3, [part_of(EVICTED, np.arange(5), rng)]))
    server.close()
    for text in ("log-1", "log-1:", "log-1:-3", ":4"):
        with pytest.raises(BadRequest, match="expected FILE:OFFSET"):
            parse_records(text)
    with pytest.raises(BadRequest, match="with --skip_records, found none"):
        Durability(skips=parse_records("log-1:4"))


def test_a_step_that_is_left_out_is_over(tmp_path: Path) -> None:
    server, requests = served(tmp_path, "sync")
    rng = np.random.default_rng(0)
    before = rows_of(server)

    def push(stream: int, step: int, groups: list[Any]) -> Ask:
        part = part_of(EVICTED, np.arange(5), rng)
        blocks = BlocksPush(groups, np.ones(13, np.float32), [])
        return push_of(requests, stream, step, [part], staged=True, step=step, blocks=blocks)

    for stream in (0, 1):
        server.state.journal.record(*push(stream, 1, GROUPS[:1]))
    server.state.journal.record("log.step", {"step": 1, "norm": None}, [])
    server.close()
    with pytest.raises(Corruption, match=r"\(log.step\): ValueError") as raised:
        server.open()
    server.skips = parse_records(str(raised.value).rpartition("--skip_records ")[2].split()[0])
    server.open()
    assert server.state.applied_streams() == [[0, 1, [1]], [1, 1, [1]]]
    assert rows_of(server)["blocks"] == before["blocks"]
    for stream in (0, 1):
        server.ask(*push(stream, 2, GROUPS))
    for stream in (0, 1):
        server.state.staging.declare(stream, 2)
    server.state.apply_steps()
    assert server.state.staging.applied == 2
    server.close()
