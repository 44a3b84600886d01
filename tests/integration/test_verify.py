"""`trireme verify`: confirms intact checkpoints and names what is damaged."""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_checkpoint import batches, make_trainer
from tests.jobs import Job
from trireme.commands import cli
from trireme.inference.export import export_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a checkpoint, a delta a folder down, and an export."""
    folder = tmp_path_factory.mktemp("saved")
    with Job(1) as running, running.join(0, 1) as cluster:
        trainer = make_trainer(cluster)
        trainer.fit(batches(3))
        trainer.save(folder / "full")
        trainer.fit(batches(1, 9))
        trainer.save(folder / "day" / "delta", mode="delta")
        export_model(trainer, folder / "export", batch=batches(1)[0])
    return folder


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def test_intact_checkpoints_are_reported_as_intact(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", str(saved)]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.partition(": ")[0] for line in lines]
    assert names == [str(saved / name) for name in ("day/delta", "export", "full")]
    assert all(": complete: " in line for line in lines)
    assert "delta" in lines[0]
    assert cli.main(["verify", "--quiet", str(saved / "full"), str(saved / "export")]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["full", "day/delta", "export"])
def test_each_damaged_file_is_named_once(
    saved: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in files_of(saved / name):
        for damage in ("cut", "flip", "remove"):
            copy = tmp_path / "c"
            shutil.copytree(saved / name, copy)
            damaged = copy / file.relative_to(saved / name)
            content = bytearray(file.read_bytes())
            if damage == "flip":
                content[len(content) // 2] ^= 1
            if damage == "remove":
                damaged.unlink()
            else:
                damaged.write_bytes(content[:-1] if damage == "cut" else content)
            is_gone = damage == "remove" and file.name == "manifest.json"
            assert cli.main(["verify", "--quiet", str(copy)]) == (2 if is_gone else 1)
            captured = capsys.readouterr()
            text = captured.err if is_gone else captured.out
            assert str(copy if is_gone else damaged.relative_to(copy)) in text, (file, damage)
            assert len(text.splitlines()) == 1, text
            shutil.rmtree(copy)


class Unreadable(io.BytesIO):
    """A file that the disk cannot read."""

    def read(self, *_: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    readinto = readline = readall = read  # type: ignore[assignment]


@pytest.mark.parametrize("name", ["full", "export"])
def test_a_file_that_the_disk_cannot_read_is_named_like_a_damaged_one(
    saved: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = io.open
    for victim in files_of(saved / name):

        def open_file(path: Any, *args: Any, victim: Path = victim, **options: Any) -> Any:
            return Unreadable() if path == victim else real(path, *args, **options)

        with monkeypatch.context() as broken:
            broken.setattr(io, "open", open_file)
            assert cli.main(["verify", "--quiet", str(saved / name)]) == 1
        [line] = capsys.readouterr().out.splitlines()
        assert str(victim) in line
        assert "Input/output error" in line


def test_all_that_is_damaged_is_named(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved, tmp_path / "c")
    damaged = [
        file
        for name in ("full", "export")
        for file in files_of(tmp_path / "c" / name)
        if file.name != "manifest.json"
    ]
    for file in damaged:
        file.write_bytes(file.read_bytes()[:-1])
    assert cli.main(["verify", str(tmp_path / "c")]) == 1
    out = capsys.readouterr().out
    assert f"{tmp_path / 'c' / 'day' / 'delta'}: complete" in out
    assert [file for file in damaged if str(file.relative_to(tmp_path / "c")) not in out] == []


def test_a_folder_with_nothing_to_verify(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    assert cli.main(["verify", str(tmp_path)]) == 2
    assert "expected a checkpoint or an export, or a folder of them" in capsys.readouterr().err
