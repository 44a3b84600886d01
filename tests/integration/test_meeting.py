"""Workers that host the rows begin together, in processes of one start."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from trireme import _core, rpc
from trireme.errors import BadRequest, DeadlineExceeded
from trireme.job.host import Host
from trireme.job.ranks import AddressMeeting

LONG_S, SHORT_S = 30.0, 1.0


@contextmanager
def host(listen: str = "127.0.0.1:0") -> Iterator[Host]:
    one = Host(_core.Pool(1), listen=listen)
    try:
        yield one
    finally:
        one.end(waits=False)


def meet(servers: list[str], workers: list[int], timeout_s: float) -> None:
    """Of these workers, at the same time."""
    with ThreadPoolExecutor(len(workers)) as threads:
        meetings = [AddressMeeting(servers, worker, timeout_s, None) for worker in workers]
        for future in [threads.submit(meeting, servers[0]) for meeting in meetings]:
            assert future.result() == tuple(servers)


def test_a_new_worker_waits_for_the_end_of_a_process_of_the_former_start() -> None:
    with host() as old:
        first = old.endpoint
        with host() as died:
            second = died.endpoint
            meet([first, second], [0, 1], LONG_S)
        with (
            host(second),
            pytest.raises(DeadlineExceeded, match="the end of processes of a former start"),
        ):
            meet([first, second], [1], SHORT_S)
    with host(first), host(second):
        meet([first, second], [0, 1], LONG_S)


def test_the_workers_that_do_not_come_are_named() -> None:
    with host() as one, host() as gone:
        servers = [one.endpoint, gone.endpoint]
        gone.end(waits=False)
        with pytest.raises(DeadlineExceeded, match=rf"not ready: 1 at {servers[1]}$"):
            meet(servers, [0], SHORT_S)


@pytest.mark.parametrize(
    "wrong",
    [{"worker": 2}, {"worker": -1}, {"num_workers": 10**6}, {"view": "x" * 65}, {"view": 1}],
)
def test_a_wrong_message_is_refused(wrong: dict[str, object]) -> None:
    body = {"worker": 0, "num_workers": 2, "view": "", **wrong}
    with (
        host() as one,
        rpc.RpcClient(name="test") as client,
        pytest.raises(BadRequest, match="expected"),
    ):
        client.call(one.endpoint, "server.meet", body, timeout_s=LONG_S)
