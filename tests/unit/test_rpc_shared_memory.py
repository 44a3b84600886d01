"""Large arrays lie in memory that a client shares with a server on its machine."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conditions import wait_until
from tests.echo import echo
from tests.proxy import Faults, Proxy
from tests.seeds import SEED, named_in_failure
from trireme.errors import DeadlineExceeded
from trireme.rpc import Call, Deferred, Limits, Reply, Request, RpcClient, Server, frames
from trireme.rpc.connection import Connection, PendingCall
from trireme.rpc.shared_memory import ARRAY_BYTES_MIN, SharedMemory

MIB = 1 << 20


def memory_of(client: RpcClient) -> SharedMemory:
    [connection] = client._connections.values()
    assert connection._shared is not None
    return connection._shared


def num_shared(server: Server) -> int:
    return sum(peer.shared is not None for peer in server._socket.peers)


def large(value: int, num_bytes: int = 4 * ARRAY_BYTES_MIN) -> np.ndarray:
    return np.full(num_bytes, value, np.uint8)


def mapped() -> set[str]:
    """The names of the memory that this process can see."""
    return set(re.findall(r"/memfd:(trireme-\w+)", Path("/proc/self/maps").read_text()))


def is_all_free(memory: SharedMemory) -> bool:
    return not memory._allocated and memory._free == [(0, len(memory.bytes))]


# ---- the same calls, with and without ----


@pytest.mark.parametrize(
    ("at_client", "at_server", "shares"),
    [(1 << 26, 1 << 26, True), (1 << 22, 1 << 26, True), (1 << 26, 1 << 22, True),
     (0, 1 << 26, False), (1 << 26, 0, False)],
)  # fmt: skip
def test_random_calls_arrive_as_they_are(at_client: int, at_server: int, shares: bool) -> None:
    rng = random.Random(SEED)
    dtypes = list(frames.DTYPES.values())

    def some() -> np.ndarray:
        num = rng.choice((0, 1, 100, 9_000, 70_000, 300_000))
        array = np.frombuffer(rng.randbytes(num * 8), rng.choice(dtypes[1:]))
        return array.reshape(-1, 2) if array.size % 2 == 0 else array

    server = Server(
        "127.0.0.1:0", {"echo": echo}, name="s", limits=Limits(shared_bytes_max=at_server)
    )
    limits = Limits(shared_bytes_max=at_client)
    with named_in_failure(), server, RpcClient(name="w", limits=limits) as client:
        for _ in range(30):
            calls = [
                Call(server.endpoint, "echo", {"i": i}, [some() for _ in range(rng.randrange(5))])
                for i in range(rng.randrange(1, 6))
            ]
            replies = client.call_all(calls, timeout_s=60)
            for call, reply in zip(calls, replies, strict=True):
                assert reply.body == call.body
                for sent, got in zip(call.arrays, reply.arrays, strict=True):
                    assert (sent.dtype, sent.shape) == (got.dtype, got.shape)
                    assert sent.tobytes() == got.tobytes()
                    assert not got.flags.writeable
        usage = server.usage()
        assert (num_shared(server) == 1) is shares
        assert (usage.num_bytes, usage.num_faults) == (0, 0)
        if shares:
            memory = memory_of(client)
            assert memory._allocated == {}
            assert memory._free == [(0, min(at_client, at_server))]
            assert memory._num_committed > 0


def test_traffic_and_credit_count_shared_bytes(server: Server) -> None:
    with RpcClient(name="w") as client:
        for i in range(3):
            client.call(server.endpoint, "echo", arrays=[large(i)], timeout_s=60)
        usage = server.usage()
    assert usage.num_bytes_in > 3 * 4 * ARRAY_BYTES_MIN
    assert usage.num_bytes_out > 3 * 4 * ARRAY_BYTES_MIN
    held: list[int] = []

    def note(_: Request) -> None:
        held.append(small.usage().num_bytes)

    small = Server("127.0.0.1:0", {"note": note}, name="s", limits=Limits(inflight_bytes_max=MIB))
    with small, RpcClient(name="w") as client:
        calls = [Call(small.endpoint, "note", {}, [large(i, MIB * 2 // 5)]) for i in range(9)]
        client.call_all(calls, timeout_s=60)
    assert MIB * 2 // 5 < max(held) <= MIB


# ---- who owns what, and when ----


def test_a_handler_may_keep_its_arrays_and_the_client_cannot_change_them() -> None:
    kept: list[np.ndarray] = []

    def keep(request: Request) -> None:
        kept.extend(request.arrays)

    with (
        Server("127.0.0.1:0", {"keep": keep}, name="s") as server,
        RpcClient(name="w") as client,
    ):
        for i in range(5):
            client.call(server.endpoint, "keep", arrays=[large(i)], timeout_s=60)
        memory_of(client).bytes[:] = 77
        assert num_shared(server) == 1
    for i, array in enumerate(kept):
        np.testing.assert_array_equal(array, large(i))


def test_a_reply_stays_as_it_is(server: Server) -> None:
    with RpcClient(name="w") as client:
        got = [
            client.call(server.endpoint, "echo", arrays=[large(i)], timeout_s=60).arrays[0]
            for i in range(6)
        ]
        assert memory_of(client)._reply_bytes["echo"] >= 4 * ARRAY_BYTES_MIN
        memory_of(client).bytes[:] = 77
    for i, array in enumerate(got):
        np.testing.assert_array_equal(array, large(i))


def test_one_reply_may_answer_several_calls() -> None:
    reply = Reply({}, [large(5)])
    with Server("127.0.0.1:0", {"get": lambda _: reply}, name="s") as server:
        for _ in range(2):
            with RpcClient(name="w") as client:
                for _ in range(3):
                    [got] = client.call(server.endpoint, "get", timeout_s=60).arrays
                    np.testing.assert_array_equal(got, large(5))
    assert not reply.places


def test_a_reply_after_its_deadline_touches_nothing() -> None:
    """The client has given the room to other calls by then."""
    late: list[Deferred] = []

    def wait(request: Request) -> Reply | Deferred:
        if request.body["at_once"]:
            return Reply({}, [large(1)])
        late.append(Deferred())
        return late[-1]

    with (
        Server("127.0.0.1:0", {"wait": wait}, name="s") as server,
        RpcClient(name="w") as client,
    ):
        client.call(server.endpoint, "wait", {"at_once": True}, timeout_s=60)
        memory = memory_of(client)
        with pytest.raises(DeadlineExceeded, match="no answer was ready"):
            client.call(server.endpoint, "wait", {"at_once": False}, timeout_s=2)
        assert memory_of(client) is memory
        assert is_all_free(memory)
        memory.bytes[:] = 7
        late[0].reply(Reply({}, [large(2)]))
        np.testing.assert_array_equal(memory.bytes, large(7, len(memory.bytes)))


def test_a_lost_connection_takes_its_memory_with_it(server: Server) -> None:
    """Calls are sent again with other memory, and nothing of the old is given back to it."""
    rng = random.Random(SEED)
    with named_in_failure(), RpcClient(name="w") as client:
        seen = set()
        for i in range(30):
            arrays = [large(i, rng.randrange(1, 9) * ARRAY_BYTES_MIN) for _ in range(3)]
            reply = client.call(server.endpoint, "echo", arrays=arrays, timeout_s=60)
            assert all(map(np.array_equal, reply.arrays, arrays))
            seen.add(memory_of(client)._name)
            assert memory_of(client)._allocated == {}
            if i % 3 == 2:
                [connection] = client._connections.values()
                connection._lose("the test has cut it")
        assert len(seen) == 10
    wait_until(lambda: not seen & mapped())


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (SharedMemory, "_allocate"), (SharedMemory, "_commit"), (SharedMemory, "put"),
        (SharedMemory, "reserve"), (SharedMemory, "free"), (SharedMemory, "note_reply"),
        (SharedMemory, "offer"), (SharedMemory, "use"), (PendingCall, "pack"),
        (PendingCall, "note_buffers"),
        (Connection, "put"), (Connection, "_connect"), (Connection, "_welcomed"),
        (Connection, "_take"), (Connection, "abandon"), (Connection, "close"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_first", [True, False])
def test_ctrl_c_anywhere_leaves_no_call_and_loses_no_memory(
    monkeypatch: pytest.MonkeyPatch, where: type, name: str, is_first: bool
) -> None:
    seen: list[int] = []

    def note(request: Request) -> Reply:
        seen.append(request.body["i"])
        return Reply({}, request.arrays)

    real = getattr(where, name)

    def interrupted(*args: Any, **more: Any) -> Any:
        real(*args, **more)
        raise KeyboardInterrupt

    with (
        Server("127.0.0.1:0", {"note": note}, name="s") as server,
        RpcClient(name="w") as client,
    ):

        def call(i: int) -> None:
            calls = [Call(server.endpoint, "note", {"i": i}, [large(i)]) for _ in range(2)]
            for reply in client.call_all(calls, timeout_s=20):
                np.testing.assert_array_equal(reply.arrays[0], large(i))

        if not is_first:
            call(0)
        if name in ("_connect", "close"):  # a deadline closes, and the next call connects
            for connection in client._connections.values():
                connection._is_sending = True
        with monkeypatch.context() as patched:
            patched.setattr(where, name, interrupted)
            with contextlib.suppress(KeyboardInterrupt):
                call(1)
        wait_until(lambda: server.usage().connections <= 1)
        del seen[:]
        call(2)
        call(3)
        assert set(seen) <= ({2, 3} if where is Connection and name == "put" else {1, 2, 3})
        assert seen[-4:] == [2, 2, 3, 3]
        assert is_all_free(memory_of(client))


def test_the_last_file_descriptors_are_left_to_connections(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory takes two of them, a connection four."""
    before = len(os.listdir("/proc/self/fd"))
    os.close(lowest := os.dup(0))  # that is free
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2 * lowest - 1,) * 2)
    with pytest.raises(OSError, match="file descriptors are for connections"):
        SharedMemory(4 * MIB)
    assert len(os.listdir("/proc/self/fd")) == before
    with RpcClient(name="w") as client:
        [got] = client.call(server.endpoint, "echo", arrays=[large(3)], timeout_s=60).arrays
        np.testing.assert_array_equal(got, large(3))
        assert num_shared(server) == 0
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    SharedMemory(4 * MIB).close()


