"""Limits of rpc, and which values can be sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from trireme.errors import BadRequest, Internal, ResourceExhausted, TriremeError
from trireme.rpc import Call, Limits, Reply, Request, RpcClient, Server

MIB = 1 << 20


def echo(request: Request) -> Reply:
    return Reply(request.body, request.arrays)


@pytest.fixture
def client() -> Iterator[RpcClient]:
    with RpcClient(name="worker 0") as client:
        yield client


def test_client_keeps_within_the_credit_of_its_server() -> None:
    limits = Limits(
        requests_max=3, inflight_bytes_max=MIB, message_bytes_max=MIB, header_bytes_max=MIB
    )
    array = np.zeros(300_000, np.uint8)
    with (
        Server("127.0.0.1:0", {"echo": echo}, name="s", limits=limits) as server,
        RpcClient(name="w") as client,
    ):
        calls = [Call(server.endpoint, "echo", {"i": i}, [array]) for i in range(50)]
        replies = client.call_all(calls, timeout_s=60)
    assert [reply.body["i"] for reply in replies] == list(range(50))


def test_full_server_lets_clients_try_again() -> None:
    limits = Limits(total_requests_max=2)
    entered = threading.Semaphore(0)
    may_go_on = threading.Event()

    def hold(request: Request) -> None:
        entered.release()
        assert may_go_on.wait(60)

    with Server("127.0.0.1:0", {"hold": hold}, name="s", limits=limits, threads=2) as server:

        def call(answers: list[object]) -> None:
            with RpcClient(name="w") as client:
                answers.append(client.call(server.endpoint, "hold", timeout_s=60))

        answers: list[object] = []
        callers = [threading.Thread(target=call, args=[answers]) for _ in range(6)]
        for caller in callers:
            caller.start()
        assert entered.acquire(timeout=60)
        assert entered.acquire(timeout=60)
        may_go_on.set()
        for caller in callers:
            caller.join(60)
    assert len(answers) == 6


def test_a_full_server_holds_no_more_than_its_limit_and_says_so_at_the_deadline() -> None:
    """Ten clients with 1 MiB each; the server, whose handlers stand still, has room for three."""
    limits = Limits(total_bytes_max=3 * MIB + MIB // 2)
    array = np.zeros(MIB, np.uint8)
    entered = threading.Semaphore(0)
    is_full, may_go_on = threading.Event(), threading.Event()
    outcomes: dict[str, list[object]] = {"served": [], "refused": []}

    def hold(request: Request) -> None:
        entered.release()
        assert may_go_on.wait(60)

    def call(which: str) -> None:
        with RpcClient(name="w") as client:
            client.call(server.endpoint, "echo", timeout_s=60)  # it is connected from here on
            timeout_s = 60.0
            if which == "refused":
                assert is_full.wait(60)
                timeout_s = 8.0
            try:
                client.call(server.endpoint, "hold", {}, [array], timeout_s=timeout_s)
                outcomes[which].append("done")
            except TriremeError as error:
                outcomes[which].append(error)

    handlers = {"hold": hold, "echo": echo}
    with Server("127.0.0.1:0", handlers, name="s", limits=limits, threads=4) as server:
        refused = [threading.Thread(target=call, args=["refused"]) for _ in range(7)]
        served = [threading.Thread(target=call, args=["served"]) for _ in range(3)]
        for caller in refused + served:
            caller.start()
        for _ in served:
            assert entered.acquire(timeout=60)
        is_full.set()
        for caller in refused:
            caller.join(60)
        usage = server.usage()
        may_go_on.set()
        for caller in served:
            caller.join(60)
    assert 3 * MIB < usage.num_bytes < limits.total_bytes_max
    assert outcomes["served"] == ["done"] * 3
    assert [type(error) for error in outcomes["refused"]] == [ResourceExhausted] * 7
    for error in outcomes["refused"]:
        assert "hold at 127.0.0.1" in str(error)
        assert f"holds {limits.total_bytes_max} bytes of requests: later (total_bytes_max)" in str(
            error
        )


def test_request_beyond_the_servers_limit_is_refused_by_the_client(client: RpcClient) -> None:
    limits = Limits(total_bytes_max=MIB, header_bytes_max=1024, arrays_max=3)
    small = np.zeros(1, np.uint8)
    with Server("127.0.0.1:0", {"echo": echo}, name="s", limits=limits) as server:
        for body, arrays, what in (
            ({}, [np.zeros(2 * MIB, np.uint8)], "total_bytes_max is 1048576, found 2097"),
            ({"x": "y" * 2000}, [], "header_bytes_max is 1024, found 2"),
            ({}, [small] * 4, "arrays_max is 3, found 4"),
        ):
            with pytest.raises(ResourceExhausted, match=rf"echo at .*{what}"):
                client.call(server.endpoint, "echo", body, arrays, timeout_s=30)
        assert client.call(server.endpoint, "echo", {"a": 1}, timeout_s=30).body == {"a": 1}


def test_reply_beyond_the_clients_limit_is_an_error() -> None:
    limits = Limits(total_bytes_max=MIB)
    big = {"big": lambda request: Reply({}, [np.zeros(2 * MIB, np.uint8)])}
    with (
        Server("127.0.0.1:0", big | {"echo": echo}, name="s") as server,
        RpcClient(name="w", limits=limits) as client,
    ):
        with pytest.raises(ResourceExhausted, match="takes replies of 1048576 bytes, found"):
            client.call(server.endpoint, "big", timeout_s=30)
        assert client.call(server.endpoint, "echo", {"a": 1}, timeout_s=30).body == {"a": 1}


def test_message_of_100_mb_arrives(client: RpcClient) -> None:
    array = np.arange(25_000_000, dtype=np.float32)
    with Server("127.0.0.1:0", {"echo": echo}, name="s") as server:
        [got] = client.call(server.endpoint, "echo", arrays=[array], timeout_s=60).arrays
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize(
    "field",
    sorted(Limits.__dataclass_fields__.keys() - {"handshake_timeout_s", "shared_bytes_max"}),
)
def test_limits_must_be_positive(field: str) -> None:
    with pytest.raises(BadRequest, match=f"{field} must be positive, found 0"):
        Limits(**{field: 0})


def test_shared_memory_is_none_or_enough_to_be_of_use() -> None:
    assert Limits(shared_bytes_max=0).shared_bytes_max == 0
    with pytest.raises(BadRequest, match="shared_bytes_max must be positive, found -1"):
        Limits(shared_bytes_max=-1)
    with pytest.raises(BadRequest, match="must be 0 or at least 4194304, found 4000"):
        Limits(shared_bytes_max=4000)


# What may be sent


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4), np.float32)[:, ::2],
        np.zeros((4, 4), np.float32).T[:, :2],
        np.zeros(3, ">f4"),
        np.array(["a"], object),
        np.array(["a"]),
        np.zeros(3, np.complex64),
        np.zeros((1,) * 9, np.int8),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_array_that_cannot_travel_is_refused(client: RpcClient, array: np.ndarray) -> None:
    with (
        Server("127.0.0.1:0", {"echo": echo}, name="s") as server,
        pytest.raises(BadRequest, match=r"echo at .*array 0"),
    ):
        client.call(server.endpoint, "echo", arrays=[array], timeout_s=30)


def test_body_that_cannot_travel_is_refused(client: RpcClient) -> None:
    with (
        Server("127.0.0.1:0", {"echo": echo}, name="s") as server,
        pytest.raises(BadRequest, match="msgpack values only"),
    ):
        client.call(server.endpoint, "echo", {"x": object()}, timeout_s=30)


@pytest.mark.parametrize(
    "answer",
    [
        Reply({"x": object()}),
        Reply({}, [np.array(["a"], object)]),
        {"not": "a reply"},
    ],
)
def test_answer_that_cannot_travel_is_internal(client: RpcClient, answer: Reply) -> None:
    with (
        Server("127.0.0.1:0", {"answer": lambda request: answer}, name="s") as server,
        pytest.raises(Internal),
    ):
        client.call(server.endpoint, "answer", timeout_s=30)


def test_an_error_that_cannot_be_sent_is_replaced_by_one_that_can(client: RpcClient) -> None:
    def fail(request: Request) -> None:
        error = BadRequest("bad \udcff name")
        error.details = request.body or {"x": object()}
        raise error

    with Server("127.0.0.1:0", {"fail": fail}, name="s") as server:
        with pytest.raises(Internal, match="handler's error"):
            client.call(server.endpoint, "fail", timeout_s=30)
        with pytest.raises(BadRequest, match=r"bad \\udcff name"):
            client.call(server.endpoint, "fail", {"y": 1}, timeout_s=30)


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_call_without_deadline_is_refused(client: RpcClient, timeout_s: float) -> None:
    with pytest.raises(BadRequest, match="timeout_s"):
        client.call("127.0.0.1:1", "echo", timeout_s=timeout_s)


@pytest.mark.parametrize(
    "endpoint", ["", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", "no host:1"]
)
def test_wrong_endpoint_is_refused(client: RpcClient, endpoint: str) -> None:
    with pytest.raises(BadRequest, match="host:port"):
        client.call(endpoint, "echo", timeout_s=30)
