"""The command `trireme`: run a configuration, launch a job, be a server, say the version."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.metadata
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from trireme.config import Config
from trireme.errors import BadRequest, TriremeError
from trireme.inspect import command as inspect_command
from trireme.launch import local, roles
from trireme.launch.plan import LaunchConfig
from trireme.run import predict_command, verify_command
from trireme.run.online_settings import OnlineSettings
from trireme.run.settings import Settings
from trireme.size import command as size_command

# Options of fleetrun and paddle.distributed.launch without a meaning here, and what to do instead.
_FLEETRUN_ONLY = {
    "--run_mode": "servers and workers are the only mode of trireme launch",
    "--heter_workers": "heterogeneous workers are not supported",
    "--heter_worker_num": "heterogeneous workers are not supported",
    "--heter_devices": "heterogeneous workers are not supported",
    "--coordinators": "server 0 hosts the coordinator",
    "--coordinator_num": "server 0 hosts the coordinator",
    "--http_port": "server 0 hosts the coordinator",
    "--with_gloo": "barriers and reductions go through the servers",
    "--gloo_port": "barriers and reductions go through the servers",
    "--start_port": "ports are chosen free; name them with --servers",
    "--master": "name all machines with --servers and --workers, on each of them",
    "--nnodes": "name all machines with --servers and --workers, on each of them",
    "--ips": "name all machines with --servers and --workers, on each of them",
    "--rank": "a process's number is its place in --servers or --workers",
    "--nproc_per_node": "give --server_num and --worker_num",
}

_EXAMPLES = """
examples:
  python train.py
      alone, with the tables in its own process
  trireme run -m config.yaml
      the same without a script, as a file with PaddleRec's keys says
  trireme launch --server_num 2 --worker_num 2 train.py
      a whole job on this machine
  trireme server --listen 127.0.0.1:6000
  TRIREME_SERVERS=127.0.0.1:6000 torchrun --nproc_per_node 2 train.py
      a server without a script, and workers of it

A script without arguments to trireme.init() finds its place in the environment:
  TRIREME_ROLE=worker TRIREME_SERVERS=HOST:PORT,... TRIREME_INDEX=I TRIREME_NUM_WORKERS=N
  or Fleet's TRAINING_ROLE, PADDLE_PSERVERS_IP_PORT_LIST, PADDLE_TRAINERS_NUM, PADDLE_TRAINER_ID,
  POD_IP and PADDLE_PORT; or torchrun's RANK and WORLD_SIZE with TRIREME_SERVERS; without any: alone

`trireme COMMAND --help` explains a command, with examples.
"""

_KEYS = """
Keys: a server's folder holds server.key and clients.pub (the public keys it admits, one per line),
a worker's client.key and server.pub. trireme.rpc.make_keys(path) writes a pair to path, its public
half to path.pub.
"""

_EXAMPLES_LAUNCH = """
examples:
  trireme launch --server_num 2 --worker_num 2 train.py --epochs 3
      2 servers and 2 workers on this machine, on free ports; what follows train.py is its own
  trireme launch --server_num 1 --worker_num 2 -m config.yaml -o runner.epochs=1
      instead of a script, what a file with PaddleRec's keys says: `trireme run --help`
  trireme launch --servers 10.0.0.1:6000,10.0.0.2:6000 --workers 10.0.0.1:0,10.0.0.2:0 \\
      --insecure train.py
      the same command on both machines starts on each what belongs there

Options stand before the script. Logs are log/serverlog.N and log/workerlog.N; worker 0 also writes
to the console. If one process fails, all are stopped; the exit code is that of the process that
failed, 128 + n if signal n ended it or stopped the job, 2 for a wrong command.

Environment, for every process that is started:
  TRIREME_TIMEOUT_S, TRIREME_KEYS, TRIREME_ROOT, TRIREME_INSECURE=1   as the options, which win
  TRIREME_THREADS, OMP_NUM_THREADS   threads of Trireme and of torch; default: a share of the cores
"""

_EXAMPLES_RUN = """
examples:
  trireme run -m config.yaml
      train in this process, save every epoch below runner.model_save_path
  trireme run -m config.yaml -o runner.epochs=1 hyper_parameters.optimizer.learning_rate=5e-4
      the same with other values
  trireme run --infer -m config.yaml -o runner.infer_start_epoch=2 runner.infer_end_epoch=3
      evaluate saved epochs 2 (included) to 3 (not included) on runner.test_data_dir
  trireme launch --server_num 1 --worker_num 2 -m config.yaml
      the same as a job of several processes

