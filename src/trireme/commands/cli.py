"""The command `trireme`, which runs one of its subcommands."""

from __future__ import annotations

import argparse
import atexit
import difflib
import gc
import itertools
import os
import platform
import re
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from trireme.commands import (
    console,
    convert,
    doctor,
    inspect,
    keys,
    launch,
    place,
    predict,
    run,
    server,
    size,
    stream,
    top,
    verify,
)
from trireme.errors import BadRequest, TriremeError

# Each module has SUMMARY, EXAMPLES and add_to(parser).
_MODULES = (
    launch,
    run,
    stream,
    server,
    top,
    console,
    keys,
    convert,
    predict,
    inspect,
    size,
    place,
    verify,
    doctor,
)
COMMANDS: Mapping[str, ModuleType] = {m.__name__.rpartition(".")[2]: m for m in _MODULES}

_EXAMPLES = """
examples:
  python train.py
      train in one process, which keeps the tables in its own memory
  trireme run -m config.yaml
      train without a script, from a YAML file with PaddleRec's keys
  trireme launch --server_num 2 --worker_num 2 train.py
      start a whole job on this machine
  trireme server --listen 127.0.0.1:6000
  TRIREME_SERVERS=127.0.0.1:6000 torchrun --nproc_per_node 2 train.py
      start a server without a script, then its workers

trireme.init() without arguments reads the role of the process from the environment:
  TRIREME_ROLE=worker TRIREME_SERVERS=HOST:PORT,... TRIREME_INDEX=I TRIREME_NUM_WORKERS=N
      worker I of N; with TRIREME_JOIN=1 instead of the last two it joins a running job of
      trireme launch --streams
  TRIREME_ROLE=heter TRIREME_INDEX=I TRIREME_HETER=LABEL=HOST:PORT,... TRIREME_SERVERS=...
      TRIREME_NUM_WORKERS=N
      a compute worker, number I of the list in TRIREME_HETER, which all processes of the job have;
      TRIREME_LABEL, if it is set, must be its label
  torchrun's RANK and WORLD_SIZE, with TRIREME_SERVERS
  Fleet's TRAINING_ROLE, PADDLE_PSERVERS_IP_PORT_LIST, PADDLE_TRAINERS_NUM, PADDLE_TRAINER_ID,
      POD_IP and PADDLE_PORT, and for compute workers PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST and
      HETER_DEVICE_TYPE
Without any of them the process trains alone.

`trireme COMMAND --help` explains a command, with examples.
"""

_VERSION_EXAMPLE = """
example:
  trireme version
      the versions of Python, Trireme, torch, NumPy and pyzmq, for a bug report
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Wrong use exits with code 2."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started this; the number is the next one
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for good
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else argv
    arguments, unknown = parser.parse_known_args(argv)
    command: argparse.ArgumentParser = arguments.parser
    # Python searches all objects for cycles as it ends: with torch a quarter of a second.
    atexit.register(gc.freeze)
    if unknown:
        command.error(_explain_unknown(unknown[0], command))
    own = argv[: len(argv) - len(getattr(arguments, "script_args", ()))]
    for before, argument in itertools.pairwise(own):
        if not argument or (argument.startswith("--") and argument.endswith("=")):
            what = argument or f"an empty one behind {before}"
            command.error(f"expected a value, found {what}: is a variable of the shell unset?")
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except TriremeError as error:
        reason = str(error).removeprefix(f"{command.prog.rpartition(' ')[2]}: ")
        print(f"{command.prog}: error: {reason}", file=sys.stderr)
        return 2 if isinstance(error, BadRequest) else 1
    except KeyboardInterrupt:
        print(f"{command.prog}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if not _has_reader_gone():
            raise
        return 128 + signal.SIGPIPE
    return code


def fleetrun() -> int:
    """Fleet's name of `trireme launch`."""
    return main(["launch", *sys.argv[1:]])


def _has_reader_gone() -> bool:
    """Whether the reader of stdout has closed it, as with `trireme size ... | head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    return True


def build_parser() -> argparse.ArgumentParser:
    """All commands and options; a test freezes them."""
    parser = argparse.ArgumentParser(
        prog="trireme",
        description="A parameter server for PyTorch.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="as the command version")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        module.add_to(_command(commands, name, module.SUMMARY, module.EXAMPLES))
    version = _command(commands, "version", "print the versions in use", _VERSION_EXAMPLE)
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


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.exit(_version())


def _version(_: argparse.Namespace | None = None) -> int:
    names = ("trireme-ps", "torch", "numpy", "pyzmq")
    print(f"Python {platform.python_version()} on {platform.platform()}")
    for name in names:
        print(f"{name} {_version_of(name)}")
    return 0


def _version_of(name: str) -> str:
    from importlib import metadata  # slow to load

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _explain_unknown(option: str, command: argparse.ArgumentParser) -> str:
    """The message for an option that no command reads."""
    name = option.split("=")[0]
    if name in launch.FLEETRUN_ONLY and command.prog.endswith(" launch"):
        return f"fleetrun's {name} has no meaning here: {launch.FLEETRUN_ONLY[name]}"
    known = [flag for action in command._actions for flag in action.option_strings]
    if ":" in name and "--servers" in known:
        return f"expected no further argument, found {name!r}; did you mean --servers {name}?"
    if not name.startswith("-"):
        return f"expected no further argument, found {name!r}; {command.prog} --help has them"
    near = [flag for flag in known if _words(flag) == _words(name)]
    near = near or difflib.get_close_matches(name, known, n=1)
    return f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else "")


def _words(flag: str) -> list[str]:
    """Of --num_workers those of --worker_num, in one order."""
    return sorted(word.rstrip("s") for word in re.split("[-_]+", flag) if word)