def test_memory_that_is_dropped_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for i in range(20):
        memory = SharedMemory(4 * MIB)
        memory.bytes[:] = i
        del memory
    assert len(os.listdir("/proc/self/fd")) == before


def test_peers_of_other_machines_share_nothing(server: Server) -> None:
    with (
        Proxy(server.endpoint, Faults(seed=SEED)) as proxy,
        RpcClient(name="w") as client,
    ):
        [got] = client.call(proxy.endpoint, "echo", arrays=[large(3)], timeout_s=60).arrays
        np.testing.assert_array_equal(got, large(3))
        assert num_shared(server) == 0


def test_a_killed_client_leaves_nothing(server: Server) -> None:
    program = (
        "import sys, time, numpy as np\n"
        "from trireme.rpc import RpcClient\n"
        "client = RpcClient(name='w')\n"
        "array = np.ones(1 << 20)\n"
        "client.call(sys.argv[1], 'echo', {}, [array], timeout_s=60)\n"
        "print('called', flush=True)\n"
        "while True: client.call(sys.argv[1], 'echo', {}, [array], timeout_s=60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, server.endpoint], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"called\n"
        assert num_shared(server) == 1
        before = mapped()
        process.kill()
    wait_until(lambda: num_shared(server) == 0 and mapped() < before)
    assert server.usage().num_bytes == 0


def test_a_child_of_a_fork_that_drops_it_loses_nothing_else() -> None:
    """What the child has mapped since must not lie where it would unmap the memory."""
    memory = SharedMemory(8 * MIB)
    address = memory.bytes.ctypes.data
    if (child := os.fork()) == 0:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
        own = libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(8 * MIB), 3, flags, -1, 0)
        del memory
        is_lost = own == address and f"{address:x}-" not in Path("/proc/self/maps").read_text()
        os._exit(is_lost)
    memory.close()
    assert os.waitpid(child, 0)[1] == 0