The model is `-o model=NAME`, else runner.model_path, else model.py beside the file: a Python file
with a function create(config) -> trireme.Recipe, or a name of trireme.models. Paths of data and
models start at the folder of the file, those in runner.pipe_command at the working directory.
A key that nothing reads is a warning; a way of running that is not there yet is an error.

The environment says what this process is, as for a script: alone, a worker or a server of a job.
docs/paddlerec.md lists the keys.
"""

_EXAMPLES_CONVERT = """
examples:
  trireme convert fleet_model/20260101 model/0 --to checkpoint -m config.yaml
      what Fleet's save_persistables wrote, as a checkpoint of the model that config.yaml says;
      the dense part, too, if it consists of linear layers
  trireme convert model/0 fleet_model/20260102 --to fleet -m config.yaml --shard_num 10
      and back: what Fleet's load_model reads with shard_num 10
  trireme convert model/0 tables --to parquet
      a checkpoint's tables as Parquet, for pyarrow, polars, DuckDB; it says itself what they are
  trireme convert fleet_model/20260101 tables --to parquet \\
      --table embedding --dim 9 --rule SparseAdaGradSGDRule
      rows of Fleet without a model; dim counts the head and the tail of a row
  trireme convert vectors.parquet model/0 --to checkpoint -m config.yaml
      rows of another system: columns key and weights, others optional

What SOURCE is, it shows itself: a checkpoint has a manifest, a folder of Fleet 000/part-*. TARGET
must not exist. The tables are in this process meanwhile. docs/interchange.md has the formats.
"""

_EXAMPLES_STREAM = """
examples:
  trireme stream -m config_online.yaml
      train on runner.train_data_dir/DAY/HHMM, pass by pass, from start_day to end_day
  trireme launch --server_num 1 --worker_num 2 --stream -m config_online.yaml
      the same as a job of several processes
  trireme stream -m config_online.yaml -o runner.end_day=20190721
      the same for fewer days; called again, it goes on behind the newest checkpoint

A day has passes of split_interval * split_per_pass minutes. Each is waited for (data_donefile),
evaluated, trained on; behind every checkpoint_per_pass of them a checkpoint is written below
runner.model_save_path, behind every save_delta_frequency a delta for inference, and at the end of
a day a base, all listed in done-files. docs/online.md explains the keys.
"""

_EXAMPLES_SERVER = """
examples:
  trireme server --listen 127.0.0.1:6000
  TRIREME_SERVERS=127.0.0.1:6000,127.0.0.1:6001 torchrun --nproc_per_node 2 train.py
      workers of that server and another one

A server needs its address only; workers bring the rest, and server 0 of their list hosts the
coordinator. It ends with code 0 when all workers have said goodbye, or at SIGTERM; with an error
when those that have not are silent for twice the timeout.

