"""The command `trireme top`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

from trireme.commands.options import KEYS, add_look, read_client

SUMMARY = "show a running job: servers, tables, workers"
EXAMPLES = (
    """
examples:
  trireme top --servers 127.0.0.1:6000
      refresh every 2 seconds, until Ctrl-C or until no server answers; the first server is enough
  trireme top --servers 127.0.0.1:6000 --keys keys/worker
      a job with keys: use those of a client that the servers admit
  trireme top --servers 127.0.0.1:6000 --once | grep worker
      print one interval, for scripts

Rates, request times and missing keys are those of the interval. Every table but the first shows
sums over all servers. "full/s" counts requests that a server refused for now because it had reached
a limit. "saved ago" is the time since the last checkpoint of any mode. The workers' own numbers
(retries and queue depths) are at most 5 seconds old. docs/metrics.md explains the numbers.

Environment: TRIREME_SERVERS and TRIREME_KEYS mean the same as the options. Options override them.
"""
    + KEYS
)
_PIPE_WIDTH = 240


def add_to(command: argparse.ArgumentParser) -> None:
    add_look(command)
    command.add_argument("--once", action="store_true", help="show one interval and end")
    command.set_defaults(run=_top)


def _top(arguments: argparse.Namespace) -> int:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from trireme.launch.key_folder import client_keys
    from trireme.rpc import RpcClient
    from trireme.top.job_snapshot import take_snapshot
    from trireme.top.view import view

    role = read_client(arguments.servers, arguments.keys)
    keys = None if role.keys is None else client_keys(Path(role.keys))
    log = logging.getLogger("trireme.top")

    def views(client: RpcClient) -> Iterator[RenderableType]:
        before = take_snapshot(client, role.servers, arguments.timeout_s)
        pause = threading.Event()
        while True:
            pause.wait(arguments.interval_s)
            now = take_snapshot(client, role.servers, arguments.timeout_s)
            yield view(before, now, rows_max)
            before = now

    console = Console()
    is_live = console.is_terminal and not arguments.once
    # Servers, tables and workers each that a terminal of 80 columns has lines for.
    rows_max = max(1, (console.height - 16) // 6) if is_live else None
    with (
        RpcClient(name="top", keys=keys, on_wait=log.debug) as client,
        contextlib.suppress(KeyboardInterrupt),  # the usual way to end it
    ):
        if is_live:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                for shown in views(client):
                    live.update(shown, refresh=True)
        console = console if console.is_terminal else Console(width=_PIPE_WIDTH)
        for shown in views(client):
            console.print(shown)
            console.file.flush()
            if arguments.once:
                break
    return 0
