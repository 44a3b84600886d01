"""Options of several commands."""

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trireme.errors import BadRequest
from trireme.launch import fact_values
from trireme.launch.environment import read_facts
from trireme.launch.process_role import ProcessRole, read_role
from trireme.protocol.job_limits import SECONDS_MAX

KEYS = """
Keys: a server's folder has server.key and clients.pub (the admitted public keys, one per line), a
worker's folder has client.key and server.pub. `trireme keys` writes them.
"""


def add_config(
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
        help="values that override those of the file",
    )


def add_look(command: argparse.ArgumentParser) -> None:
    """The options of commands that look at a running job."""
    add = command.add_argument
    add("--servers", metavar="HOST:PORT,...", help="servers of the job, the first one first")
    add("--keys", metavar="DIR", help="folder with the keys of an admitted client")
    add("--interval_s", type=seconds, default=2.0, metavar="S", help="seconds per view; default: 2")
    add(
        "--timeout_s", type=seconds, default=10.0, metavar="S", help="seconds per call; default: 10"
    )


def read_client(servers: str | None, keys: str | None) -> ProcessRole:
    """Whose servers a command looks at. Raises BadRequest: no servers are named."""
    place: dict[str, Any] = {"role": "worker", "index": 0, "num": 1}
    if servers is None and "servers" not in read_facts(None, place):
        raise BadRequest(
            "expected --servers HOST:PORT,... of a running job, which trireme launch prints, or"
            " TRIREME_SERVERS, found neither"
        )
    return read_role(**place, servers=servers, keys=keys)


def add_infer(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--infer", action="store_true", help="evaluate saved epochs instead of training"
    )


def add_common(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--timeout_s",
        type=seconds,
        metavar="S",
        help=f"seconds to wait for other processes; default: {fact_values.TIMEOUT_S_DEFAULT:g}",
    )
    add("--keys", metavar="DIR", help="encrypt and authenticate with the keys in this folder")
    add(
        "--root",
        metavar="DIR",
        help="servers use local files only in this folder; default: the working directory",
    )
    add(
        "--limits",
        metavar="NAME=N,...",
        help="limits on what peers can make a server hold, such as"
        " tables_max=8,table_bytes_max=64GiB; docs/security.md lists the names",
    )
    add(
        "--memory",
        metavar="BYTES",
        help="memory for the tables of a server, such as 20GiB; the least used rows beyond it go to"
        " --ssd_dir; default: all rows are in memory",
    )
    add(
        "--ssd_dir",
        metavar="DIR,...",
        help="folders on SSD for the rows beyond --memory; several are used at once",
    )
    add(
        "--store_hosts",
        metavar="HOST[:PORT],...",
        help="hosts that servers may connect to when a worker names them, in endpoint_url and the"
        " like, hdfs:// or webhdfs://; default: none",
    )
    add("--insecure", action="store_const", const=True, help="listen beyond loopback without keys")
    add(
        "--metrics",
        metavar="[HOST:]PORT",
        help="serve /metrics and /healthz at this address; port 0 chooses a free one; default: off",
    )
    add(
        "--durability",
        choices=fact_values.DURABILITIES,
        help="what acknowledged pushes survive: nothing (the default), the end of the server's"
        " process, or also a power loss of its machine",
    )
    add(
        "--state_dir",
        metavar="DIR",
        type=Path,
        help="folder for the state that --durability keeps; launch creates one folder per server in"
        " it, by default in LOG_DIR/state",
    )
    add(
        "--log_bytes",
        type=int,
        metavar="N",
        help="a server writes a snapshot when its log has this many bytes, or as many as the last"
        " snapshot if that is more; default: 2 GiB",
    )
    add(
        "--skip_records",
        metavar="FILE:OFFSET,...",
        help="leave out these records of a server's log, which a failed start has named, if they"
        " fail again",
    )


def write_lines(lines: Iterable[str]) -> None:
    """To standard output, each with its end."""
    sys.stdout.writelines(f"{line}\n" for line in lines)


def picked(arguments: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The arguments that are fields of a dataclass, by name."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def number(text: str) -> float:
    """The number of a text; NaN for another text."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def seconds(text: str) -> float:
    if not 0 < number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds > 0, found {text!r}")
    if number(text) > SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"expected at most {SECONDS_MAX:g} s, found {text!r}")
    return number(text)
