"""What all servers of a job tell at one moment, over the connections that workers use."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from trireme.errors import BadRequest, NotReady, TriremeError
from trireme.protocol.routing import BucketMap
from trireme.rpc import Call, Reply, RpcClient

Labels = Mapping[str, str]


@dataclass(frozen=True)
class ServerSamples:
    """What one server told.

    Attributes:
        endpoint: of the server.
        samples: labels and value of each sample by its name; empty if it did not answer.
        error: why it did not; "" if it did.
    """

    endpoint: str
    samples: Mapping[str, Sequence[tuple[Labels, float]]]
    error: str = ""

    def matching(self, name: str, **labels: str) -> Iterator[tuple[Labels, float]]:
        """The samples of that name with these labels, others besides."""
        for found, value in self.samples.get(name, ()):
            if labels.items() <= found.items():
                yield found, value

    def total(self, name: str, **labels: str) -> float:
        """Their sum; 0 without any."""
        return sum(value for _, value in self.matching(name, **labels))


@dataclass(frozen=True)
class Snapshot:
    """All servers at the time `at` (time.monotonic())."""

    at: float
    servers: Sequence[ServerSamples]

    @property
    def answering(self) -> list[ServerSamples]:
        return [server for server in self.servers if not server.error]

    def total(self, name: str, **labels: str) -> float:
        return sum(server.total(name, **labels) for server in self.servers)

    def values_of(self, name: str, label: str) -> list[str]:
        """The values that a label has among all samples of that name, numbers in their order."""
        found = {of[label] for told in self.servers for of, _ in told.matching(name)}
        return sorted(found, key=lambda value: (value.isdecimal(), len(value), value))


def take(client: RpcClient, known: Sequence[str], timeout_s: float) -> Snapshot:
    """Ask every server of the job that the first of `known` coordinates.

    Args:
        known: servers of the job; before the first worker has come, nobody knows of others.
        timeout_s: for all of them together; one that does not answer in time is shown as such.

    Raises:
        TriremeError: none answers.
    """
    deadline = time.monotonic() + timeout_s
    servers = _servers(client, known, timeout_s)
    replies = client.call_all(
        [Call(server, "server.metrics") for server in servers],
        timeout_s=max(deadline - time.monotonic(), 0.1),
        return_errors=True,
    )
    told = [_told(server, reply) for server, reply in zip(servers, replies, strict=True)]
    errors = [reply for reply in replies if isinstance(reply, TriremeError)]
    if len(errors) == len(replies):
        raise errors[0]
    return Snapshot(time.monotonic(), told)


def _servers(client: RpcClient, known: Sequence[str], timeout_s: float) -> Sequence[str]:
    [answer] = client.call_all(
        [Call(known[0], "coord.map")], timeout_s=timeout_s / 2, return_errors=True
    )
    if isinstance(answer, Reply):
        return BucketMap.from_wire(answer.body["map"]).servers
    if isinstance(answer, NotReady) or len(known) > 1:  # no worker yet; or ask the others
        return known
    raise answer


def _told(endpoint: str, answer: Reply | TriremeError) -> ServerSamples:
    if isinstance(answer, TriremeError):
        return ServerSamples(endpoint, {}, str(answer))
    if len(answer.arrays) != 1:
        raise BadRequest(f"top: expected one text of {endpoint}, found {len(answer.arrays)}")
    samples: dict[str, list[tuple[Labels, float]]] = {}
    for family in text_string_to_metric_families(answer.arrays[0].tobytes().decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return ServerSamples(endpoint, samples)
