"""The metrics of all servers of a job at one time, over the connections that workers use."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from trireme.errors import BadRequest, NotReady, TriremeError
from trireme.protocol.block_messages import map_from_wire
from trireme.protocol.wire import Arrays, need_list
from trireme.rpc import Call, Reply, RpcClient

Labels = Mapping[str, str]


@dataclass(frozen=True)
class ServerSamples:
    """The metrics of one server.

    Attributes:
        endpoint: of the server.
        samples: labels and values by name of the metric; empty if the server did not answer.
        error: why the server did not answer; "" if it did.
        waits: what some of the pulls there wait for.
    """

    endpoint: str
    samples: Mapping[str, Sequence[tuple[Labels, float]]]
    error: str = ""
    waits: Sequence[str] = ()

    def matching(self, name: str, **labels: str) -> Iterator[tuple[Labels, float]]:
        """The samples of this name whose labels include these."""
        for sample_labels, value in self.samples.get(name, ()):
            if labels.items() <= sample_labels.items():
                yield sample_labels, value

    def total(self, name: str, **labels: str) -> float:
        """The sum of the matching samples; 0 if there are none."""
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
        """The values of a label among all samples of this name, numbers in their order."""
        values = {labels[label] for server in self.servers for labels, _ in server.matching(name)}
        return sorted(values, key=lambda value: (value.isdecimal(), len(value), value))


def take_snapshot(client: RpcClient, known: Sequence[str], timeout_s: float) -> Snapshot:
    """Ask every server of the job whose coordinator is on the first of the `known` servers.

    Args:
        known: servers of the job; the coordinator knows the others once a worker has connected.
        timeout_s: for all of them together; a server that does not answer in time is shown as such.

    Raises:
        TriremeError: no server answers.
    """
    deadline = time.monotonic() + timeout_s
    servers = _servers(client, known, timeout_s)
    replies = client.call_all(
        [Call(server, "server.metrics") for server in servers],
        timeout_s=max(deadline - time.monotonic(), 0.1),
        return_errors=True,
    )
    samples = [_parse(server, reply) for server, reply in zip(servers, replies, strict=True)]
    errors = [reply for reply in replies if isinstance(reply, TriremeError)]
    if len(errors) == len(replies):
        raise errors[0]
    return Snapshot(time.monotonic(), samples)


def _servers(client: RpcClient, known: Sequence[str], timeout_s: float) -> Sequence[str]:
    [answer] = client.call_all(
        [Call(known[0], "coord.map")], timeout_s=timeout_s / 2, return_errors=True
    )
    if isinstance(answer, Reply):
        return map_from_wire(answer.body["map"], Arrays(answer.arrays)).servers
    if isinstance(answer, NotReady) or len(known) > 1:  # no worker yet, or ask others
        return known
    raise answer


def _parse(endpoint: str, answer: Reply | TriremeError) -> ServerSamples:
    if isinstance(answer, TriremeError):
        return ServerSamples(endpoint, {}, str(answer))
    if len(answer.arrays) != 1:
        raise BadRequest(f"top: expected one text of {endpoint}, found {len(answer.arrays)}")
    samples: dict[str, list[tuple[Labels, float]]] = {}
    for family in text_string_to_metric_families(answer.arrays[0].tobytes().decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    waits = need_list(answer.body, "waits", str) if "waits" in answer.body else ()
    return ServerSamples(endpoint, samples, waits=waits)
