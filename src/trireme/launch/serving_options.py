"""What a process that serves is told beside its place, by its environment. Loads no torch."""

from pathlib import Path
from typing import Any

from trireme.errors import BadRequest
from trireme.launch.process_role import ProcessRole


def serving_options(process: ProcessRole) -> dict[str, Any]:
    """Options of `serve` and `Host` alike. Raises BadRequest."""
    from trireme.launch.key_folder import server_keys
    from trireme.server.row_tier import make_row_tier
    from trireme.server.server_limits import parse_limits
    from trireme.server.store_hosts import parse_hosts

    return {
        "listen_fd": process.listen_fd,
        "keys": None if process.keys is None else server_keys(Path(process.keys)),
        "insecure": process.insecure,
        "root": Path.cwd() if process.root is None else Path(process.root),
        "limits": parse_limits(process.limits or ""),
        "store_hosts": parse_hosts(process.store_hosts or ""),
        "timeout_s": process.timeout_s,
        "tier": make_row_tier(process.memory, process.ssd_dir, process.timeout_s),
    }


def check_settings(process: ProcessRole) -> None:
    """Raises BadRequest: a setting of another process on this machine is wrong, which it would find
    in every start.
    """
    of_servers = (process.memory, process.ssd_dir, process.limits, process.store_hosts)
    if not any((*of_servers, process.root, process.keys, process.interface)):
        return  # what checks them takes a quarter of a second to load
    from trireme.launch.key_folder import client_keys, server_keys
    from trireme.rpc import interface_address

    if process.interface is not None:
        interface_address(process.interface)
    if process.keys is not None and process.role != "server":
        client_keys(Path(process.keys))
    if process.keys is not None and process.role == "heter":
        server_keys(Path(process.keys))
    if process.role == "server" or process.hosts:
        options = serving_options(process)
        if (tier := options["tier"]) is not None:
            tier.close()
        if not options["root"].is_dir():
            raise BadRequest(f"launch: expected root to be a folder, found {process.root!r}")
