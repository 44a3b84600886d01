"""Two network namespaces with a slow link between them, which has a rate and a delay.

The link is a thread that passes packets from one TUN device to another. It needs neither a kernel
with netem nor a second machine, but Linux, root, iproute2 and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Absent

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 65000
_BACKLOG_BYTES_MAX = 1 << 18
"""Of a direction; more waits in the sender's device, which tells TCP to wait."""
_TURN_S = 0.2


@dataclass(frozen=True)
class End:
    """One side of a link. prefix: runs a command there."""

    address: str
    prefix: tuple[str, ...]


@dataclass
class Work:
    """The traffic of a link, known when it has ended. num_bytes: sent by the first end and by the
    second.
    """

    num_bytes: tuple[int, int] = (0, 0)
    cpu_s: float = 0.0


@contextmanager
def slow_link(*, delay_s: float, bits_per_s: float) -> Iterator[tuple[tuple[End, End], Work]]:
    """The two ends of a link, and its traffic.

    Args:
        delay_s: of each direction.

    Raises:
        Absent: this machine or user cannot make a link.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        raise Absent("a slow link takes root, iproute2 and /dev/net/tun")
    with ExitStack() as stack:
        ends, devices = [], []
        for side, own, other in ((0, 1, 2), (1, 2, 1)):
            name = f"bench{os.getpid()}-{side}"
            device = f"tb{os.getpid() % 10**8}{side}"
            devices.append(_open_tun(device))
            stack.callback(os.close, devices[-1])
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _ip("link", "set", device, "netns", name, "mtu", str(_MTU))
            for command in (
                ("addr", "add", f"10.77.0.{own}", "peer", f"10.77.0.{other}", "dev", device),
                ("link", "set", device, "up"),
                ("link", "set", "lo", "up"),
            ):
                _ip("-n", name, *command)
            ends.append(End(f"10.77.0.{own}", ("ip", "netns", "exec", name)))
        stop, work = threading.Event(), Work()
        there, back = (_Direction(delay_s, bits_per_s) for _ in range(2))
        ways = devices, (there, back), work, stop
        relay = threading.Thread(target=_pass_on, args=ways, daemon=True)
        relay.start()
        stack.callback(relay.join)
        stack.callback(stop.set)
        yield (ends[0], ends[1]), work


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise Absent(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _open_tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        request = struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(device, _TUNSETIFF, request)
    except OSError as error:
        os.close(device)
        raise Absent(f"a TUN device: {error.strerror}") from error
    return device


class _Direction:
    """Packets in flight in one direction."""

    def __init__(self, delay_s: float, bits_per_s: float) -> None:
        self._delay_s, self._s_per_byte = delay_s, 8 / bits_per_s
        self._is_free_at = 0.0
        self._packets: deque[tuple[float, bytes]] = deque()
        self._num_bytes = 0
        self.num_bytes_put = 0

    @property
    def has_room(self) -> bool:
        return self._num_bytes < _BACKLOG_BYTES_MAX

    @property
    def due(self) -> float:
        """Arrival time of the first packet; infinity if there is none."""
        return self._packets[0][0] if self._packets else float("inf")

    def put(self, packet: bytes, now: float) -> None:
        self._is_free_at = max(self._is_free_at, now) + len(packet) * self._s_per_byte
        self._packets.append((self._is_free_at + self._delay_s, packet))
        self._num_bytes += len(packet)
        self.num_bytes_put += len(packet)

    def take(self) -> bytes:
        _, packet = self._packets.popleft()
        self._num_bytes -= len(packet)
        return packet


def _pass_on(
    devices: list[int],
    directions: tuple[_Direction, _Direction],
    work: Work,
    stop: threading.Event,
) -> None:
    while not stop.is_set():
        open_for = [device for device, way in zip(devices, directions, strict=True) if way.has_room]
        due = min(way.due for way in directions)
        wait_s = min(max(due - time.monotonic(), 0.0), _TURN_S)
        readable, _, _ = select.select(open_for, [], [], wait_s)
        now = time.monotonic()
        for source, way in zip(devices, directions, strict=True):
            while source in readable and way.has_room:
                try:
                    way.put(os.read(source, 1 << 17), now)
                except BlockingIOError:
                    break
        for target, way in zip(reversed(devices), directions, strict=True):
            while way.due <= now:
                os.write(target, way.take())
    there, back = directions
    work.num_bytes, work.cpu_s = (there.num_bytes_put, back.num_bytes_put), time.thread_time()