def test_without_memfd_create_calls_go_through_the_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python that was built for an old system has neither it nor its constants."""
    monkeypatch.delattr(os, "memfd_create")
    program = (
        "import fcntl, os, sys\n"
        "del os.memfd_create, os.MFD_CLOEXEC, os.MFD_ALLOW_SEALING\n"
        "for name in [n for n in dir(fcntl) if 'SEAL' in n]: delattr(fcntl, name)\n"
        "import numpy as np\n"
        "from trireme.rpc import RpcClient\n"
        "client = RpcClient(name='w')\n"
        "client.call(sys.argv[1], 'echo', {}, [np.ones(1 << 20)], timeout_s=60)\n"
    )
    with RpcClient(name="w") as client:
        [got] = client.call(server.endpoint, "echo", arrays=[large(3)], timeout_s=60).arrays
    np.testing.assert_array_equal(got, large(3))
    subprocess.run([sys.executable, "-c", program, server.endpoint], check=True, timeout=60)
    assert num_shared(server) == 0


def test_a_client_in_another_namespace_of_processes_shares_nothing(server: Server) -> None:
    """As in a container: neither end knows the other's process by its number."""
    alone = ["unshare", "--pid", "--fork", "--mount-proc"]
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no namespace of processes: {error}")
    program = (
        "import os, sys\n"
        "import numpy as np\n"
        "from trireme.rpc import RpcClient\n"
        "assert os.getpid() == 1\n"
        "array = np.arange(1 << 17)\n"
        "client = RpcClient(name='w')\n"
        "for _ in range(3):\n"
        "    [got] = client.call(sys.argv[1], 'echo', {}, [array], timeout_s=60).arrays\n"
        "    np.testing.assert_array_equal(got, array)\n"
        "[connection] = client._connections.values()\n"
        "assert connection._shared is None\n"
    )
    command = [*alone, sys.executable, "-c", program, server.endpoint]
    subprocess.run(command, check=True, timeout=60)
    assert num_shared(server) == 0


