"""Checkpoints during fit, and how another run resumes from them: every kind of data, damaged files,
and async.
"""

from __future__ import annotations

import itertools
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import trireme as tr
from tests.integration import resumed_script
from tests.integration.resumed_script import BATCH, NUM_BATCHES, array_dataset, columns
from tests.jobs import Job
from tests.tables import T_ROWS
from trireme import _core
from trireme.errors import BadRequest, Corruption, ResourceExhausted
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.threads import torch_threads

LAST = 2 * NUM_BATCHES


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here outlives the machine: to wait for the disk would take most of the time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Stopped(Exception):
    """The run ends here."""


class Model(resumed_script.Model):
    """Ends the run when it has begun so many steps."""

    stop_at: int | None = None

    def forward(self, batch: Any) -> torch.Tensor:
        if self.num_steps == self.stop_at:
            raise Stopped
        return super().forward(batch)


def run(
    path: Path, dataset: Any, *, stop_at: int | None = None, mode: str = "sync", **options: Any
) -> dict[str, Any]:
    """Two epochs with checkpoints, or until they end before; returns what is then in the tables and
    the model, and the figures.
    """
    torch.manual_seed(11)
    with torch_threads(1), embedded(threads=1) as cluster:
        model = Model()
        model.stop_at = stop_at
        trainer = resumed_script.make_trainer(mode, model, cluster=cluster)
        checkpoints = tr.Checkpoints(path, **{"every_steps": 13, **options})
        try:
            figures = trainer.fit(dataset, epochs=2, checkpoints=checkpoints, resume=True)
        except Stopped:
            cluster.abandon()
            return {}
        keys = _core.unique(np.arange(resumed_script.NUM_KEYS, dtype=np.uint64), cluster.pool)[0]
        rows = cluster.client.pull({T_ROWS: keys}).rows[T_ROWS].numpy()
        model = {name: t.detach().numpy().copy() for name, t in trainer.model.named_parameters()}
        model |= {name: t.numpy().copy() for name, t in trainer.model.named_buffers()}
        random = {"torch": torch.rand(3).numpy()}
        about = {"figures": figures, "steps": trainer.model.num_steps}
        return {"rows": rows, **model, **random, **about}


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name in actual.keys() - {"figures", "steps"}:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)


# ---- kinds of data ----


class Positionless:
    """Streams that cannot seek."""

    def stream(self, index: int, num_streams: int, *, epoch: int) -> Iterator[dict[str, Any]]:
        for batch in array_dataset(NUM_BATCHES).stream(index, num_streams, epoch=epoch):
            yield {name: batch[name] for name in batch}


def examples() -> list[dict[str, Any]]:
    values = columns(NUM_BATCHES * BATCH)
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def csv_file(folder: Path) -> tuple[Path, tr.data.Schema]:
    lines = [",".join(str(value) for value in row.values()) for row in examples()]
    (folder / "data.csv").write_text("a,b,label\n" + "\n".join(lines))
    return folder / "data.csv", tr.data.csv(resumed_script.SCHEMA.fields)


def queue(folder: Path) -> Any:
    path, schema = csv_file(folder)
    return tr.data.QueueDataset(path, schema=schema, batch_size=BATCH)


def in_memory(folder: Path) -> Any:
    path, schema = csv_file(folder)
    dataset = tr.data.InMemoryDataset(path, schema=schema, batch_size=BATCH, seed=3)
    dataset.load_into_memory(is_shuffle=True)
    return dataset


