"""The kernel drops packets of addresses whose connections fail again and again."""

from __future__ import annotations

import errno
import logging
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import ip_address

import pytest

from trireme.rpc.address_filter import ADDRESSES_MAX, BLOCK_S, WINDOW_S, AddressFilter, filter_of
from trireme.rpc.rate_limited_log import LINES_MAX, RateLimitedLog

ATTACH_FILTER = 26
LOG = logging.getLogger("trireme.rpc")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        yield listener


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def filter_for(listener: socket.socket, clock: Clock, failures_max: int = 3) -> AddressFilter:
    return AddressFilter(listener, failures_max, RateLimitedLog(LOG, "addresses"), clock)


def is_heard(listener: socket.socket, host: str, at: str = "127.0.0.1") -> bool:
    """Whether a connection from that address of this machine comes about."""
    with socket.socket(listener.family) as peer:
        peer.bind((host, 0))
        peer.settimeout(0.3)  # over loopback the kernel answers at once or never
        try:
            peer.connect((at, listener.getsockname()[1]))
        except TimeoutError:
            return False
    listener.accept()[0].close()
    return True


def fail(blocked: AddressFilter, host: str, count: int) -> None:
    for _ in range(count):
        blocked.failed(host)


def test_an_address_that_fails_too_often_is_blocked_for_a_while(
    listener: socket.socket, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = filter_for(listener, clock)
    fail(blocked, "127.0.0.2", 3)
    assert is_heard(listener, "127.0.0.2")
    blocked.failed("127.0.0.2")
    assert not is_heard(listener, "127.0.0.2")
    assert is_heard(listener, "127.0.0.1")
    assert "4 connections from 127.0.0.2 have failed within a second" in caplog.text
    fail(blocked, "127.0.0.3", 4)
    assert not is_heard(listener, "127.0.0.2")
    assert not is_heard(listener, "127.0.0.3")
    clock.now = BLOCK_S + 0.1
    blocked.check()
    assert len(blocked) == 0
    assert is_heard(listener, "127.0.0.2")
    assert is_heard(listener, "127.0.0.3")


def test_open_connections_and_those_of_others_are_not_affected(
    listener: socket.socket, clock: Clock
) -> None:
    """Those accepted meanwhile inherit the filter, which lets them pass."""
    with ExitStack() as stack:

        def pair(host: str) -> tuple[socket.socket, socket.socket]:
            at = ("127.0.0.1", listener.getsockname()[1])
            near = stack.enter_context(socket.create_connection(at, 20, (host, 0)))
            far = stack.enter_context(listener.accept()[0])
            far.settimeout(20)
            return near, far

        pairs = [pair("127.0.0.2")]
        blocked = filter_for(listener, clock)
        fail(blocked, "127.0.0.2", 4)
        assert not is_heard(listener, "127.0.0.2")
        pairs.append(pair("127.0.0.3"))
        fail(blocked, "127.0.0.3", 4)
        assert not is_heard(listener, "127.0.0.3")
        for near, far in pairs:
            near.sendall(b"to the server")
            assert far.recv(100) == b"to the server"
            far.sendall(b"and back")
            assert near.recv(100) == b"and back"


def test_failures_are_counted_within_a_second(listener: socket.socket, clock: Clock) -> None:
    blocked = filter_for(listener, clock)
    for _ in range(20):
        blocked.failed("127.0.0.2")
        clock.now += WINDOW_S / 2
    assert len(blocked) == 0


@pytest.fixture
def dual() -> Iterator[socket.socket]:
    """Listens for IPv6, and for IPv4 too."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        yield listener


def test_ipv6_addresses_are_one_if_their_first_half_is(dual: socket.socket, clock: Clock) -> None:
    blocked = filter_for(dual, clock, failures_max=1)
    blocked.failed("2001:db8::1%lo")
    blocked.failed("2001:db8:0:1::1")
    assert len(blocked) == 0
    blocked.failed("::2")
    blocked.failed("::3")
    assert len(blocked) == 1
    assert not is_heard(dual, "::1", "::1")
    assert is_heard(dual, "::ffff:127.0.0.2", "::ffff:127.0.0.1")
    fail(blocked, "::ffff:127.0.0.2", 2)
    assert not is_heard(dual, "::ffff:127.0.0.2", "::ffff:127.0.0.1")
    assert is_heard(dual, "::ffff:127.0.0.3", "::ffff:127.0.0.1")
    clock.now = BLOCK_S + 0.1
    blocked.check()
    assert is_heard(dual, "::1", "::1")


def test_local_ipv6_addresses_are_each_their_own(dual: socket.socket, clock: Clock) -> None:
    """All hosts of such a network have the first half in common."""
    blocked = filter_for(dual, clock, failures_max=1)
    for host in ("fe80::1%lo", "fe80::2%lo", "fd00:1:2:3::1", "fd00:1:2:3::2"):
        blocked.failed(host)
    assert len(blocked) == 0
    blocked.failed("fe80::1%lo")
    blocked.failed("fd00:1:2:3::1")
    assert len(blocked) == 2


def test_a_filter_tells_whole_ipv6_addresses_apart(dual: socket.socket, clock: Clock) -> None:
    blocked = filter_for(dual, clock)
    for others in (["::2"], ["::1:0:1"], ["1::1"], ["::2", "::3"]):
        blocked._attach(filter_of([ip_address(host).packed for host in others]))
        assert is_heard(dual, "::1", "::1"), others
        blocked._attach(filter_of([ip_address(host).packed for host in [*others, "::1", "::4"]]))
        assert not is_heard(dual, "::1", "::1"), others


def test_many_addresses_fit_into_a_filter(listener: socket.socket, clock: Clock) -> None:
    blocked = filter_for(listener, clock, failures_max=1)
    for number in range(1000):
        fail(blocked, f"10.1.{number // 250}.{number % 250}", 2)
    fail(blocked, "127.0.0.2", 2)
    assert len(blocked) == ADDRESSES_MAX
    assert is_heard(listener, "127.0.0.1")
    assert not is_heard(listener, "127.0.0.2")
    for number in range(1000):
        fail(blocked, f"2001:db8:{number:x}::1", 2)
    assert len(blocked) == ADDRESSES_MAX
    assert is_heard(listener, "127.0.0.2")
    assert len(filter_of([bytes(16)] * ADDRESSES_MAX)) < 4096


def test_who_gets_the_socket_next_hears_all(listener: socket.socket, clock: Clock) -> None:
    """A socket that was handed over outlives the process that blocked somebody."""
    killed = filter_for(listener, clock)
    fail(killed, "127.0.0.2", 4)
    assert not is_heard(listener, "127.0.0.2")
    successor = filter_for(listener, clock)
    assert is_heard(listener, "127.0.0.2")
    fail(successor, "127.0.0.2", 4)
    successor.close()
    assert is_heard(listener, "127.0.0.2")


def test_where_the_kernel_takes_no_filter_the_log_says_so_and_all_may_connect(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(socket.socket):
        def setsockopt(self, *_: object) -> None:  # type: ignore[override]
            raise OSError(errno.ENOPROTOOPT, "Protocol not available")

    with Refusing() as listener:
        blocked = filter_for(listener, clock)
        fail(blocked, "127.0.0.2", 10)
        blocked.check()
        blocked.close()
    assert len(blocked) == 0
    (line,) = (record.getMessage() for record in caplog.records)
    assert "cannot block addresses, so all may connect" in line
    assert "Protocol not available" in line


class Narrow(socket.socket):
    """Refuses filters while `refuses` is an error, or those of too many instructions."""

    refuses = 0
    instructions_max = 1 << 16

    def setsockopt(self, level: int, option: int, value: object) -> None:  # type: ignore[override]
        if option == ATTACH_FILTER:
            assert isinstance(value, bytes)
            if self.refuses or struct.unpack("@HP", value)[0] > self.instructions_max:
                raise OSError(self.refuses or errno.ENOMEM, "refused")
        super().setsockopt(level, option, value)  # type: ignore[call-overload]


@pytest.fixture
def narrow() -> Iterator[Narrow]:
    with Narrow() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        yield listener


def test_a_filter_that_cannot_be_replaced_does_not_stay(
    narrow: Narrow, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = filter_for(narrow, clock)
    fail(blocked, "127.0.0.2", 4)
    assert not is_heard(narrow, "127.0.0.2")
    narrow.refuses = errno.EPERM
    fail(blocked, "127.0.0.3", 4)
    assert len(blocked) == 0
    assert is_heard(narrow, "127.0.0.2")
    assert "cannot block addresses, so all may connect" in caplog.text


def test_where_few_addresses_fit_the_newest_are_blocked(
    narrow: Narrow, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = filter_for(narrow, clock)
    narrow.instructions_max = 20
    for number in range(2, 40):
        fail(blocked, f"127.0.0.{number}", 4)
    assert not is_heard(narrow, "127.0.0.39")
    assert 1 < len(blocked) < 10
    assert is_heard(narrow, "127.0.0.2")
    assert "the older half may connect again" in caplog.text
    clock.now = BLOCK_S + 0.1
    blocked.check()
    assert is_heard(narrow, "127.0.0.39")


def test_where_no_address_fits_all_may_connect(narrow: Narrow, clock: Clock) -> None:
    blocked = filter_for(narrow, clock)
    fail(blocked, "127.0.0.2", 4)
    narrow.instructions_max = 0
    fail(blocked, "127.0.0.3", 4)
    assert len(blocked) == 0
    assert is_heard(narrow, "127.0.0.2")
    assert is_heard(narrow, "127.0.0.3")


def test_at_its_end_all_may_connect_whatever_was_refused(narrow: Narrow, clock: Clock) -> None:
    blocked = filter_for(narrow, clock)
    narrow.refuses = errno.EPERM
    fail(blocked, "127.0.0.2", 4)  # from now on it is taken for impossible
    narrow.refuses = 0
    blocked._attach(filter_of([ip_address("127.0.0.2").packed]))
    blocked.close()
    assert is_heard(narrow, "127.0.0.2")


def test_a_log_that_peers_can_fill_stays_short(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    sparse = RateLimitedLog(LOG, "strangers", clock)
    left_out = f"{1000 - LINES_MAX} more lines like these, about strangers"

    def burst() -> list[str]:
        caplog.clear()
        for number in range(1000):
            sparse.warning("line %d", number)
        sparse.check()
        assert len(caplog.records) == LINES_MAX
        assert sparse.is_behind
        return messages()

    def messages() -> list[str]:
        return [record.getMessage() for record in caplog.records[LINES_MAX:]]

    burst()
    clock.now = 60.0
    sparse.check()
    assert messages() == [left_out]
    sparse.warning("another")
    assert messages() == [left_out, "another"]
    clock.now = 120.0
    burst()
    clock.now = 180.0
    sparse.warning("another")
    assert messages() == [left_out, "another"]
    clock.now = 240.0
    burst()
    sparse.flush()
    sparse.warning("another")
    clock.now = 300.0
    sparse.check()
    assert messages() == [left_out, "1 more lines like these, about strangers"]