Environment: TRIREME_LISTEN, TRIREME_THREADS, TRIREME_TIMEOUT_S, TRIREME_KEYS, TRIREME_ROOT and
TRIREME_INSECURE=1 say the same as the options, which win.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Wrong use exits with code 2."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    command: argparse.ArgumentParser = arguments.parser
    if unknown:
        command.error(_explain_unknown(unknown[0], command))
    try:
        code: int = arguments.run(arguments)
    except TriremeError as error:
        print(f"{command.prog}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadRequest) else 1
    return code


def build_parser() -> argparse.ArgumentParser:
    """All commands and options; a test freezes them."""
    parser = argparse.ArgumentParser(
        prog="trireme",
        description="A parameter server for PyTorch.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_launch(_command(commands, "launch", "start servers and workers", _EXAMPLES_LAUNCH + _KEYS))
    _add_run(_command(commands, "run", "train or infer as a YAML file says", _EXAMPLES_RUN))
    summary = "turn checkpoints, Fleet's folders and Parquet into one another"
    _add_convert(_command(commands, "convert", summary, _EXAMPLES_CONVERT))
    summary = "answer files with an exported model"
    predict_command.add_to(_command(commands, "predict", summary, predict_command.EXAMPLES))
    _add_stream(
        _command(commands, "stream", "train on days of data as they come", _EXAMPLES_STREAM)
    )
    _add_server(
        _command(commands, "server", "be a server, without a script", _EXAMPLES_SERVER + _KEYS)
    )
    of_inspect = _command(commands, "inspect", "look into a checkpoint", inspect_command.EXAMPLES)
    inspect_command.add_arguments(of_inspect)
    size_command.add_arguments(
        _command(commands, "size", "estimate memory and disk of tables", size_command.EXAMPLES)
    )
    verify_command.add_to(
        _command(commands, "verify", "say whether checkpoints are whole", verify_command.EXAMPLES)
    )
    version = _command(commands, "version", "print the versions in use", "")
    version.set_defaults(run=_version)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    epilog: str,
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(parser=command)
    return command


def _add_launch(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--server_num", type=int, metavar="N", help="number of servers, all on this machine")
    add("--worker_num", "--trainer_num", type=int, metavar="N", help="number of workers")
    add(
        "--servers",
        type=_addresses,
        default=(),
        metavar="HOST:PORT,...",
        help="all servers, to name their ports or spread them over machines",
    )
    add(
        "--workers",
        "--trainers",
        type=_addresses,
        default=(),
        metavar="HOST:PORT,...",
        help="all workers, to spread them over machines; the ports are not used",
    )
    add(
        "--log_dir",
        type=Path,
        default=Path("log"),
        metavar="DIR",
        help="folder for one log file per process; default: log",
    )
    add(
        "--grace_s",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="seconds between asking a process to stop and killing it; default: 10",
    )
    _add_common(command)
    _add_config(command)
    _add_infer(command)
    add("--stream", action="store_true", help="train on days of data: see trireme stream")
    add("script", nargs="?", metavar="SCRIPT", help="the Python script that every process runs")
    add("script_args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    command.set_defaults(run=_launch)


def _add_run(command: argparse.ArgumentParser) -> None:
    _add_config(command, required=True)
    _add_infer(command)
    command.set_defaults(run=_run)


def _add_stream(command: argparse.ArgumentParser) -> None:
    _add_config(command, required=True)
    command.set_defaults(run=_stream)


def _add_config(
    command: argparse.ArgumentParser,
    *,
    required: bool = False,
    purpose: str = "instead of a script",
) -> None:
    add = command.add_argument
    add(
        "-m",
        "--config_yaml",
        type=Path,
        required=required,
        metavar="FILE",
        help="YAML file with PaddleRec's keys" + ("" if required else f", {purpose}"),
    )
    add(
        "-o",
        "--opt",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="values that win over the file's",
    )


def _add_infer(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--infer", action="store_true", help="evaluate saved epochs instead of training"
    )


def _add_convert(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("source", metavar="SOURCE", help="a checkpoint, a folder of Fleet, or Parquet files")
    add("target", metavar="TARGET", help="a new folder")
    add("--to", required=True, choices=("checkpoint", "fleet", "parquet"), help="TARGET's format")
    _add_config(command, purpose="the model: its tables and its dense part")
    add("--table", metavar="NAME", help="the table that Parquet files, or Fleet's rows, are of")
    add("--dim", type=int, metavar="D", help="without -m: floats of a row, head and tail")
    add("--rule", metavar="RULE", help="without -m: Fleet's name of the rows' rule")
    add("--accessor", metavar="NAME", help="Fleet's order of fields; default: of the policy")
    add(
        "--tables",
        type=_table_numbers,
        metavar="NAME=N,...",
        help="Fleet's number of each table; default: the only one is 0",
    )
    add("--time", type=int, default=0, metavar="S", help="data time in seconds of the save")
    add("--dense_steps", type=int, default=0, metavar="N", help="steps of Fleet's dense optimizer")
    add(
        "--shard_num",
        type=int,
        default=1000,
        metavar="N",
        help="that of Fleet's table; default: 1000",
    )
    add("--gzip", action="store_true", help="compress what is for Fleet")
    add("--state", action="store_true", help="to Parquet: the update rules' state, too")
    command.set_defaults(run=_convert)


def _add_server(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--listen", metavar="HOST:PORT", help="address to bind; port 0 chooses one")
    add("--threads", type=int, metavar="N", help="threads for tables; default: one per core")
    _add_common(command)
    command.set_defaults(run=_server)


def _add_common(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--timeout_s",
        type=_seconds,
        metavar="S",
        help=f"seconds to wait for other processes; default: {roles.TIMEOUT_S_DEFAULT:g}",
    )
    add("--keys", metavar="DIR", help="encrypt and authenticate with the keys in this folder")
    add(
        "--root",
        metavar="DIR",
        help="servers write and read checkpoints only below it; default: the working directory",
    )
    add("--insecure", action="store_true", help="listen beyond loopback without keys")


def _run(arguments: argparse.Namespace) -> int:
    from trireme.run.runner import run  # brings torch, which a wrong command can do without

    run(Config.load(arguments.config_yaml, arguments.opt), infer=arguments.infer)
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from trireme.run.convert import Conversion, convert  # brings torch

    yaml, own = arguments.config_yaml, vars(arguments)
    if yaml is None and arguments.opt:
        raise BadRequest("convert: expected -o with -m config.yaml, found it alone")
    config = None if yaml is None else Config.load(yaml, arguments.opt)
    names = {field.name for field in dataclasses.fields(Conversion)} - {"config"}
    convert(Conversion(config=config, **{name: own[name] for name in names}))
    return 0


def _stream(arguments: argparse.Namespace) -> int:
    from trireme.run.stream import stream  # brings torch, which a wrong command can do without

    stream(Config.load(arguments.config_yaml, arguments.opt))
    return 0


def _launched(arguments: argparse.Namespace) -> tuple[str, ...]:
    """What every process of the job runs, as arguments of python."""
    if arguments.config_yaml is None:
        if arguments.script is None:
            raise BadRequest("launch: expected a script or -m config.yaml, found neither")
        if arguments.opt or arguments.infer or arguments.stream:
            raise BadRequest(
                "launch: expected -o, --infer and --stream with -m config.yaml, found"
                f" {arguments.script}; options of a script stand behind it"
            )
        return (arguments.script, *arguments.script_args)
    if arguments.script is not None:
        raise BadRequest(
            f"launch: expected a script or -m config.yaml, found both: {arguments.script}"
        )
    if arguments.infer and arguments.stream:
        raise BadRequest("launch: expected --infer or --stream, found both")
    # Before anything starts; the servers will do the same.
    config = Config.load(arguments.config_yaml, arguments.opt)
    Settings.read(config).model_root(arguments.root)
    if arguments.stream:
        OnlineSettings.read(config)
    options = ["--infer"] if arguments.infer else []
    options += ["-o", *arguments.opt] if arguments.opt else []
    command = "stream" if arguments.stream else "run"
    return ("-m", "trireme.cli", command, "-m", str(arguments.config_yaml), *options)


def _launch(arguments: argparse.Namespace) -> int:
    return local.launch(
        LaunchConfig(
            command=_launched(arguments),
            server_num=arguments.server_num,
            worker_num=arguments.worker_num,
            servers=arguments.servers,
            workers=arguments.workers,
            log_dir=arguments.log_dir,
            grace_s=arguments.grace_s,
            timeout_s=arguments.timeout_s,
            insecure=arguments.insecure,
            keys=arguments.keys,
            root=arguments.root,
        )
    )


def _server(arguments: argparse.Namespace) -> int:
    from trireme.launch import init  # brings torch, which the launcher can do without

    role = roles.read_role(
        role="server",
        listen=arguments.listen,
        timeout_s=arguments.timeout_s,
        insecure=arguments.insecure or None,
        keys=arguments.keys,
        root=arguments.root,
        threads=arguments.threads,
    )
    init.log_to_stderr()
    init.log.info("%s", role.describe())
    init.serve_role(role)
    return 0


def _version(arguments: argparse.Namespace) -> int:
    names = ("trireme-ps", "torch", "numpy", "pyzmq")
    print(f"Python {platform.python_version()} on {platform.platform()}")
    for name in names:
        print(f"{name} {_version_of(name)}")
    return 0


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _explain_unknown(option: str, command: argparse.ArgumentParser) -> str:
    """What to do about an option that nothing here reads."""
    name = option.split("=")[0]
    if name in _FLEETRUN_ONLY and command.prog.endswith(" launch"):
        return f"fleetrun's {name} has no meaning here: {_FLEETRUN_ONLY[name]}"
    if not name.startswith("-"):
        return f"expected options only, found {name!r}"
    known = [flag for action in command._actions for flag in action.option_strings]
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else "")


def _addresses(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _table_numbers(text: str) -> dict[str, int]:
    try:
        return {name: int(number) for name, number in (p.split("=") for p in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected NAME=N,..., found {text!r}") from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds > 0, found {text!r}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