DATA: dict[str, Callable[[Path], Any]] = {
    "array": lambda _: array_dataset(NUM_BATCHES),
    "queue": queue,
    "in memory": in_memory,
    "streams that cannot seek": lambda _: Positionless(),
    "list": lambda _: list(array_dataset(NUM_BATCHES)),
    "loader": lambda _: DataLoader(
        examples(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "loader in torch's own order": lambda _: DataLoader(examples(), BATCH, shuffle=True),
}


@pytest.mark.parametrize("kind", DATA)
def test_a_run_resumes_after_the_last_batch(kind: str, tmp_path: Path) -> None:
    make = lambda: DATA[kind](tmp_path)  # noqa: E731 anew in every run, as a script does
    whole = run(tmp_path / "whole", make())
    assert whole["steps"] == LAST
    for stop_at, behind in ((16, 13), (20, 13), (30, 26)) if kind == "array" else ((30, 26),):
        path = tmp_path / str(stop_at)
        assert run(path, make(), stop_at=stop_at) == {}
        rest = run(path, make())
        assert rest["steps"] == LAST - behind
        assert_same(rest, whole)


# ---- what is wrong ----


def damaged_run(path: Path) -> list[Path]:
    """A run that ended in its second epoch, with two checkpoints; the older one first."""
    assert run(path, array_dataset(NUM_BATCHES), stop_at=30) == {}
    folders = [path / "1", path / "2"]
    assert sorted(path.iterdir()) == folders
    return folders


def truncate(folder: Path) -> None:
    file = next(folder.rglob("*.arrow"))
    file.write_bytes(file.read_bytes()[:-9])


def flip(folder: Path) -> None:
    file = folder / "worker.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated rows": truncate,
    "a flipped bit": flip,
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "half a manifest": lambda folder: (folder / "manifest.json").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_reported_and_passed_over(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(tmp_path / "whole", array_dataset(NUM_BATCHES))
    folders = damaged_run(tmp_path / "damaged")
    DAMAGE[damage](folders[-1])
    rest = run(tmp_path / "damaged", array_dataset(NUM_BATCHES))
    assert rest["steps"] == LAST - 13
    assert_same(rest, whole)
    [warning] = [r.getMessage() for r in caplog.records if "passing over" in r.getMessage()]
    assert str(folders[-1]) in warning
    assert (tmp_path / "damaged" / "5").is_dir()  # the number of the damaged one is not used again


def test_data_that_is_cut_into_other_batches_is_refused(tmp_path: Path) -> None:
    damaged_run(tmp_path)
    other = array_dataset(NUM_BATCHES)
    other.batch_size -= 1
    with pytest.raises(BadRequest, match="expected the data within an epoch") as refused:
        run(tmp_path, other)
    assert f"{array_dataset(NUM_BATCHES).cut}, found {other.cut}:" in str(refused.value)
    run(tmp_path, array_dataset(NUM_BATCHES))


def test_files_that_have_grown_within_an_epoch_are_refused(tmp_path: Path) -> None:
    """Streams divide their bytes: what one of them has read may be in another's share."""
    path, schema = csv_file(tmp_path)
    text = path.read_text()

    def train(stop_at: int | None) -> dict[str, Any]:
        data = tr.data.QueueDataset(path, schema=schema, batch_size=BATCH)
        return run(tmp_path / "saved", data, stop_at=stop_at)

    train(stop_at=16)
    path.write_text(text + "\n1,2,1.0\n")
    was = f"data.csv of {len(text)} bytes .*, found data.csv of {len(text) + 9} bytes"
    with pytest.raises(BadRequest, match=was):
        train(stop_at=None)
    path.write_text(text)
    assert train(stop_at=None)["steps"] == LAST - 13


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    for folder in damaged_run(tmp_path):
        truncate(folder)
    with pytest.raises(Corruption, match="expected a whole checkpoint, found 2 damaged ones"):
        run(tmp_path, array_dataset(NUM_BATCHES))


def test_a_run_that_is_over_trains_no_more(tmp_path: Path) -> None:
    first = run(tmp_path, array_dataset(NUM_BATCHES))
    again = run(tmp_path, array_dataset(NUM_BATCHES))
    assert again["steps"] == 0
    assert again["figures"] == first["figures"]
    assert_same(again, first)


def test_a_checkpoint_in_place_of_the_folder_of_checkpoints_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "ckpt", array_dataset(NUM_BATCHES), stop_at=15)
    (tmp_path / "file").write_text("")
    match = r"expected a folder of them, found one in .*ckpt/1: name the folder in which it lies"
    with pytest.raises(BadRequest, match=match):
        run(tmp_path / "ckpt/1", array_dataset(NUM_BATCHES))
    with pytest.raises(BadRequest, match=r"cannot look for .*file: Not a directory"):
        run(tmp_path / "file", array_dataset(NUM_BATCHES))


@pytest.mark.parametrize(("keep", "left"), [(1, ["4"]), (2, ["3", "4"]), (None, list("1234"))])
def test_the_newest_ones_are_kept(tmp_path: Path, keep: int | None, left: list[str]) -> None:
    run(tmp_path, array_dataset(NUM_BATCHES), keep=keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_another_number_of_workers_is_refused_with_both(tmp_path: Path) -> None:
    damaged_run(tmp_path)

    def work(cluster: Cluster) -> None:
        trainer = resumed_script.make_trainer("sync", Model(), cluster=cluster)
        with pytest.raises(
            BadRequest, match=r"expected 1 workers, as in the job that saved .*2, found 2"
        ):
            trainer.resume(tmp_path)
        trainer.load(tmp_path / "2")
        assert trainer.num_epochs == 1

    with Job(1) as job:
        job.run(2, work)


def test_contradictory_resume_options_are_refused(tmp_path: Path) -> None:
    with embedded(threads=1) as cluster:
        trainer = resumed_script.make_trainer("sync", Model(), cluster=cluster)
        checkpoints = tr.Checkpoints(tmp_path, every_steps=1)
        assert trainer.resume(tmp_path / "none") is None
        with pytest.raises(BadRequest, match="expected checkpoints with resume=True, found None"):
            trainer.fit(array_dataset(2), resume=True)
        trainer.fit(array_dataset(2), epochs=2, checkpoints=checkpoints)
        with pytest.raises(
            BadRequest, match=r"at the first fit .* found one that has made 4 steps"
        ):
            trainer.fit(array_dataset(2), checkpoints=checkpoints, resume=True)
    with embedded(threads=1) as cluster:
        trainer = resumed_script.make_trainer("sync", Model(), cluster=cluster)
        with pytest.raises(BadRequest, match=r"more epochs than .* which is 2, found epochs=1"):
            trainer.fit(array_dataset(2), epochs=1, checkpoints=checkpoints, resume=True)
    for wrong in ({}, {"every_s": 1, "every_steps": 1}, {"every_s": 0}, {"every_steps": 0},
                  {"every_s": 1, "keep": 0}):  # fmt: skip
        with pytest.raises(BadRequest, match="Checkpoints: expected"):
            tr.Checkpoints(tmp_path, **wrong)
    with pytest.raises(BadRequest, match=r"; every_s=600 saves every ten minutes"):
        tr.Checkpoints(tmp_path)


# ---- when ----


def test_sync_workers_of_unequal_streams_save_by_the_clock_at_one_step(tmp_path: Path) -> None:
    """Also when some have ended. At one step: every bucket has the same marks."""

    def work(cluster: Cluster) -> None:
        model = resumed_script.Model()
        trainer = resumed_script.make_trainer("sync", model, cluster=cluster)
        checkpoints = tr.Checkpoints(tmp_path, every_s=0.01, keep=None)
        trainer.fit(resumed_script.Unequal(), epochs=2, checkpoints=checkpoints)

    with Job(2) as job:
        job.run(3, work)
    actual = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert len(actual) > 2
    with Job(1) as job, job.join(0, 1) as cluster:
        trainer = resumed_script.make_trainer("sync", resumed_script.Model(), cluster=cluster)
        for path in actual:
            trainer.load(path)
            rows, marks = job.servers[0].state.tables["t"].rows, set()
            for bucket in range(4096):
                marks.add(tuple(sorted(dict(rows.snapshot(bucket).marks).items())))
            assert len(marks) == 1


class Endless:
    """Batches until the run ends."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self._before = before

    def stream(self, index: int, num_streams: int, *, epoch: int) -> Iterator[Any]:
        for number in itertools.count():
            self._before()
            yield from array_dataset(1, seed=number).stream(index, num_streams, epoch=epoch)


def assert_spared(folder: Path, *, mode: str) -> None:
    """The checkpoints there are whole, and there is nothing else."""
    names = [path.name for path in folder.iterdir()]
    assert all(name.isdecimal() for name in names)
    with embedded(threads=1) as cluster:
        trainer = resumed_script.make_trainer(mode, Model(), cluster=cluster)
        assert trainer.resume(folder) == str(folder / max(names, key=int))
        for name in names:
            trainer.load(folder / name)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_write_that_fails_ends_the_run_and_spares_what_was_saved(
    mode: str, tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fail_soon() -> None:
        if (tmp_path / "2" / "manifest.json").exists():
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))

    try:
        with pytest.raises(ResourceExhausted, match="File too large"):
            run(tmp_path, Endless(fail_soon), mode=mode, every_steps=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_spared(tmp_path, mode=mode)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_full_disk_ends_the_run_and_spares_what_was_saved(mode: str, small_disk: Path) -> None:
    with pytest.raises(ResourceExhausted, match="No space left on device"):
        run(small_disk, Endless(), mode=mode, every_steps=3, keep=None)
    assert_spared(small_disk, mode=mode)
