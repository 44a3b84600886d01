"""Checkpoints and exported folders on a simulated disk: a finished one survives kills at any
moment, power losses and failed syncs, and what is there under its name is whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

import trireme as tr
from tests.long import pick
from tests.property.simulated_disk import Disk
from tests.seeds import SEED
from tests.tables import T_ROWS
from trireme.checkpoint.format.manifest import MANIFEST, read_manifest
from trireme.checkpoint.worker_side.publication import remove_abandoned
from trireme.checkpoint.worker_side.save import finish_save, save_checkpoint
from trireme.checkpoint.worker_side.verify import verify_checkpoint
from trireme.errors import BadRequest, ResourceExhausted
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.optim import values_of_group
from trireme.storage.atomic_folder import new_folder
from trireme.storage.local import LocalStorage
from trireme.worker.gradients import PushHeader, TableGradient

TABLE = tr.Table("t", dim=2, optimizer=tr.optim.SGD(lr=1.0), seed=1)
DISK_ERRORS = (BadRequest, ResourceExhausted)
PARTS = ("rows", "text/words")
"""Of an exported folder."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with embedded(threads=1) as cluster:
        cluster.client.create_table(TABLE.schema)
        keys = np.arange(50, dtype=np.uint64)
        gradient = TableGradient(
            keys, torch.ones(50, 2), values_of_group(TABLE.optimizer.group(), 1)
        )
        cluster.client.push(PushHeader(1, 0, [], 50, (1,)), {T_ROWS: gradient})
        yield cluster


class Promises:
    """What a writer was told to be there, by name, over all of its lives.

    replaced: names that may be gone if another one is there: a save was cut off while it removed
        what it need not keep.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: set[str] = set()
        self.replaced: dict[str, str] = {}
        self.last = 0

    def whole(self) -> list[str]:
        """Names of what is there, the oldest first. All of it must be whole."""
        if not self.folder.exists():
            return []
        names = [path.name for path in self.folder.iterdir() if not path.name.startswith(".")]
        for name in names:
            if name.startswith("export"):
                assert all((self.folder / name / part).read_text() == name for part in PARTS)
            else:
                manifest, problems = verify_checkpoint(LocalStorage(self.folder / name))
                assert not problems, problems
                assert manifest is not None
                assert manifest.extra["name"] == name
        return sorted(names, key=lambda name: int(name.rpartition("-")[2]))

    def check(self) -> None:
        names = {*self.whole()}
        for name in self.names - names:
            while name not in names:
                assert name in self.replaced, f"{name} is gone, found {sorted(names)}"
                name = self.replaced[name]
        self.names &= names


def save(cluster: Cluster, promises: Promises, random: Random) -> None:
    promises.last += 1
    name, keep = f"save-{promises.last}", random.choice((None, 1, 2))
    expected = [old for old in promises.whole() if old.startswith("save")]
    removed = set(expected[: len(expected) + 1 - keep] if keep else ())
    promises.replaced.update(dict.fromkeys(removed, name))
    save_checkpoint(
        cluster.client,
        promises.folder / name,
        extra={"name": name},
        tensors={"number": torch.tensor(promises.last)},
        keep=keep,
    )
    promises.names = promises.names - removed | {name}


def finish(cluster: Cluster, promises: Promises) -> None:
    """The successor of a killed writer finds its checkpoint."""
    name = f"save-{promises.last}"
    path = promises.folder / name
    if (path / MANIFEST).exists():
        finish_save(cluster.client, path, read_manifest(LocalStorage(path)))
        promises.names.add(name)


def export(promises: Promises) -> None:
    promises.last += 1
    name = f"export-{promises.last}"
    with new_folder(promises.folder / name) as folder:
        for part in PARTS:
            (Path(folder) / part).parent.mkdir(exist_ok=True)
            (Path(folder) / part).write_text(name)
    promises.names.add(name)


def run(disk: Disk, random: Random, cluster: Cluster) -> None:
    """A history of some writers; the last has no faults, and writes what it wants to."""
    promises = Promises(disk.folder / "job" / "checkpoints")
    for has_faults in [True] * random.randint(1, 5) + [False]:
        disk.restart()
        if has_faults and random.random() < 0.5:
            disk.dies_in = random.randint(1, 100)
        elif has_faults and random.random() < 0.7:
            disk.renames_left = random.randint(1, 4)
        if has_faults and random.random() < 0.2:
            disk.fails_in = random.randint(1, 30)
        actions = [lambda: finish(cluster, promises)]
        for _ in range(random.randint(0, 4)):
            actions += random.choices(
                [
                    lambda: save(cluster, promises, random),
                    lambda: export(promises),
                    lambda: remove_abandoned(LocalStorage(promises.folder / "any")),
                ],
                [7, 2, 1],
            )
        for act in actions:
            with contextlib.suppress(*(DISK_ERRORS if has_faults else ())):
                act()
        disk.kill()
        if random.random() < 0.6:
            disk.lose_power()
        promises.check()


@pytest.mark.parametrize("part", pick(short=[0], long=list(range(25))))
def test_a_finished_folder_survives_and_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int, cluster: Cluster
) -> None:
    num_histories = pick(short=15, long=100)
    for number in range(part * num_histories, (part + 1) * num_histories):
        random = Random(f"{SEED} {number}")
        print(f"seed {SEED}: history {number}")
        (folder := tmp_path / str(number)).mkdir()
        with monkeypatch.context() as patch:
            disk = Disk(folder, random, patch)
            run(disk, random, cluster)
            disk.close()
