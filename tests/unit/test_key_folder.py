"""`trireme keys`: the files it writes, their modes, and what it refuses."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest

from trireme.commands import cli
from trireme.errors import BadRequest
from trireme.launch.key_folder import client_keys, server_keys
from trireme.rpc import read_keys


def keys(*argv: object) -> int:
    try:
        return cli.main(["keys", *map(str, argv)])
    except SystemExit as end:  # of what the command line refuses
        return int(end.code or 0)


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_one_folder_serves_a_whole_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "made" / "keys"
    assert keys(folder) == 0
    assert sorted(contents(folder)) == ["client.key", "clients.pub", "server.key", "server.pub"]
    servers, worker = server_keys(folder), client_keys(folder)
    assert worker.server == servers.own.public
    assert servers.admitted == {worker.own.public}
    output = capsys.readouterr().out
    for name in contents(folder):
        assert f"{folder}/{name} " in output
    assert servers.own.secret not in output
    assert worker.own.secret not in output


def test_secrets_are_for_their_owner_alone(tmp_path: Path) -> None:
    keys(tmp_path / "keys", "--worker_num", 2)
    secrets = sorted(tmp_path.rglob("*.key"))
    assert len(secrets) == 3
    for path in secrets:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    text = "".join(path.read_text() for path in tmp_path.rglob("*.pub"))
    assert not any(read_keys(path).secret in text for path in secrets)


def test_a_secret_that_others_may_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys(tmp_path / "keys")
    server_keys(tmp_path / "keys")
    assert not caplog.text
    (tmp_path / "keys" / "server.key").chmod(0o640)
    with caplog.at_level(logging.WARNING):
        server_keys(tmp_path / "keys")
    assert "keys/server.key holds a secret key and others may read it: mode 640" in caplog.text


def test_folders_apart_give_every_worker_a_pair_of_its_own(tmp_path: Path) -> None:
    assert keys(tmp_path, "--worker_num", 2) == 0
    servers = server_keys(tmp_path / "server")
    workers = [client_keys(tmp_path / f"worker.{index}") for index in range(2)]
    assert servers.admitted == {worker.own.public for worker in workers}
    assert len(servers.admitted) == 2
    assert {worker.server for worker in workers} == {servers.own.public}
    assert sorted(path.name for path in (tmp_path / "worker.0").iterdir()) == [
        "client.key",
        "server.pub",
    ]


def test_a_compute_worker_serves_with_the_servers_keys_and_has_a_pair_of_its_own(
    tmp_path: Path,
) -> None:
    assert keys(tmp_path, "--worker_num", 1, "--heter_worker_num", 2) == 0
    servers = server_keys(tmp_path / "server")
    pairs = [client_keys(tmp_path / name) for name in ("worker.0", "heter.0", "heter.1")]
    assert servers.admitted == {pair.own.public for pair in pairs}
    assert {pair.server for pair in pairs} == {servers.own.public}
    for name in ("heter.0", "heter.1"):
        assert server_keys(tmp_path / name) == servers
    assert "server.key" not in {path.name for path in (tmp_path / "worker.0").iterdir()}
    assert keys(tmp_path / "other", "--heter_worker_num", 2) == 2
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("options", [[], ["--worker_num", 1]])
def test_a_worker_is_added_to_those_admitted(tmp_path: Path, options: list[object]) -> None:
    keys(tmp_path, *options)
    assert keys(tmp_path, "--add", "late-1") == 0
    servers = server_keys(tmp_path / "server" if options else tmp_path)
    late = client_keys(tmp_path / "late-1")
    assert late.server == servers.own.public
    assert late.own.public in servers.admitted
    assert len(servers.admitted) == 2
    assert keys(tmp_path, "--add", "late-1", "--force") == 0
    renewed = server_keys(tmp_path / "server" if options else tmp_path).admitted
    assert len(renewed) == 2
    assert late.own.public not in renewed


@pytest.mark.parametrize("options", [[], ["--worker_num", 2]])
def test_keys_are_replaced_only_with_force(
    tmp_path: Path, options: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    keys(tmp_path, *options)
    before = contents(tmp_path)
    assert keys(tmp_path, *options) == 2
    assert "found one; --force replaces" in capsys.readouterr().err
    assert contents(tmp_path) == before
    assert keys(tmp_path, *options, "--force") == 0
    after = contents(tmp_path)
    assert after.keys() == before.keys()
    assert all(after[name] != before[name] for name in after)


def test_nothing_is_written_if_one_of_the_files_exists(tmp_path: Path) -> None:
    (tmp_path / "worker.1").mkdir()
    (tmp_path / "worker.1" / "client.key").write_text("mine")
    assert keys(tmp_path, "--worker_num", 2) == 2
    assert contents(tmp_path) == {"worker.1/client.key": "mine"}


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "server", "a\nb", "x" * 101])
def test_a_worker_cannot_be_named_like_another_place(tmp_path: Path, name: str) -> None:
    keys(tmp_path)
    before = contents(tmp_path)
    assert keys(tmp_path, "--add", name) == 2
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--worker_num", 0], "expected --worker_num as an integer >= 1, found 0"),
        (["--worker_num", 4097], "expected --worker_num of at most 4096, found 4097"),
        (["--worker_num", 1, "--add", "x"], "expected --worker_num or --add, found both"),
        (["--add", "x"], "must be a readable text file"),
    ],
)
def test_wrong_use_is_told(
    tmp_path: Path, options: list[object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys(tmp_path, *options) == 2
    assert words in capsys.readouterr().err
    assert contents(tmp_path) == {}


def test_a_folder_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert keys(tmp_path / "file" / "keys") == 2
    assert "keys: error: cannot write to" in capsys.readouterr().err


def test_a_folder_without_keys_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "worker.0").mkdir()
    with pytest.raises(
        BadRequest, match=r"server\.key must be a readable text file.* has worker\.0"
    ):
        server_keys(tmp_path)
