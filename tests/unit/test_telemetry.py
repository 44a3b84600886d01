"""A process's instruments, health and HTTP endpoint, with its limits."""

from __future__ import annotations

import http.client
import random
import socket
from collections import Counter as Count
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trireme.errors import BadRequest
from trireme.telemetry import http_server
from trireme.telemetry.address import join_address, nth_address, split_address
from trireme.telemetry.endpoint import THREADS_MAX, Endpoint
from trireme.telemetry.health import Health
from trireme.telemetry.instruments import Counter, Gauge, Histogram, histogram_family
from trireme.telemetry.registry import Registry, new_registry, text_of

BOUNDS = (0.0, 1.0, 2.5, 10.0)


@pytest.fixture
def registry() -> Registry:
    return new_registry("server", "server 0")


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def endpoint(registry: Registry, health: Health) -> Iterator[Endpoint]:
    with Endpoint("0", registry, health) as endpoint:
        yield endpoint


def samples(registry: Registry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(text_of(registry).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def connect(endpoint: Endpoint) -> socket.socket:
    place = urlsplit(endpoint.url)
    return socket.create_connection((place.hostname, place.port), timeout=60)


def get(endpoint: Endpoint, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection(urlsplit(endpoint.url).netloc, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


def test_histograms_count_like_a_plain_list(registry: Registry) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    histogram = Histogram("trireme_x_seconds", "x", ["of"], BOUNDS)
    registry.register(histogram)
    values = {
        name: [rng.choice([*BOUNDS, rng.uniform(-1, 12)]) for _ in range(300)]
        for name in ("a", "b")
    }
    for name, observed in values.items():
        for value in observed:
            histogram.observe(value, name)
    actual = samples(registry)
    for name, observed in values.items():
        assert actual["trireme_x_seconds_count", (("of", name),)] == 300
        assert actual["trireme_x_seconds_sum", (("of", name),)] == pytest.approx(sum(observed))
        for bound in BOUNDS:
            label = (("le", str(bound)), ("of", name))
            assert actual["trireme_x_seconds_bucket", label] == sum(v <= bound for v in observed)


def test_a_histogram_of_counted_numbers_is_that_of_the_numbers() -> None:
    numbers = [0, 0, 1, 2, 3, 3, 3, 9, 50]
    family = histogram_family("x", "x", BOUNDS, Count(numbers))
    actual = {s.labels.get("le", s.name): s.value for s in family.samples}
    assert actual == {"0.0": 2, "1.0": 3, "2.5": 4, "10.0": 8, "+Inf": 9, "x_count": 9, "x_sum": 71}


def test_counters_and_gauges_show_their_values(registry: Registry) -> None:
    counter = Counter("trireme_x_total", "x", ["a", "b"])
    for part in (
        counter,
        Counter("trireme_y_total", "y"),
        Gauge("trireme_z", "z", lambda: {"p": 3.5, '"\\\n': 4}, ["k"]),
        Gauge("trireme_w_total", "w", lambda: 7),
    ):
        registry.register(part)
    counter.add(2, "1", "2")
    counter.add(3, "1", "2")
    actual = samples(registry)
    assert actual["trireme_x_total", (("a", "1"), ("b", "2"))] == 5
    assert actual["trireme_y_total", ()] == 0  # there before the first
    assert actual["trireme_z", (("k", "p"),)] == 3.5
    assert actual["trireme_z", (("k", '"\\\n'),)] == 4
    assert actual["trireme_w_total", ()] == 7
    with pytest.raises(ValueError, match="trireme_x"):  # a name is used once
        registry.register(Counter("trireme_x_total", "x"))


def test_a_process_tells_of_itself(registry: Registry) -> None:
    actual = samples(registry)
    [(build, one)] = [
        (dict(labels), v) for (n, labels), v in actual.items() if n == "trireme_build_info"
    ]
    assert (build["role"], build["name"], one) == ("server", "server 0", 1)
    assert actual["trireme_uptime_seconds", ()] >= 0
    assert actual["process_open_fds", ()] > 0


def test_the_endpoint_answers_metrics_and_health(endpoint: Endpoint, health: Health) -> None:
    assert get(endpoint, "/healthz")[::2] == (503, "not open yet\n")
    health.opened()
    assert get(endpoint, "/healthz")[::2] == (200, "ok\n")
    health.hinder("pull", "waiting for server 1")
    health.hinder("push", "waiting for server 2")
    assert get(endpoint, "/healthz")[::2] == (503, "waiting for server 1\nwaiting for server 2\n")
    health.clear("pull")
    health.clear("pull")
    health.clear("push")
    assert get(endpoint, "/healthz?x=1")[0] == 200
    status, kind, text = get(endpoint, "/metrics")
    assert (status, kind.split(";")[0]) == (200, "text/plain")
    assert "trireme_uptime_seconds" in text
    status, kind, text = get(endpoint, "/metrics", Accept="application/openmetrics-text")
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")
    assert "trireme_build" not in get(endpoint, "/metrics?name[]=trireme_uptime_seconds")[2]
    assert get(endpoint, "/")[0] == 404
    assert get(endpoint, "/metrics", method="POST")[0] == 501


def test_a_peer_that_asks_too_slowly_is_closed(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 0.2)
    with connect(endpoint) as silent, connect(endpoint) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert silent.recv(1) == b""
        assert slow.recv(1) == b""
    monkeypatch.setattr(http_server, "REQUEST_S", 60)
    assert get(endpoint, "/metrics")[0] == 200


def test_slow_peers_leave_room_for_others(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 60)
    held = [connect(endpoint) for _ in range(THREADS_MAX - 1)]
    try:
        assert get(endpoint, "/metrics")[0] == 200
    finally:
        for connection in held:
            connection.close()


def test_more_connections_than_threads_are_closed(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 60)
    held = [connect(endpoint) for _ in range(THREADS_MAX)]
    try:
        with connect(endpoint) as one_more:
            assert one_more.recv(1) == b""
    finally:
        for connection in held:
            connection.close()


def test_a_request_without_end_is_refused(endpoint: Endpoint) -> None:
    with connect(endpoint) as peer:
        peer.sendall(b"GET /" + b"x" * (1 << 17))
        assert b"414" in peer.recv(100)


def test_an_address_that_is_taken_is_an_error(endpoint: Endpoint, registry: Registry) -> None:
    address = urlsplit(endpoint.url).netloc
    with pytest.raises(BadRequest, match=f"metrics: cannot listen on {address}: "):
        Endpoint(address, registry, Health())


@pytest.mark.parametrize("text", ["", "x", "host:", "host:port", "70000", "-1", "1.5"])
def test_malformed_addresses_are_refused(text: str) -> None:
    with pytest.raises(BadRequest, match=r"expected \[HOST:\]PORT with a port up to 65535, found"):
        split_address(text)


def test_addresses_of_several_processes() -> None:
    assert split_address("9100") == ("127.0.0.1", 9100)
    assert split_address(":9100") == ("127.0.0.1", 9100)
    assert split_address("[::1]:9100") == ("::1", 9100)
    assert join_address("::1", 9100) == "[::1]:9100"
    assert [nth_address("10.0.0.1:9100", n) for n in (0, 2)] == ["10.0.0.1:9100", "10.0.0.1:9102"]
    assert nth_address("0", 3) == "127.0.0.1:0"
    with pytest.raises(BadRequest, match="expected 3 ports from 65534 on, found 2"):
        nth_address("65534", 2)


def test_an_error_of_a_gauge_is_logged_and_fails_that_reply_alone(
    endpoint: Endpoint, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    is_broken = False

    def read() -> float:
        if is_broken:
            raise KeyError("gone")
        return 1

    registry.register(Gauge("trireme_x", "x", read))
    assert "trireme_x 1.0" in get(endpoint, "/metrics")[2]
    is_broken = True
    with pytest.raises(http.client.RemoteDisconnected):
        get(endpoint, "/metrics")
    assert get(endpoint, "/healthz")[0] == 503
    assert "metrics: could not answer 127.0.0.1" in caplog.text
