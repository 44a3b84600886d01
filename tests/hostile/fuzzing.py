"""`python -m tests.hostile.fuzzing --seconds 600`: sends mutated messages to a server's handlers.

Each must be answered, with a reply or a typed error of the caller's: any other exception, INTERNAL,
a message that takes long, memory that grows or a file outside the root folder ends the run with the
seed and the message. With --keep, messages whose answers differ from all before are added to the
corpus, which the tests replay.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgpack

from tests.hostile.mutation import Message, Mutator
from tests.hostile.traffic import World, record
from trireme.errors import BadRequest, Internal, TriremeError
from trireme.rpc import Reply, frames

CORPUS = Path(__file__).with_name("corpus") / "messages.bin"
MESSAGE_S_MAX = 30.0
GROWTH_BYTES_MAX = 1 << 30
RENEWED_AFTER = 100  # a mutated join fences what follows
CORPUS_PARTS_BYTES_MAX = 1500


class Failure(AssertionError):
    """A message that a server could not stand."""


class Sent(NamedTuple):
    """What became of a message: words that are equal for like answers."""

    parts: list[bytes]
    outcome: str


class Fuzzer:
    """Mutates what `jobs` say, and sends it to servers that are in the midst of one of them.

    The working directory must be `root`, a folder of its own.
    """

    def __init__(self, jobs: list[list[Message]], root: Path, seed: int) -> None:
        self._jobs, self._root, self._seed = jobs, root, seed
        self._mutator = Mutator([message for job in jobs for message in job], seed)
        self._memory = memory_bytes()
        self._around = sorted(root.parent.iterdir())
        self.num_sent = 0

    def run(self) -> Iterator[Sent]:
        """For ever."""
        while True:
            world = self.world()
            for _ in range(RENEWED_AFTER):
                parts = self._draw()
                yield Sent(parts, self.send(world, parts))
            self._check_around()

    def outcomes(self, corpus: list[list[bytes]]) -> set[str]:
        """How a server answers these."""
        world = self.world()
        return {self.send(world, parts) for parts in corpus}

    def world(self) -> World:
        """A server that has served part of a recorded job, as far as it changes no files."""
        world, draw = World(self._root), self._mutator.random
        job = [m for m in draw.choice(self._jobs) if m.method.startswith(("coord.", "ps."))]
        for message in job[: draw.randint(len(job) // 3, len(job))]:
            world.send(pack(message))
        return world

    def _draw(self) -> list[bytes]:
        while True:
            try:
                parts = pack(self._mutator.message())
            except BadRequest:  # no client can send this
                continue
            return self._mutator.parts(parts) if self._mutator.random.random() < 0.25 else parts

    def send(self, world: World, parts: list[bytes]) -> str:
        """Raises Failure."""
        self.num_sent += 1
        start = time.monotonic()
        try:
            answer = world.send(parts)
        except Exception as error:
            raise Failure(f"{self._where(parts)}: {type(error).__name__}: {error}") from error
        if isinstance(answer, TriremeError) and answer.code == Internal.code:
            raise Failure(f"{self._where(parts)}: {answer}") from answer
        took_s = time.monotonic() - start
        if took_s > MESSAGE_S_MAX:
            raise Failure(f"{self._where(parts)}: took {took_s:.0f} s")
        if (grown := memory_bytes() - self._memory) > GROWTH_BYTES_MAX:
            raise Failure(f"{self._where(parts)}: memory has grown by {grown >> 20} MiB")
        return outcome_of(answer)

    def _check_around(self) -> None:
        if (around := sorted(self._root.parent.iterdir())) != self._around:
            raise Failure(f"seed {self._seed}: expected {self._around} around, found {around}")

    def _where(self, parts: list[bytes]) -> str:
        return (
            f"seed {self._seed}, message {self.num_sent}, {describe(parts)}:"
            f" {msgpack.packb(parts).hex() if sum(map(len, parts)) < 4000 else 'long'}"
        )


def pack(message: Message) -> list[bytes]:
    header = {"t": frames.CALL, "id": 1, "m": message.method, "ms": 30_000, "b": message.body}
    return [bytes(part) for part in frames.pack(header, [a.copy() for a in message.arrays])]


def describe(parts: list[bytes]) -> str:
    try:
        return str(msgpack.unpackb(parts[0]))[:1000]
    except (ValueError, msgpack.UnpackException):
        return f"{len(parts[0])} bytes"


def outcome_of(answer: Reply | TriremeError | None) -> str:
    """Its kind, without values."""
    if isinstance(answer, TriremeError):
        words = re.sub(r"'[^']*'|\"[^\"]*\"|\[.*\]|\{.*\}|\d+", "_", str(answer))
        return f"{answer.code} {words[:40]}"
    return "deferred" if answer is None else f"reply {sorted(map(str, answer.body))}"


def memory_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def playground() -> Iterator[Path]:
    """A root folder, alone in its parent, that is the working directory."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
        root = Path(folder).resolve() / "root"
        root.mkdir()
        os.chdir(root)
        try:
            yield root
        finally:
            os.chdir(before)


def read_corpus() -> list[list[bytes]]:
    return [list(parts) for parts in msgpack.unpackb(CORPUS.read_bytes())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="add to the corpus")
    arguments = parser.parse_args()
    faulthandler.enable()
    with playground() as root:
        fuzzer = Fuzzer(record(root), root, arguments.seed)
        kept = read_corpus()
        seen = fuzzer.outcomes(kept)
        deadline = time.monotonic() + arguments.seconds
        for sent in fuzzer.run():
            is_small = sum(map(len, sent.parts)) <= CORPUS_PARTS_BYTES_MAX
            if is_small and sent.outcome not in seen:
                seen.add(sent.outcome)
                kept.append(sent.parts)
            if time.monotonic() > deadline:
                break
    sys.stdout.write(
        f"seed {arguments.seed}: {fuzzer.num_sent} messages, {len(seen)} kinds of answers\n"
    )
    if arguments.keep:
        CORPUS.parent.mkdir(exist_ok=True)
        CORPUS.write_bytes(msgpack.packb(kept))


if __name__ == "__main__":
    main()