def test_a_server_of_another_user_shares_nothing() -> None:
    if os.getuid() != 0:
        pytest.skip("only root may start a process of another user")
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.setgid(65534)
        os.setuid(65534)
        with Server("127.0.0.1:0", {"echo": echo}, name="s") as server:
            os.write(writer, server.endpoint.encode())
            signal.pause()
        os._exit(0)
    try:
        endpoint = os.read(reader, 100).decode()
        with RpcClient(name="w") as client:
            [got] = client.call(endpoint, "echo", arrays=[large(3)], timeout_s=60).arrays
            [connection] = client._connections.values()
            assert connection._shared is None
        np.testing.assert_array_equal(got, large(3))
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


# ---- limits ----


def test_what_finds_no_room_travels_with_the_message() -> None:
    limits = Limits(shared_bytes_max=4 * MIB)
    arrays = [large(i, 3 * MIB // 2) for i in range(4)]
    with (
        Server("127.0.0.1:0", {"echo": echo}, name="s") as server,
        RpcClient(name="w", limits=limits) as client,
    ):
        for _ in range(3):
            calls = [Call(server.endpoint, "echo", {}, [array]) for array in arrays]
            calls.append(Call(server.endpoint, "echo", {}, arrays))
            for call, reply in zip(calls, client.call_all(calls, timeout_s=60), strict=True):
                assert all(map(np.array_equal, reply.arrays, call.arrays))
        assert is_all_free(memory_of(client))


def test_a_header_that_has_no_room_for_places_does_without() -> None:
    def answer(request: Request) -> Reply:
        return Reply({"text": "y" * request.body["num"]}, request.arrays)

    arrays = [large(i, ARRAY_BYTES_MIN) for i in range(64)]
    with (
        Server("127.0.0.1:0", {"echo": echo, "answer": answer}, name="s") as server,
        RpcClient(name="w") as client,
    ):
        client.call(server.endpoint, "answer", {"num": 1}, arrays, timeout_s=20)
        memory = memory_of(client)
        for _ in range(2):  # the second one lends room for the reply, too
            for num in range(MIB - 1300, MIB - 900, 20):
                call = Call(server.endpoint, "echo", {"text": "y" * num}, arrays)
                other = Call(server.endpoint, "answer", {"num": num}, arrays)
                for reply in client.call_all([call, other], timeout_s=20):
                    assert len(reply.body["text"]) == num
                    assert all(map(np.array_equal, reply.arrays, arrays))
        assert memory_of(client) is memory  # no reply was malformed


def test_a_system_without_memory_is_named_and_calls_go_on(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with RpcClient(name="w") as client:
        client.call(server.endpoint, "echo", arrays=[large(1)], timeout_s=60)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        array = large(2, 3 * MIB)
        for _ in range(3):
            [got] = client.call(server.endpoint, "echo", arrays=[array], timeout_s=60).arrays
            np.testing.assert_array_equal(got, array)
        assert memory_of(client)._allocated == {}
        client.call(server.endpoint, "echo", arrays=[large(1)], timeout_s=60)
    assert caplog.text.count("No space left on device") == 1


def test_memory_is_taken_in_steps_that_a_timer_lets_end(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before Linux 6.9: what takes longer than the time between two signals never ends."""
    real = os.posix_fallocate

    def interrupted(descriptor: int, start: int, size: int) -> None:
        assert size <= 2 * MIB, "this would be undone by each signal"
        real(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    with RpcClient(name="w") as client:
        array = large(2, 7 * MIB)
        for _ in range(2):
            [got] = client.call(server.endpoint, "echo", arrays=[array], timeout_s=60).arrays
            np.testing.assert_array_equal(got, array)
        assert memory_of(client)._num_committed > 14 * MIB


def test_all_clients_share_what_a_server_holds_for_all() -> None:
    limits = Limits(total_bytes_max=200 * MIB)
    clients = [RpcClient(name=f"w{i}") for i in range(5)]
    with Server("127.0.0.1:0", {"echo": echo}, name="s", limits=limits) as server:
        for i, client in enumerate(clients):
            [got] = client.call(server.endpoint, "echo", arrays=[large(i)], timeout_s=60).arrays
            np.testing.assert_array_equal(got, large(i))
        sizes = [len(p.shared) for p in server._socket.peers if p.shared is not None]
        assert sorted(sizes) == [8 * MIB, *[64 * MIB] * 3]
        clients[0].close()
        wait_until(lambda: num_shared(server) == 3)
        with RpcClient(name="next") as client:
            client.call(server.endpoint, "echo", arrays=[large(1)], timeout_s=60)
            assert num_shared(server) == 4
        for client in clients:
            client.close()
