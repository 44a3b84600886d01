"""Compares what a job should have computed with what its last checkpoint holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from tests.chaos.script import Options, examples, make_model, make_trainer
from tests.integration.resumed_jobs import contents
from trireme import _core
from trireme.job.embedded import embedded
from trireme.table import RowClassId


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Updates of each key, and of the dense parameter."""

    keys: Counter[int]
    pushes: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """lost, twice: updates that are missing, and that are there too often. differing: files of the
    checkpoint that are others than those of the undisturbed run.
    """

    lost: int = 0
    twice: int = 0
    differing: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        return self == RIGHT


RIGHT = Verdict()


def judge(
    options: Options, undisturbed: Path | None = None, earlier: Options | None = None
) -> Verdict:
    """Compares the last checkpoint, and the deltas, with what was trained on here and by the job
    before, and the last checkpoint with that of a run in peace.
    """
    folder, wanted = Path(options.folder), expected(options)
    last = folder / "last"
    checked = [[last]]
    if earlier is not None:
        before = expected(earlier)
        wanted = Counts(keys=wanted.keys + before.keys, pushes=wanted.pushes + before.pushes)
        deltas = [folder / f"delta-{epoch}" for epoch in range(options.num_epochs)]
        checked.append([Path(options.loads), *deltas])
    lost = twice = 0
    for actual in (saved(paths, options) for paths in checked):
        missing, surplus = wanted.keys - actual.keys, actual.keys - wanted.keys
        lost += missing.total() + max(0, wanted.pushes - actual.pushes)
        twice += surplus.total() + max(0, actual.pushes - wanted.pushes)
    others = () if undisturbed is None else tuple(differing(last, undisturbed))
    return Verdict(lost=lost, twice=twice, differing=others)


def expected(options: Options) -> Counts:
    keys = Counter[int]()
    pushes = 0
    workers = range(len(options.lengths))
    for epoch in range(options.first_epoch, options.first_epoch + options.num_epochs):
        streams = [list(_keys_of_batches(options, worker, epoch)) for worker in workers]
        if options.mode == "sync":  # a rule is applied once per step
            updates: Iterable[set[int]] = (set[int]().union(*step) for step in _steps(streams))
        else:
            updates = (batch for stream in streams for batch in stream)
        for update in updates:
            keys.update(update)
        longest, total = max(options.lengths), sum(options.lengths)
        pushes += longest if options.mode in ("sync", "hybrid") else total
    return Counts(keys=keys, pushes=pushes)


def _steps(streams: list[list[set[int]]]) -> Iterator[list[set[int]]]:
    for step in range(max(map(len, streams))):
        yield [stream[step] for stream in streams if step < len(stream)]


def _keys_of_batches(options: Options, worker: int, epoch: int) -> Iterator[set[int]]:
    columns = examples(options, worker, epoch)
    for start in range(0, len(columns["label"]), options.batch):
        batch = slice(start, start + options.batch)
        yield set(columns["a"][batch].tolist()) | set(columns["b"][batch].tolist())


def saved(paths: Sequence[Path], options: Options) -> Counts:
    """What a checkpoint of the script counts, with deltas on top of it. Raises ValueError for what
    is no count.
    """
    with embedded(threads=1, devices={"gpu": "cpu"}) as cluster:
        model = make_model(options)
        trainer = make_trainer("async", model, cluster)
        for path in paths:
            trainer.load(path)
        keys = _core.unique(np.arange(options.num_keys, dtype=np.uint64), cluster.pool)[0]
        rows = (
            cluster.client.pull({RowClassId("counted"): keys})
            .rows[RowClassId("counted")]
            .numpy()[:, 0]
        )
        *_, parameter = model.parameters()
        pushes = parameter.item()
    if not (np.array_equal(rows, rows.round()) and abs(pushes - round(pushes)) < 0.01):
        raise ValueError(f"judge: expected whole numbers, found {pushes} and {rows}")
    by_key = dict(zip(keys.tolist(), rows.astype(int).tolist(), strict=True))
    return Counts(keys=Counter(by_key), pushes=round(pushes))


def differing(actual: Path, expected: Path) -> list[str]:
    """Files of one checkpoint that say something else than those of the other: all but the number
    of the save that a row has changed before, since one that was cut off counts, and the order of
    rows, for those on SSD are saved after the others.
    """
    ours, right = contents(actual), contents(expected)
    return sorted(
        name
        for name in ours.keys() | right.keys()
        if _content(name, ours.get(name)) != _content(name, right.get(name))
    )


def _content(name: str, content: bytes | None) -> object:
    if content is None or not name.endswith(".arrow") or "buckets" in name:
        return content
    return pa.ipc.open_file(content).read_all().drop_columns("version").sort_by("key")
