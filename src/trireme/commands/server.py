"""The command `trireme server`."""

import argparse

from trireme.commands.options import KEYS, add_common
from trireme.launch import process_role
from trireme.launch.environment import VARIABLES

SUMMARY = "run a server, without a script"
EXAMPLES = (
    """
examples:
  trireme server --listen 127.0.0.1:6000
  trireme server --listen 127.0.0.1:6001
      start two servers, each in a terminal of its own
  TRIREME_SERVERS=127.0.0.1:6000,127.0.0.1:6001 torchrun --nproc_per_node 2 train.py
      start two workers of these servers

A server needs only its address; the workers send the rest. The first server of their list hosts the
coordinator. A server ends with code 0 when all workers have ended, or on SIGTERM (143 if a launcher
started it, and the job is not over): 7 s later, or when workers that stop too have left. It ends
with an error when the remaining workers are silent for twice the timeout.

Environment: TRIREME_LISTEN, TRIREME_THREADS, TRIREME_TIMEOUT_S, TRIREME_KEYS, TRIREME_ROOT,
TRIREME_LIMITS, TRIREME_MEMORY, TRIREME_SSD_DIR, TRIREME_STORE_HOSTS, TRIREME_METRICS,
TRIREME_INSECURE=1, TRIREME_DURABILITY, TRIREME_STATE_DIR, TRIREME_LOG_BYTES and
TRIREME_SKIP_RECORDS mean the same as the options. Options override them.
"""
    + KEYS
)


def add_to(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--listen", metavar="HOST:PORT", help="address to listen on; port 0 chooses a free one")
    add("--threads", type=int, metavar="N", help="threads for tables; default: one per core")
    add_common(command)
    command.set_defaults(run=_server)


def _server(arguments: argparse.Namespace) -> int:
    from trireme.launch import init  # loads torch

    facts = VARIABLES.values()
    options = {name: value for name, value in vars(arguments).items() if name in facts}
    role = process_role.read_role(role="server", **options)
    init.log_to_stderr()
    init.log.info("%s", role.describe())
    return init.serve_role(role)
