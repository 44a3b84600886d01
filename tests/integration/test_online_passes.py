"""`train_passes` in one process: data of any form, and what follows a run by its done-files."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import trireme as tr
from tests.jobs import Job
from tests.repo import tree
from trireme.checkpoint.format.manifest import MANIFEST
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.train.online import publishing
from trireme.train.online.donefiles import BASES, DELTAS, DoneFiles
from trireme.train.online.publishing import Publisher

COLUMNS = {"item": torch.arange(8), "label": torch.ones(8)}
BATCHES = [COLUMNS, {**COLUMNS, "item": torch.arange(8, 16)}]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rows = tr.Table("items", dim=2, optimizer=tr.optim.SGD(lr=0.1))
        self.rows = tr.nn.EmbeddingBag(rows, features=["item"])
        self.top = nn.Linear(2, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        output: torch.Tensor = self.top(self.rows(batch).flatten(1)).squeeze(1)
        return output


def trainer_for(cluster: Cluster) -> tr.Trainer:
    model, loss = Model(), nn.functional.binary_cross_entropy_with_logits
    rule = torch.optim.SGD(model.parameters(), 0.1)
    return tr.Trainer(model, rule, loss=loss, progress=False, cluster=cluster)


def run(
    passes: list[tr.Pass], folder: Path, *, keep: int | None = None, **options: Any
) -> list[Any]:
    """Reports of a run that publishes after each pass, and checkpoints after every second."""
    torch.manual_seed(0)
    settings = tr.Publishing(
        path=str(folder),
        save_delta_frequency=1,
        checkpoint_per_pass=2,
        save_first_base=True,
        keep=keep,
    )
    with embedded() as cluster:
        return list(tr.train_passes(trainer_for(cluster), passes, publishing=settings, **options))


def passes(*numbers: int, day: str = "20190720", last: int = 0) -> list[tr.Pass]:
    return [
        tr.Pass(day=day, number=number, open=lambda: BATCHES, ends_day=number == last)
        for number in numbers
    ]


@pytest.mark.parametrize(
    ("data", "num"),
    [
        (lambda: BATCHES, 16),
        (lambda: COLUMNS, 8),
        (lambda: pd.DataFrame({name: some.numpy() for name, some in COLUMNS.items()}), 8),
        (lambda: tr.data.ArrayDataset(COLUMNS, batch_size=4), 8),
    ],
    ids=["batches", "columns", "frame", "array dataset"],
)
def test_a_pass_may_have_data_of_each_form(
    data: Callable[[], Any], num: int, tmp_path: Path
) -> None:
    this = tr.Pass(day="20190720", number=1, open=data, ends_day=True)
    [report] = run([this], tmp_path)
    assert report.evaluated["examples"] == report.trained["examples"] == num
    assert len(report.written) == 4


@pytest.mark.parametrize("day", ["2019721", "20190732", "", 20190720, " 2019072"])
def test_a_day_that_no_done_file_takes_is_refused(day: Any) -> None:
    with pytest.raises(BadRequest, match="expected a day as yyyymmdd, found"):
        tr.Pass(day=day, number=1, open=lambda: BATCHES)


def test_batches_that_come_once_are_all_trained_on_and_not_evaluated(tmp_path: Path) -> None:
    def generator() -> Iterator[Any]:
        yield from BATCHES

    this = tr.Pass(day="20190720", number=1, open=generator)
    with pytest.raises(BadRequest, match=r"20190720/1: expected data that can be read twice"):
        run([this], tmp_path / "evaluated")
    [report] = run([this], tmp_path / "trained", evaluate=False)
    assert report.trained["examples"] == 16


def test_exports_have_ids_of_their_own_though_the_clock_stands_or_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([1000, 1000, 1000, 1000, 10, 10, 2000, 2000, 2000])
    monkeypatch.setattr(publishing, "_now", lambda: next(clock))
    run([*passes(1, last=1), *passes(1, day="20190721", last=1)], tmp_path)
    done = DoneFiles(str(tmp_path))
    bases, deltas = done.exports(BASES), done.exports(DELTAS)
    assert [base.id for base in bases] == [1000, 1002, 1004]
    assert [(delta.id, delta.key) for delta in deltas] == [(1001, 1000), (1003, 1002)]


def test_a_base_without_an_example_is_said_and_comes_with_the_next_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that was killed before the end of a day goes on with a pass that has no data."""
    day = [*passes(1), tr.Pass(day="20190720", number=2, open=lambda: None, ends_day=True)]

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Publisher, "after_day", killed)
        with pytest.raises(Killed):
            run(day, tmp_path)
    run([*day, *passes(1, 2, day="20190721")], tmp_path)
    assert "no 20190721/base is written: worker 0 has had no data" in caplog.text
    done = DoneFiles(str(tmp_path))
    names = [Path(one.path).name for list in (BASES, DELTAS) for one in done.exports(list)]
    assert names == ["base", "base-1", "delta-1", "delta-2", "delta-2"]


