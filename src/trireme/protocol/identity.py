"""Errors for a server or coordinator whose state is not the one that a worker knew."""

from trireme.errors import Corruption, SchemaMismatch


def lost() -> Corruption:
    """A server that has started without the state of its predecessor."""
    return Corruption(
        "server: expected the rows and blocks that were here, found a server that has started over"
        " without them: what no checkpoint holds is lost. Start the job again and load the newest"
        " checkpoint; --durability process keeps a server's state when it is killed"
    )


def lost_coordinator(worker: int) -> Corruption:
    """A coordinator that has started without the state of its predecessor."""
    return Corruption(
        f"coordinator: expected worker {worker} to have joined, found a coordinator that has begun"
        " anew without what it knew. Start the job again and load the newest checkpoint;"
        " --durability process keeps the state of server 0 when it is killed"
    )


def another_job(own: tuple[str, int], asked: tuple[str, int], where: str) -> SchemaMismatch:
    """A server with the state of another job or server. own, asked: (job, index of the server).
    where: the state folder, or empty.
    """
    kept = f", in {where}" if where else ""
    return SchemaMismatch(
        f"server: expected job {own[0]} and server {own[1]} of it, whose state is here{kept},"
        f" found job {asked[0]} and server {asked[1]}; end the other job first, or start this one"
        " with another --state_dir"
    )
