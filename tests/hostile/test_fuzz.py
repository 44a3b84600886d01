"""Almost valid messages: the frame decoder and every handler answer with typed errors, and the
server continues. Replays the corpus that fuzzing.py found, and a little random fuzzing.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgpack
import numpy as np
import pytest
from zmtp import RawPeer, message

from tests.hostile import fuzzing
from tests.hostile.fuzzing import CORPUS, Fuzzer, pack, playground
from tests.hostile.mutation import Message
from tests.hostile.traffic import World, record
from tests.jobs import InProcessServer
from tests.long import pick
from tests.seeds import SEED
from trireme.errors import BadRequest, Internal, TriremeError
from trireme.rpc import Limits, RpcClient, frames

NUM_MESSAGES = pick(short=600, long=60_000)
LIMITS = Limits()
# Refused when they come again: there is no such job, and the files are there.
ONCE = ("checkpoint.stop", "export.save")


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with playground() as folder:
        yield folder


@pytest.fixture(scope="module")
def jobs(root: Path) -> list[list[Message]]:
    return record(root)


def test_the_recorded_jobs_call_every_method(jobs: list[list[Message]], root: Path) -> None:
    assert {message.method for job in jobs for message in job} == World(root).handlers.keys()


def test_recorded_messages_get_their_recorded_answers(
    jobs: list[list[Message]], root: Path
) -> None:
    """So mutated messages get as far as whole ones did."""
    for job in jobs:
        world = World(root)
        for recorded in job:
            answer = world.send(pack(recorded))
            assert not isinstance(answer, TriremeError) or recorded.method in ONCE, answer


def test_every_message_of_the_corpus_is_answered(jobs: list[list[Message]], root: Path) -> None:
    corpus = fuzzing.read_corpus()
    assert len(corpus) > 100
    for seed in (1, 2):
        fuzzer = Fuzzer(jobs, root, seed)
        world = fuzzer.world()
        for parts in corpus:
            fuzzer.send(world, parts)


def test_random_messages_are_answered(jobs: list[list[Message]], root: Path) -> None:
    print(f"seed {SEED}")
    for _ in itertools.islice(Fuzzer(jobs, root, SEED).run(), NUM_MESSAGES):
        pass


def test_the_same_seed_draws_the_same_messages(jobs: list[list[Message]], root: Path) -> None:
    first, second = Fuzzer(jobs, root, 7), Fuzzer(jobs, root, 7)
    assert [first._draw() for _ in range(50)] == [second._draw() for _ in range(50)]


def test_a_failure_names_seed_and_message(jobs: list[list[Message]], root: Path) -> None:
    """The fuzzer finds a handler that cannot stand what it is given."""
    fuzzer = Fuzzer(jobs, root, 3)
    world = fuzzer.world()
    world.handlers = {"coord.map": lambda request: request.body["absent"]}
    call = Message("coord.map", {}, [])
    with pytest.raises(fuzzing.Failure, match=r"seed 3, message 1, .*coord\.map.*KeyError"):
        fuzzer.send(world, pack(call))


def test_bytes_at_random_are_no_messages(jobs: list[list[Message]]) -> None:
    """The decoder alone, with heads that are close to right."""
    print(f"seed {SEED}")
    draw = random.Random(SEED)
    heads = [pack(message)[0] for job in jobs for message in job[::7]]
    for _ in range(pick(short=5_000, long=1_000_000)):
        head = bytearray(draw.choice(heads)[: draw.choice((20, 200, 2000))])
        for _ in range(draw.randrange(6)):
            head[draw.randrange(len(head))] = draw.randrange(256)
        try:
            header, arrays = frames.unpack([bytes(head)], LIMITS)
        except BadRequest:
            continue
        assert header["t"] in frames.KINDS
        assert arrays == []


def test_a_server_answers_the_corpus_over_the_network_and_serves_on(tmp_path: Path) -> None:
    """Through real sockets, with a good client beside: nothing breaks, nothing is INTERNAL."""
    server = InProcessServer(tmp_path)
    with server.rpc, RpcClient(name="good") as good, ExitStack() as stack:
        peer = stack.enter_context(RawPeer(server.endpoint)).hello()
        for number, parts in enumerate(fuzzing.read_corpus()):
            peer.socket.sendall(message(*_calm(parts)))
            answer = _answer(peer)
            if answer is None:  # closed, after too many faults
                peer = stack.enter_context(RawPeer(server.endpoint)).hello()
            else:
                assert answer.get("code") != Internal.code, (number, answer)
            if number % 50 == 0:
                assert good.call(server.endpoint, "server.ready", timeout_s=30).body == {}
        assert good.call(server.endpoint, "server.ready", timeout_s=30).body == {}


def _calm(parts: list[bytes]) -> list[bytes]:
    """With a deadline so near that answers which are deferred come soon, where there is one."""
    try:
        header = msgpack.unpackb(parts[0])
    except (ValueError, msgpack.UnpackException):
        return parts
    if not isinstance(header, dict) or type(header.get("ms")) is not int:
        return parts
    header["ms"] = min(header["ms"], 100)
    return [msgpack.packb(header), *parts[1:]]


def _answer(peer: RawPeer) -> dict[str, object] | None:
    try:
        return peer.header()
    except ConnectionError:
        return None


def test_the_corpus_is_small() -> None:
    assert CORPUS.stat().st_size < 300_000
    assert np.mean([sum(map(len, parts)) for parts in fuzzing.read_corpus()]) < 2_000
