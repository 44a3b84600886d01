"""Limits of the system for a process."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from trireme.doctor.devices import rdma
from trireme.doctor.finding import Finding, note, ok, problem
from trireme.doctor.software import has
from trireme.drawing import size
from trireme.errors import BadRequest

_SHARED_MEMORY = "/dev/shm"
_SHARED_BYTES = 256 << 20
"""What DataLoaders with a few workers take; Docker gives 64 MiB."""


def limits(server_limits: str | None) -> Iterator[Finding]:
    """server_limits: those in TRIREME_LIMITS."""
    yield _open_files(server_limits)
    yield _locked_memory()
    yield _shared_memory()


def _open_files(server_limits: str | None) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_number(soft)} open files, {_number(hard)} if a process asks"
    if not (has("pyzmq") and has("msgpack") and has("numpy")):
        return note(f"{text}; what a server needs is unknown", "install what is missing first")
    from trireme import rpc
    from trireme.server.server_limits import parse_limits

    try:
        peers = parse_limits(server_limits or "").messages
    except BadRequest as error:
        return problem(f"TRIREME_LIMITS cannot be used: {error}", "change or unset TRIREME_LIMITS")
    needed = rpc.open_files_needed(peers)
    text += f"; a server with connections_max={peers.connections_max:,} needs {needed:,}"
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return ok(text)
    advice = "raise the hard limit: ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of docker"
    if (possible := rpc.connections_within(hard)) > 0:
        advice += f"; or give servers --limits connections_max={possible}"
    return problem(text, advice)


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and rdma():
        return note(
            f"{size(soft)} of locked memory", "NCCL locks its buffers for RDMA: ulimit -l unlimited"
        )
    return ok(f"{'any' if soft == resource.RLIM_INFINITY else size(soft)} of locked memory")


def _shared_memory() -> Finding:
    try:
        there = os.statvfs(_SHARED_MEMORY)
    except OSError as error:
        return note(f"{_SHARED_MEMORY}: {error}", "DataLoaders with workers, and NCCL, need it")
    num_bytes = there.f_frsize * there.f_blocks
    text = f"{size(num_bytes)} of shared memory in {_SHARED_MEMORY}"
    if num_bytes < _SHARED_BYTES:
        return note(text, "DataLoaders with workers, and NCCL, need more: --shm-size=1g of docker")
    return ok(text)


def _number(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else f"{limit:,}"
