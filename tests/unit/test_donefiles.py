"""Done-files: complete lines in Fleet's format, and errors about malformed lines."""

from __future__ import annotations

import json
import math
from pathlib import Path

import fsspec
import pytest

from trireme.errors import BadRequest, Corruption, ResourceExhausted
from trireme.train.online.donefiles import (
    BASES,
    CHECKPOINTS,
    DELTAS,
    STOPPED,
    DoneFiles,
    ListedCheckpoint,
    ListedExport,
    PassPoint,
    StopRecord,
)

NEWEST = ListedCheckpoint(PassPoint("20190721", 0), 7, "out/20190721/0")


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "out")
    fsspec.filesystem("memory").rm("/", recursive=True)
    return "memory://out"


def test_checkpoints_come_back_in_fleets_lines(folder: str) -> None:
    done = DoneFiles(folder)
    assert done.checkpoints() == []
    entries = [ListedCheckpoint(PassPoint("20190720", n), 5, f"out/20190720/{n}") for n in (6, 12)]
    for entry in [*entries, NEWEST]:
        assert done.add_checkpoint(entry) == []
    assert done.checkpoints() == [*entries, NEWEST]
    where, path = fsspec.core.url_to_fs(f"{folder}/{CHECKPOINTS}")
    assert where.cat_file(path).decode().splitlines() == [
        "20190720\t5\tout/20190720/6\t6\t0",
        "20190720\t5\tout/20190720/12\t12\t0",
        "20190721\t7\tout/20190721/0\t-1\t0",
    ]


def test_a_line_of_the_same_path_is_replaced_and_old_ones_go(folder: str) -> None:
    done = DoneFiles(folder)
    entries = [
        ListedCheckpoint(PassPoint("20190720", n), 5, f"out/20190720/{n}") for n in (1, 2, 3)
    ]
    for entry in entries:
        done.add_checkpoint(entry)
    again = ListedCheckpoint(PassPoint("20190720", 2), 6, "out/20190720/2")
    assert done.add_checkpoint(again) == []
    assert done.checkpoints() == [entries[0], entries[2], again]
    assert done.add_checkpoint(NEWEST, keep=2) == ["out/20190720/1", "out/20190720/3"]
    assert done.checkpoints() == [again, NEWEST]


def test_a_line_more_compares_no_line_with_all_others(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, num = DoneFiles(folder), 200
    line = "20190720\t5\tout/20190720/{0}\t{0}\t0"
    done._write(CHECKPOINTS, [line.format(number) for number in range(1, num + 1)])
    compared = []

    def equal(one: ListedCheckpoint, other: object) -> bool:
        compared.append(one)
        return one is other

    monkeypatch.setattr(ListedCheckpoint, "__eq__", equal)
    assert done.add_checkpoint(NEWEST) == []
    again = ListedCheckpoint(PassPoint("20190721", 1), 7, "out/20190721/1")
    assert len(done.add_checkpoint(again, keep=2)) == num
    assert len(compared) <= 2 * num


def test_a_stop_is_listed_until_there_is_a_checkpoint(folder: str) -> None:
    done = DoneFiles(folder)
    assert done.stopped() is None
    done.set_stopped(None)
    point, path = PassPoint("20190720", 6), "out/stopped/1"
    between = StopRecord(point, None, 7, None, path)
    figures = {"loss": 0.5, "auc": 0.75}
    within = StopRecord(point, PassPoint("20190720", 7), 7, "out/20190720/delta-6", path, figures)
    for at in (between, within):
        done.set_stopped(at)
        assert done.stopped() == at
    done.set_stopped(StopRecord(point, None, 7, None, path, {"auc": math.nan}))
    job = done.stopped()
    assert job is not None
    assert math.isnan(job.evaluated["auc"])
    done.set_stopped(None)
    assert done.stopped() is None
    where, name = fsspec.core.url_to_fs(f"{folder}/{STOPPED}")
    where.pipe_file(name, b'{"day": 1}')
    with pytest.raises(Corruption, match=f"{STOPPED}:1: expected JSON with day, pass, within"):
        done.stopped()


def test_exports_are_json_lines(folder: str) -> None:
    done = DoneFiles(folder)
    base, delta = (
        ListedExport(9, 9, "out/20190721/base"),
        ListedExport(11, 9, "out/\u00e9/d", "auc:0.7"),
    )
    done.add_export(BASES, base)
    done.add_export(DELTAS, delta)
    done.add_export(DELTAS, delta)
    assert done.exports(BASES) == [base]
    assert done.exports(DELTAS) == [delta]
    where, path = fsspec.core.url_to_fs(f"{folder}/{BASES}")
    assert json.loads(where.cat_file(path)) == {
        "id": "9", "key": "9", "input": "out/20190721/base", "monitor_data": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (CHECKPOINTS, "20190720\t5\tx\t1\n", r"donefile\.txt:1: expected day, key, path"),
        (CHECKPOINTS, "20190720\t5\tx\t1\t0\n2019", r"donefile\.txt:2: .* found '2019'"),
        (BASES, "{}\n", r"base_donefile\.txt:1: expected JSON with id, key and input"),
        (DELTAS, "[1]", r"patch_donefile\.txt:1: .* found '\[1\]'"),
        (DELTAS, '{"id": "x", "key": "1", "input": "p"}', r"patch_donefile\.txt:1"),
    ],
)
def test_a_broken_line_is_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    done = DoneFiles(str(tmp_path))
    with pytest.raises(Corruption, match=message):
        done.checkpoints() if name == CHECKPOINTS else done.exports(name)


def test_a_path_may_have_any_separator_of_lines_but_a_newline(folder: str) -> None:
    done = DoneFiles(folder)
    entry = ListedCheckpoint(PassPoint("20190720", 1), 5, "out/a\u2028b\x85c\x0cd/1")
    done.add_checkpoint(entry)
    assert done.checkpoints() == [entry]


def test_a_list_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    done = DoneFiles(str(tmp_path))
    (tmp_path / BASES).write_bytes(b"{}\n\n{\xff}\n")
    with pytest.raises(
        Corruption, match=r"base_donefile\.txt: expected UTF-8, found .* 0xff in position 5"
    ):
        done.exports(BASES)
    (tmp_path / DELTAS).mkdir()
    with pytest.raises(BadRequest, match=r"patch_donefile\.txt: Is a directory"):
        done.exports(DELTAS)


def test_a_full_disk_leaves_the_old_lines(tmp_path: Path) -> None:
    done = DoneFiles(str(tmp_path))
    done.add_checkpoint(NEWEST)
    (tmp_path / f".{CHECKPOINTS}").symlink_to("/dev/full")
    with pytest.raises(ResourceExhausted, match=r"cannot write .*donefile\.txt: No space left"):
        done.add_checkpoint(ListedCheckpoint(PassPoint("20190722", 0), 8, "x"))
    assert done.checkpoints() == [NEWEST]
