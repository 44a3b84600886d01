"""A method that answers with what it gets."""

from __future__ import annotations

from trireme.rpc import Reply, Request


def echo(request: Request) -> Reply:
    return Reply(request.body, request.arrays)
