"""From PaddleRec's `runner.pipe_command` to a command line.

A reader script is run as `PIPE_COMMAND YAML_PATH UTILS_PATH`. It appends UTILS_PATH to sys.path and
imports `common_ps` from there. It gets the overrides of the run in TRIREME_OVERRIDES.
"""

import json
import logging
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from trireme.data.pipe_process import MadeCommand, needs_shell
from trireme.errors import BadRequest

UTILS_PATH = str(Path(__file__).with_name("reader_utils"))

log = logging.getLogger("trireme.fleet")

_OURS = ("python", "python3")
_OLDEST = 10  # Python 3.10, which trireme needs and the reader imports


def reader_command(pipe_command: str, yaml_path: str | Path, overrides: Sequence[str] = ()) -> str:
    """The shell command that runs a reader script as PaddleRec does.

    `python` and `python3` become the interpreter that runs Trireme, so that the script can import
    trireme; so does, with a warning, a version that is not installed or too old (python3.7). The
    path of the script is relative to the working directory. A command that needs a shell, such as
    `cat | python x.py`, only gets the arguments appended; one without a Python script is unchanged.

    Args:
        overrides: "key=value" each, as for Config.load.

    Raises:
        BadRequest: not a shell command, no such script, or no such interpreter.
    """
    try:
        words = shlex.split(pipe_command)
    except ValueError as error:
        raise BadRequest(
            f"pipe_command: expected a command, found {pipe_command!r}: {error}"
        ) from error
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if script is None:
        return pipe_command
    arguments = [str(Path(yaml_path).absolute()), UTILS_PATH]
    settings = [f"TRIREME_OVERRIDES={json.dumps(list(overrides))}"] if overrides else []
    if needs_shell(pipe_command):
        export = f"export {shlex.join(settings)}; " if settings else ""
        return MadeCommand(f"{export}{pipe_command} {shlex.join(arguments)}", pipe_command)
    path = Path(words[script]).absolute()
    if not path.is_file():
        raise BadRequest(
            f"pipe_command: expected a script at {path}, found none; the path in {pipe_command!r} "
            f"is relative to the working directory{_start(words[script], yaml_path)}"
        )
    words[script] = str(path)
    words[0] = _program(words[0])
    env = ["env", *settings] if settings else []
    return MadeCommand(shlex.join([*env, *words, *arguments]), pipe_command)


def _start(script: str, yaml_path: str | Path) -> str:
    """Where to start instead: PaddleRec's files count on its root folder, or on their own."""
    yaml = Path(yaml_path).absolute()
    for folder in yaml.parents:
        if (folder / script).is_file():
            command = f"cd {shlex.quote(str(folder))}, then -m {yaml.relative_to(folder)}"
            return f", and {folder / script} is there: {command}"
    return ""


def _program(name: str) -> str:
    if name in _OURS:
        return sys.executable
    version = re.fullmatch(r"python3\.(\d+)", name)
    if version and (int(version[1]) < _OLDEST or shutil.which(name) is None):
        log.warning(
            "pipe_command: %s is not here, or too old for trireme; %s, Python %s, runs the reader",
            name, sys.executable, sys.version.split()[0],
        )  # fmt: skip
        return sys.executable
    if shutil.which(name) is None:
        raise BadRequest(
            f"pipe_command: expected the program {name!r} on PATH, found none; write python3 for "
            f"the interpreter that runs Trireme, {sys.executable} ({sys.version.split()[0]})"
        )
    return name