def test_a_first_base_waits_for_the_data_of_worker_0(tmp_path: Path) -> None:
    settings = tr.Publishing(path=str(tmp_path), save_first_base=True, save_delta_frequency=1)

    schema = tr.data.multislot([tr.data.Label("label"), tr.data.Sparse("item")])
    (tmp_path / "part").write_text("1 1 1 7\n")

    def opened(worker: int, number: int) -> Any:
        if worker == 0 and number == 1:
            return None
        return tr.data.QueueDataset(
            str(tmp_path / "part"), schema=schema, batch_size=1, own_files=True
        )

    def work(cluster: Cluster) -> list[Any]:
        both = [
            tr.Pass(day="20190720", number=number, open=partial(opened, cluster.worker, number))
            for number in (1, 2)
        ]
        reports = tr.train_passes(trainer_for(cluster), both, publishing=settings)
        return [[Path(path).name for path in report.written] for report in reports]

    with Job(1) as job:
        assert job.run(2, work) == 2 * [[[], ["base-2"]]]


class Killed(BaseException):
    """Raised where a process is killed."""


def test_the_follower_of_the_page_follows_a_run_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (tree.ROOT / "docs" / "online.md").read_text()
    script = re.search(r"```python\n(# follow\.py.*?)\nfollower = ", page, re.DOTALL)
    assert script
    monkeypatch.setattr(sys, "argv", ["follow.py", str(tmp_path)])
    (tmp_path / "follow.py").write_text(script[1])
    follower = runpy.run_path(str(tmp_path / "follow.py"))["Follower"]()
    export = Publisher._export

    def run_until(last: str) -> list[str]:
        """What the follower has then."""

        def exported(self: Publisher, listed_in: str, name: str, figures: Any) -> list[str]:
            written = export(self, listed_in, name, figures)
            if name == last:
                raise Killed
            return written

        with monkeypatch.context() as patch:
            patch.setattr(Publisher, "_export", exported)
            with pytest.raises(Killed):
                run(passes(1, 2, 3, 4, last=4), tmp_path)
        follower.update()
        return [one["input"].removeprefix(f"{tmp_path}/20190") for one in follower.followed]

    upto = ["720/base", "720/delta-1", "720/delta-2", "720/delta-3"]
    assert run_until("20190720/delta-3") == upto
    assert run_until("20190720/delta-3") == upto  # another of the same path
    assert run_until("20190720/delta-4") == [*upto, "720/delta-4"]
    assert run_until("20190721/base") == ["721/base"]


@pytest.mark.parametrize("when", ["dropped", "half removed"])
def test_a_checkpoint_that_a_killed_run_has_dropped_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def killed(location: str, options: Any) -> bool:
        if when == "half removed":
            (Path(location) / MANIFEST).unlink(missing_ok=True)
        if Path(location).is_dir():
            raise Killed
        return False

    with monkeypatch.context() as patch:
        patch.setattr(publishing, "remove_folder", killed)
        with pytest.raises(Killed):
            run(passes(1, 2, 3, 4), tmp_path, keep=1)
    assert {path.name for path in tmp_path.glob("*/[0-9]")} == {"2", "4"}
    run(passes(1, 2, 3, 4, 5), tmp_path)
    assert {path.name for path in tmp_path.glob("*/[0-9]")} == {"2", "4"}  # all are kept
    run(passes(1, 2, 3, 4, 5, 6), tmp_path, keep=2)
    assert {path.name for path in tmp_path.glob("*/[0-9]")} == {"4", "6"}
