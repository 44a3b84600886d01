"""The folders of servers below --ssd_dir: each is its server's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from trireme.server import ssd_folders


def test_servers_that_start_at_once_leave_each_other_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, started = ssd_folders._locked, list[ssd_folders.OwnFolders]()

    def lock(folder: Path) -> int:
        monkeypatch.undo()
        started.append(ssd_folders.OwnFolders([tmp_path]))
        return real(folder)

    monkeypatch.setattr(ssd_folders, "_locked", lock)
    started.append(ssd_folders.OwnFolders([tmp_path]))
    started.append(ssd_folders.OwnFolders([tmp_path]))
    assert sorted(tmp_path.iterdir()) == sorted(folders.paths[0] for folders in started)
    for folders in started:
        folders.close()
    assert list(tmp_path.iterdir()) == []
