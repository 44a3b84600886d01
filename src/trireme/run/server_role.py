"""The servers of a job that a configuration describes. Nothing here loads what trains."""

import dataclasses
import errno
import logging
import os
import sys
from pathlib import Path

from trireme.errors import writing
from trireme.launch.init import log_to_stderr, serve_role
from trireme.launch.process_role import ProcessRole, read_role
from trireme.run.settings import Settings

log = logging.getLogger("trireme")


def has_served(settings: Settings) -> bool:
    """Serve until the job is over, if the environment makes this process a server; False: it does
    not. Ends the process if its place or its state is wrong. Raises BadRequest: models cannot be
    kept in the folder of the configuration.
    """
    process = read_role()
    if process.role != "server":
        return False
    log_to_stderr()
    log.info("%s", process.describe())
    if code := serve_role(keeping_models(process, settings)):
        sys.exit(code)
    return True


def keeping_models(process: ProcessRole, settings: Settings) -> ProcessRole:
    """The role with the folder of the configuration's models as its root. Raises BadRequest:
    nothing can be written there.
    """
    root = settings.model_root(process.root)
    make_folder("run: cannot keep models in", root)
    return dataclasses.replace(process, root=str(root))


def make_folder(what: str, path: Path) -> None:
    """Make a folder to write to. Raises BadRequest: nothing can be written there."""
    with writing(f"{what} {path}"):
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
