"""Errors of servers that are not those that somebody relies on."""

from __future__ import annotations

from trireme.errors import Corruption, SchemaMismatch


def lost() -> Corruption:
    """A server at the address of one that had more."""
    return Corruption(
        "server: expected the rows and blocks that were here, found a server that has begun anew"
        " without them: what no checkpoint holds is lost. Start the job again and load the newest"
        " checkpoint; --durability process keeps a server's state when it is killed"
    )


def lost_coordinator(worker: int) -> Corruption:
    """A coordinator that does not know a worker that has joined one."""
    return Corruption(
        f"coordinator: expected worker {worker} to have joined, found a coordinator that has begun"
        " anew without what it knew. Start the job again and load the newest checkpoint;"
        " --durability process keeps the state of server 0 when it is killed"
    )


def another_job(here: tuple[str, int], found: tuple[str, int], where: str) -> SchemaMismatch:
    """A server that holds the state of another job, or of another server.

    here, found: job, and which server of it. where: the folder of the state, or empty.
    """
    kept = f", in {where}" if where else ""
    return SchemaMismatch(
        f"server: expected job {here[0]} and server {here[1]} of it, whose state is here{kept},"
        f" found job {found[0]} and server {found[1]}; end the other job first, or start this one"
        " with another --state_dir"
    )
