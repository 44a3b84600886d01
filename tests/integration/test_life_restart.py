"""What a server logs besides pushes: loaded rows, removed rows, deltas. A random history runs
twice, once with kills between its events, and saves the same; damaged snapshots and keys are
handled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from random import seed as seed_python
from typing import Any

import numpy as np
import torch
from torch import nn

import trireme as tr
from tests.integration.durable_servers import DurableServers
from tests.integration.resumed_jobs import assert_same
from tests.integration.test_server_restart import TABLE, counts, push
from tests.long import pick
from tests.programs import Template
from tests.seeds import SEED
from trireme.job.cluster import Cluster

NUM_EVENTS = pick(short=16, long=60)
NUM_KEYS, BATCH, DAY_S = 500, 16, 86400
ALWAYS = ["train", "full", "train", "delta", "shrink", "import", "load", "train", "delta", "import"]
ALWAYS += ["train", "remove", "delta"]
POLICY = tr.policy.SparseAccessor(
    delete_threshold=0.3, delete_after_unseen_days=2, base_threshold=0.2, delta_threshold=0.1
)


class Model(nn.Module):
    """One table whose rows are judged, one whose keys wait for their row."""

    def __init__(self) -> None:
        super().__init__()
        scored = tr.Table("scored", dim=3, optimizer=tr.optim.Adagrad(lr=0.1), policy=POLICY)
        waiting = tr.Table(
            "waiting", dim=2, optimizer=tr.optim.Adam(lr=0.1), admit=tr.policy.CountFilter(2)
        )
        self.scored = tr.nn.EmbeddingBag(scored, features=["a"])
        self.waiting = tr.nn.EmbeddingBag(waiting, features=["b"])
        self.head = nn.Linear(5, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        rows = torch.cat([self.scored(batch).flatten(1), self.waiting(batch).flatten(1)], 1)
        out: torch.Tensor = self.head(rows)
        return out.squeeze(1)


def some_batches(seed: int) -> list[dict[str, torch.Tensor]]:
    rng = np.random.default_rng(seed)
    ids = {name: rng.zipf(1.3, (3, BATCH)) % NUM_KEYS for name in ("a", "b")}
    labels = rng.integers(0, 2, (3, BATCH)).astype(np.float32)
    columns = {**ids, "label": labels}
    return [{n: torch.from_numpy(v[i].copy()) for n, v in columns.items()} for i in range(3)]


def some_rows(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    keys = rng.choice(2 * NUM_KEYS, 40, replace=False)
    return {"key": keys, "weights": rng.normal(size=(40, 2)).astype(np.float32)}


def live(
    cluster: Cluster, events: list[str], folder: Path, behind: Callable[[], None]
) -> list[Path]:
    """What was saved. behind: called behind every event."""
    torch.manual_seed(3)
    model = Model()
    trainer = tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        loss=nn.functional.binary_cross_entropy_with_logits,
        strategy=tr.Strategy("sync"),
        progress=False,
        cluster=cluster,
    )
    # A save has their states. Only now: what torch imports when it is first used draws numbers.
    for seed in (torch.manual_seed, np.random.seed, seed_python):
        seed(3)
    saved: list[Path] = []
    full: list[Path] = []
    for number, event in enumerate(events):
        trainer.set_time((number + 1) * DAY_S // 2)
        if event == "train":
            trainer.fit(some_batches(number))
        elif event == "shrink":
            trainer.shrink()
        elif event == "import":
            tr.interchange.import_arrays(trainer, "waiting", some_rows(number))
        elif event == "remove":
            for table, feature in (("scored", "a"), ("waiting", "b")):
                tr.interchange.remove_rows(trainer, table, list(range(5)), feature=feature)
        elif event == "load":
            trainer.load(full[-1])
        else:
            path = folder / f"{number}-{event}"
            trainer.save(path, mode=event)
            saved.append(path)
            full += [path] if event == "full" else []
        behind()
    return saved


def test_a_random_history_saves_the_same_whenever_servers_are_killed(
    programs: Template, tmp_path: Path
) -> None:
    random = Random(f"{SEED} life")
    chosen = random.choices(ALWAYS, k=NUM_EVENTS - len(ALWAYS))
    events = [*ALWAYS, *chosen, "full"]
    print(f"seed {SEED}: {events}")
    saved: dict[str, list[Path]] = {}
    for name in ("alone", "killed"):
        root = tmp_path / name
        root.mkdir()
        with DurableServers(programs, 2, root) as servers:

            def kill(servers: DurableServers = servers, name: str = name) -> None:
                if name == "killed" and random.random() < 0.6:
                    server = random.randrange(2)
                    servers.kill(server)
                    servers.start(server)

            with servers.join(0, 1) as cluster:
                saved[name] = live(cluster, events, root, kill)
            print(f"{name}: {servers.num_kills} kills")
    for actual, expected in zip(saved["killed"], saved["alone"], strict=True):
        assert_same(actual, expected)


def test_a_damaged_snapshot_is_refused_and_named(programs: Template, tmp_path: Path) -> None:
    random = Random(f"{SEED} snapshot")
    with DurableServers(programs, 1, tmp_path, log_bytes=1 << 14) as servers:
        cluster = servers.join(0, 1)
        cluster.client.create_table(TABLE.schema)
        num_pushes, deadline = 0, time.monotonic() + 60
        while not list(servers.state_dir(0).glob("snapshot-*")):
            assert time.monotonic() < deadline, "expected a snapshot"
            num_pushes += 1
            push(cluster, num_pushes)
        servers.kill(0)
        newest = max(servers.state_dir(0).glob("snapshot-*"))
        damaged = random.choice([path for path in sorted(newest.rglob("*")) if path.is_file()])
        content = bytearray(damaged.read_bytes())
        place = random.randrange(len(content))
        print(f"seed {SEED}: byte {place} of {damaged.name}")
        content[place] ^= 0xFF
        damaged.write_bytes(content)
        program = servers.launch(0)
        line = program.wait_line("^trireme server: error: ")
        assert damaged.name in line.string
        assert program.finish() == 2
        content[place] ^= 0xFF
        damaged.write_bytes(content)
        servers.start(0)
        assert counts(cluster).sum() == num_pushes * 60
        cluster.abandon()


def test_a_server_with_keys_is_known_again(programs: Template, tmp_path: Path) -> None:
    num_pushes = 20
    with (
        DurableServers(programs, 1, tmp_path, keys=True) as servers,
        servers.join(0, 1) as cluster,
    ):
        cluster.client.create_table(TABLE.schema)
        for sequence in range(1, num_pushes + 1):
            push(cluster, sequence)
            if sequence % 10 == 0:
                servers.kill(0)
                servers.start(0)
        assert counts(cluster).sum() == num_pushes * 60
