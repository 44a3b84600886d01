"""Folders of a store that appear complete or not at all; fsspec's memory stands for a store."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from trireme.checkpoint.worker_side.publication import open_draft
from trireme.errors import BadRequest
from trireme.storage.atomic_folder import new_folder
from trireme.storage.storage import open_storage

PLACE = "memory://exports/1"


@pytest.fixture
def store() -> Iterator[MemoryFileSystem]:
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/", recursive=True)


def names(store: MemoryFileSystem) -> list[str]:
    return [name.rpartition("/")[2] for name in store.find("/exports/1")]


WRITER = """
import os, sys
from trireme.storage.atomic_folder import new_folder
with new_folder(sys.argv[1]) as folder:
    open(f"{folder}/part", "w").close()
    if sys.argv[2] == "write":
        os.kill(os.getpid(), 9)
    os.fsync = lambda file: os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("killed_at", ["write", "sync"])
def test_the_folder_of_a_killed_writer_is_removed_by_the_next(
    tmp_path: Path, killed_at: str
) -> None:
    command = [sys.executable, "-c", WRITER, tmp_path / "killed", killed_at]
    writer = subprocess.run(command, check=False)
    assert writer.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    with new_folder(tmp_path / "1") as first, new_folder(tmp_path / "2") as second:
        assert {path.name for path in tmp_path.iterdir()} == {Path(first).name, Path(second).name}
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2"}
    assert list(tmp_path.glob("*/*")) == []


INTERRUPTED = """
import os, sys
from pathlib import Path
from trireme.storage.atomic_folder import new_folder

removals = []


def kill_at(event, arguments):
    if event == "os.remove":
        removals.append(arguments)
        if len(removals) == int(sys.argv[2]):
            os.kill(os.getpid(), 9)


with new_folder(sys.argv[1]) as folder:
    for name in "abc", "xyz":
        (Path(folder) / name).mkdir()
        (Path(folder) / name / "part").touch()
        (Path(folder) / f"{name}.json").touch()
    sys.addaudithook(kill_at)
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize("writes", [new_folder, lambda path: open_draft(open_storage(path, None))])
def test_nothing_is_left_if_ctrl_c_comes_with_the_marker_just_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: Callable[[Path], Any]
) -> None:
    lock = fcntl.flock

    def interrupted(file: int, how: int) -> None:
        lock(file, how)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", interrupted)
        with pytest.raises(KeyboardInterrupt), writes(tmp_path / "1"):
            pytest.fail("the marker is not locked")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("removals", range(1, 6))
def test_what_a_killed_removal_has_left_is_removed_by_the_next_writer(
    tmp_path: Path, removals: int
) -> None:
    """The file that tells so goes last."""
    command = [sys.executable, "-c", INTERRUPTED, tmp_path / "killed", str(removals)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    with new_folder(tmp_path / "1"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"1"}


def test_of_two_writers_of_one_folder_the_second_fails_and_removes_nothing(
    store: MemoryFileSystem,
) -> None:
    with new_folder(PLACE) as first:
        with pytest.raises(BadRequest), new_folder(PLACE):
            pytest.fail("the folder is being written")
        store.pipe_file(f"{first}/part", b"rows")
    assert names(store) == ["_SUCCESS", "part"]


def test_of_two_writers_that_both_found_nothing_the_second_fails(
    store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_folder(PLACE) as first:
        exists = MemoryFileSystem.exists
        monkeypatch.setattr(
            MemoryFileSystem,
            "exists",
            lambda self, path: path != "/exports/1" and exists(self, path),
        )
        with pytest.raises(BadRequest), new_folder(PLACE):
            pytest.fail("the folder is being written")
        store.pipe_file(f"{first}/part", b"rows")
    assert names(store) == ["_SUCCESS", "part"]


def test_a_folder_whose_removal_fails_has_no_mark_of_success(
    store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, remove = MemoryFileSystem.pipe_file, MemoryFileSystem.rm

    def write_without_answer(files: MemoryFileSystem, path: str, *rest: object, **how: str) -> None:
        write(files, path, *rest, **how)
        if path.endswith("_SUCCESS"):
            raise OSError("no answer")

    def remove_part(files: MemoryFileSystem, path: str, recursive: bool = False) -> None:
        if path.endswith("/1"):
            files.rm_file(f"{path}/part")
            raise OSError("no answer")
        remove(files, path, recursive=recursive)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", write_without_answer)
        patch.setattr(MemoryFileSystem, "rm", remove_part)
        with pytest.raises(BadRequest, match="no answer"), new_folder(PLACE) as folder:
            store.pipe_file(f"{folder}/part", b"rows")
    assert "_SUCCESS" not in names(store)
