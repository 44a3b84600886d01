"""The hosts of stores that a server connects to when a peer names them.

A location such as webhdfs://HOST, and options such as endpoint_url, could make a server call any
host that it reaches. So such a host must be listed in the server's own configuration. The public
services of s3, gs and the like need no entry, nor does what the server's environment names.
"""

import re
from collections.abc import Iterator
from typing import Any

from trireme.errors import BadRequest

HINT = "--store_hosts or TRIREME_STORE_HOSTS of the servers lists those that they may connect to"
_ADDRESS = re.compile(r"(?:\w+://)?([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:\d+)?(?:/[\w./-]*)?")
_NAMES = re.compile("host|endpoint|proxy|proxies", re.IGNORECASE)
_ACCOUNT = re.compile("[A-Za-z0-9]*")

StoreHosts = frozenset[str] | None
"""HOST or HOST:PORT each; None: any, where a process serves nobody else."""


def parse_hosts(text: str) -> frozenset[str]:
    """Parse "HOST,HOST:PORT,...". Raises BadRequest."""
    hosts = [host.strip().lower() for host in text.split(",") if host.strip()]
    for host in hosts:
        if (match := _ADDRESS.fullmatch(host)) is None or host != match[1] + (match[2] or ""):
            raise BadRequest(f"store_hosts: expected HOST or HOST:PORT, found {host!r}")
    return frozenset(hosts)


def check_hosts(location: str, options: Any, hosts: StoreHosts) -> None:
    """Raises BadRequest: the location or an option names a host that is not listed."""
    if hosts is None:
        return
    protocol, _, rest = location.partition("://")
    named = list(_addresses("storage_options", options))
    if protocol in ("hdfs", "webhdfs") and (host := rest.partition("/")[0]):
        named.append(("the location", host.rpartition("@")[2]))
    for name, address in named:
        match = _ADDRESS.fullmatch(address)
        host = "" if match is None else match[1].lower()
        port = "" if match is None else match[2] or ""
        if not {host, host + port} & hosts:
            raise BadRequest(
                f"path: expected {name} of {location[:200]!r} with a host among {sorted(hosts)},"
                f" found {address[:200]!r}; {HINT}"
            )


def _addresses(name: str, value: Any, *, is_address: bool = False) -> Iterator[tuple[str, str]]:
    """(option, address) of each host in options, however deep."""
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if isinstance(value, dict):
        for key, inner in value.items():
            is_named = is_address or _NAMES.search(str(key)) is not None
            yield from _addresses(str(key), inner, is_address=is_named)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _addresses(name, inner, is_address=is_address)
    elif isinstance(value, str):
        if name == "connection_string":  # of Azure: NAME=VALUE;...
            pairs = dict(part.partition("=")[::2] for part in value.split(";"))
            yield from _addresses(name, pairs)
        elif (
            is_address
            or "://" in value
            or (name.lower().replace("_", "") == "accountname" and not _ACCOUNT.fullmatch(value))
        ):
            yield name, value
