"""The command `trireme console`."""

from __future__ import annotations

import argparse
import logging
import re
import secrets
import signal
import sys
from pathlib import Path
from urllib.parse import urlsplit

from trireme.commands.options import KEYS, add_look, read_client
from trireme.errors import BadRequest

SUMMARY = "show a running job in a browser"
EXAMPLES = (
    """
examples:
  trireme launch --server_num 2 --worker_num 2 --console 8080 train.py
      a job with its console; the launcher prints the link to open
  trireme console --servers 127.0.0.1:6000
      the same for a job that runs already; the first server is enough. Runs until Ctrl-C
  trireme console --servers 10.0.0.1:6000 --keys keys/worker --listen 127.0.0.1:8080
  ssh -L 8080:127.0.0.1:8080 10.0.0.9
      a job with keys, seen from elsewhere: the second command forwards the port of the machine
      where the first one runs

The page shows rates, loss and metrics over time, servers, tables, workers and compute workers, how
shows and ages of rows are distributed, and single rows. It only reads, through the servers' own
port. Whoever opens it needs the token in the link. Beyond loopback (--listen 0.0.0.0:8080) the
page is not encrypted: put it behind a proxy that is, or use ssh as above.

Environment:
  TRIREME_SERVERS, TRIREME_KEYS
      the same as the options, which override them
"""
    + KEYS
)
_TOKEN_LENGTH = 16
_TOKEN = re.compile(rf"[A-Za-z0-9_-]{{{_TOKEN_LENGTH},}}")


def add_to(command: argparse.ArgumentParser) -> None:
    add_look(command)
    add = command.add_argument
    add(
        "--listen",
        default="127.0.0.1:0",
        metavar="[HOST:]PORT",
        help="address of the page; a port alone is on loopback; default: a free port on loopback",
    )
    add(
        "--token_file",
        type=Path,
        metavar="FILE",
        help="file with the token, of at least 16 letters, digits, - and _; default: a new token at"
        " each start",
    )
    command.set_defaults(run=_console)


def _console(arguments: argparse.Namespace) -> int:
    import contextlib
    import ipaddress

    from trireme.console.feed import Feed
    from trireme.console.row_look import Rows
    from trireme.console.web import Console
    from trireme.launch.init import log_to_stderr
    from trireme.launch.key_folder import client_keys
    from trireme.rpc import RpcClient
    from trireme.top.job_snapshot import take_snapshot

    log_to_stderr()
    role = read_client(arguments.servers, arguments.keys)
    token = token_of(arguments.token_file)
    keys = None if role.keys is None else client_keys(Path(role.keys))
    log = logging.getLogger("trireme.console")
    every_s, timeout_s = arguments.interval_s, arguments.timeout_s
    with contextlib.ExitStack() as unstarted:
        client = RpcClient(name="console", keys=keys, on_wait=log.debug)
        unstarted.callback(client.close)
        feed = Feed(client, role.servers, interval_s=every_s, timeout_s=timeout_s)
        looks = RpcClient(name="console rows", keys=keys, on_wait=log.debug)
        rows = Rows(looks, role.servers, timeout_s=timeout_s)
        unstarted.callback(rows.close)
        console = Console(arguments.listen, feed, rows, token)
        unstarted.callback(console.stop)
        # A link to a job that is not there would show nothing.
        take_snapshot(client, role.servers, timeout_s)
        unstarted.pop_all()
    signal.signal(signal.SIGTERM, lambda *_: feed.over.set())
    feed.start()
    console.start()
    try:
        if not ipaddress.ip_address(urlsplit(console.url).hostname or "").is_loopback:
            log.warning("the console is not encrypted: its token can be read on the way")
        sys.stdout.write(f"trireme console: {console.link}\n")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):  # the usual way to end it
            feed.over.wait()
    finally:
        feed.stop()
        console.stop()
        rows.close()
    return 0


def token_of(file: Path | None) -> str:
    """The token in a file, or a new one. Raises BadRequest."""
    if file is None:
        return secrets.token_urlsafe(_TOKEN_LENGTH)
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"console: expected a token in --token_file, found {error}") from error
    if not _TOKEN.fullmatch(token):
        raise BadRequest(
            f"console: expected --token_file with at least {_TOKEN_LENGTH} letters, digits, - and"
            f" _ alone, found other content in {file}"
        )
    return token
