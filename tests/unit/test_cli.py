"""The command line: its flags are frozen, and its errors help."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trireme.commands import cli, inspect
from trireme.launch import environment

# Changing this list changes what users type: add to it, and say so in CHANGELOG.md.
FLAGS = {
    "console": [
        "--help",
        "--interval_s",
        "--keys",
        "--listen",
        "--servers",
        "--timeout_s",
        "--token_file",
        "-h",
    ],
    "convert": [
        "--accessor",
        "--config_yaml",
        "--dense_steps",
        "--dim",
        "--gzip",
        "--help",
        "--opt",
        "--rule",
        "--shard_num",
        "--state",
        "--table",
        "--tables",
        "--time",
        "--to",
        "-h",
        "-m",
        "-o",
        "SOURCE",
        "TARGET",
    ],
    "doctor": ["--help", "--json", "-h"],
    "keys": ["--add", "--force", "--help", "--heter_worker_num", "--worker_num", "-h", "DIR"],
    "launch": [
        "--config_yaml",
        "--console",
        "--devices",
        "--durability",
        "--gpus",
        "--grace_s",
        "--help",
        "--heter_devices",
        "--heter_worker_num",
        "--heter_workers",
        "--host",
        "--infer",
        "--insecure",
        "--interface",
        "--ips",
        "--join",
        "--keys",
        "--limits",
        "--log_bytes",
        "--log_dir",
        "--max_restart",
        "--memory",
        "--metrics",
        "--nproc_per_node",
        "--opt",
        "--root",
        "--server_num",
        "--servers",
        "--skip_records",
        "--ssd_dir",
        "--start_method",
        "--start_port",
        "--state_dir",
        "--store_hosts",
        "--stream",
        "--streams",
        "--timeout_s",
        "--trainer_num",
        "--trainers",
        "--worker_num",
        "--workers",
        "-h",
        "-m",
        "-o",
        "SCRIPT",
        "...",
    ],
    "inspect": [
        "--brief",
        "--diff",
        "--help",
        "--key",
        "--table",
        "-h",
        "PATH",
    ],
    "place": [
        "--args",
        "--from",
        "--help",
        "--measure",
        "--throughput",
        "--timeout_s",
        "--type",
        "--types",
        "-h",
        "SCRIPT",
    ],
    "predict": [
        "--batch_size",
        "--delimiter",
        "--fields",
        "--format",
        "--help",
        "--input",
        "--ins_id",
        "--list_separator",
        "--model",
        "--no_header",
        "--output",
        "--threads",
        "--use_onednn",
        "-h",
        "-m",
    ],
    "run": ["--config_yaml", "--help", "--infer", "--opt", "-h", "-m", "-o"],
    "server": [
        "--durability",
        "--help",
        "--insecure",
        "--keys",
        "--limits",
        "--listen",
        "--log_bytes",
        "--memory",
        "--metrics",
        "--root",
        "--skip_records",
        "--ssd_dir",
        "--state_dir",
        "--store_hosts",
        "--threads",
        "--timeout_s",
        "-h",
    ],
    "size": [
        "--config_yaml",
        "--count_filter",
        "--delta",
        "--dim",
        "--dims",
        "--dtype",
        "--endurance",
        "--evicted_rows",
        "--heads",
        "--help",
        "--keys",
        "--memory",
        "--opt",
        "--optimizer",
        "--pending_keys",
        "--policy",
        "--server_num",
        "--sketch_bytes",
        "--worker_num",
        "-h",
        "-m",
        "-o",
    ],
    "stream": ["--config_yaml", "--help", "--opt", "-h", "-m", "-o"],
    "top": [
        "--help",
        "--interval_s",
        "--keys",
        "--once",
        "--servers",
        "--timeout_s",
        "-h",
    ],
    "verify": [
        "--help",
        "--quiet",
        "-h",
        "PATH",
    ],
    "version": ["--help", "-h"],
}


def commands() -> dict[str, argparse.ArgumentParser]:
    parser = cli.build_parser()
    (subparsers,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(subparsers.choices)


def test_cli_flags_are_the_frozen_list() -> None:
    actual = {}
    for name, command in commands().items():
        options = sorted(flag for action in command._actions for flag in action.option_strings)
        places = [str(a.metavar) for a in command._actions if not a.option_strings]
        actual[name] = options + places
    assert actual == FLAGS


def test_cli_help_teaches_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in commands().items():
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert all(len(line) <= 100 for line in text.splitlines())
        if len(command._actions) > 1:
            assert f"  trireme {name} " in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["launch", "--worker_nums", "2", "x.py"], "did you mean --worker_num?"),
        (["top", "10.0.0.1:6000"], "did you mean --servers 10.0.0.1:6000?"),
        (["launch", "--num_workers", "2", "x.py"], "did you mean --worker_num?"),
        (["launch", "--servers-num", "2", "x.py"], "did you mean --server_num?"),
        (["launch", "--trainer", "2", "x.py"], "did you mean --trainers?"),
        (["launch", "--gloo_port=6767", "x.py"], "fleetrun's --gloo_port has no meaning here"),
        (["launch", "--grace_s", "0", "x.py"], "--grace_s: expected seconds > 0, found '0'"),
        (["launch", "--timeout_s", "soon", "x.py"], "expected seconds > 0, found 'soon'"),
        (["launch", "--timeout_s", "1e18", "x.py"], "expected at most 1e+08 s, found '1e18'"),
        (
            ["server", "train.py"],
            "no further argument, found 'train.py'; trireme server --help has",
        ),
        (["version", "--start_port", "1"], "unknown option --start_port"),
        (["convert", "a", "b", "--to", "fleet", "--tables", "t=1,t=2"], "each name once, found"),
        (["keys", ""], "expected a value, found an empty one behind keys: is a variable of the"),
        (["verify", "ckpt", ""], "found an empty one behind ckpt"),
        (["launch", "--root=", "x.py", ""], "expected a value, found --root=: is a variable of"),
        ([], "COMMAND"),
    ],
)
def test_cli_explains_wrong_use(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", ["top", "console"])
def test_a_look_at_a_job_needs_its_servers(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRIREME_SERVERS", raising=False)
    assert cli.main([command]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"trireme {command}: error: expected --servers HOST:PORT,... of a")


def test_an_error_names_the_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch"]) == 2
    assert capsys.readouterr().err.startswith("trireme launch: error: expected a script or -m")


def test_ctrl_c_ends_a_command_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(arguments: argparse.Namespace) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    monkeypatch.setattr(inspect, "run", interrupted)
    assert cli.main(["inspect", "ckpt/1"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "trireme inspect: interrupted\n"


def test_a_server_refuses_a_root_that_is_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--listen", "127.0.0.1:0", "--root", str(tmp_path / "none")]
    assert cli.main(["server", *options]) == 2
    assert f"expected root to be a folder, found '{tmp_path}/none'" in capsys.readouterr().err


def test_a_server_needs_an_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["server"]) == 2
    assert "a server needs an address to listen on (--listen," in capsys.readouterr().err


def test_cli_help_names_every_variable(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], ["launch", "--help"], ["server", "--help"]):
        with pytest.raises(SystemExit):
            cli.main(argv)
    text = capsys.readouterr().out
    internal = {"TRIREME_LISTEN_FD", "TRIREME_JOINING"}  # handed over by the launcher
    assert {name for name in environment.VARIABLES if name not in text} == internal


def test_cli_version_names_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    text = capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == text
    assert text.startswith("Python ")
    assert "torch 2." in text


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_may_stop_reading(unbuffered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    command = [sys.executable, "-m", "trireme", "size", "--keys", "1", "--dim", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


def test_commands_start_without_torch_and_numpy() -> None:
    program = """
import sys
from trireme.commands import cli
cli.build_parser()
print([name for name in ("torch", "numpy", "zmq", "yaml", "rich") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "command",
    [
        "inspect PATH",
        "verify PATH",
        "convert PATH x --to parquet",
        "predict -m PATH --input a --output b --format multislot --fields label",
        "keys PATH",
        "keys PATH --add x",
        "run -m c.yaml -o model=PATH.py",
        "run -m c.yaml -o model=ctr_dnn runner.warmup_model_path=PATH",
        "run -m c.yaml -o model=ctr_dnn runner.train_reader_path=PATH",
    ],
)
def test_a_path_that_cannot_be_looked_at_is_an_error_without_a_traceback(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As below a folder that may not be entered; a name that is too long, for root as well."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").write_text(" ".join([*["1 1"] * 27, "13", *["0.5"] * 13]) + "\n")
    (tmp_path / "c.yaml").write_text("runner: {train_data_dir: data}\n")
    assert cli.main(command.replace("PATH", "a" * 300).split()) == 2
    assert "File name too long" in capsys.readouterr().err
