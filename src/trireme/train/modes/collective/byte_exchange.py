"""Messages between all workers at once, by all-to-all of bytes.

A message is a list of parts, as `rpc.frames.pack` makes it. What one worker sends another in one
exchange is one run of bytes: an index of the parts' sizes, then the parts, each at a multiple of
64 bytes, so that arrays can be used as they lie.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trireme.train.modes.worker_group import WorkerGroup

Bytes = npt.NDArray[np.uint8]
Parts = Sequence[Any]  # buffers

ALIGNMENT = 64
CHUNK_BYTES = 64 << 20
"""Most bytes of one all-to-all: larger ones fail in some versions of gloo (pytorch #81684)."""


@dataclass(frozen=True)
class Received:
    """What an exchange has brought.

    messages: of each worker, in its order. is_any_active: of any worker. is_empty: no worker has
    sent anything.
    """

    messages: list[list[list[memoryview]]]
    is_any_active: bool
    is_empty: bool


class ByteExchange:
    """Exchanges messages with all workers of a group. Every worker calls `exchange` as often."""

    def __init__(self, group: WorkerGroup, rank: int, size: int) -> None:
        self._group, self._rank, self._size = group, rank, size

    def exchange(self, outgoing: Sequence[Sequence[Parts]], *, is_active: bool) -> Received:
        """Send each worker its messages. Raises as `WorkerGroup.all_to_all`.

        Args:
            outgoing: per worker. None for the own one.
            is_active: told to all.
        """
        runs = [_Run(messages) for messages in outgoing]
        sizes = self._share_sizes([run.num_bytes for run in runs], is_active)
        between = sizes[:, :-1]
        received = self._exchange_runs(runs, between)
        return Received(
            [_messages_of(run) for run in received], bool(sizes[:, -1].any()), not between.any()
        )

    def _share_sizes(self, own: list[int], is_active: bool) -> npt.NDArray[np.int64]:
        """(size, size + 1) bytes from each worker to each, then whether it is active."""
        width = self._size + 1
        row = torch.tensor([*own, int(is_active)], dtype=torch.int64)
        widths = [width] * self._size
        rows = self._group.all_to_all(row.repeat(self._size), widths, widths).cpu()
        return rows.reshape(self._size, width).numpy()

    def _exchange_runs(self, runs: Sequence["_Run"], between: npt.NDArray[np.int64]) -> list[Bytes]:
        """The run of bytes that came from each worker."""
        incoming = between[:, self._rank]
        chunk = CHUNK_BYTES // self._size // ALIGNMENT * ALIGNMENT
        num_chunks = -(-int(between.max()) // chunk)
        if num_chunks <= 1:
            return self._exchange_chunk([run.write() for run in runs], incoming)
        written = [run.write() for run in runs]
        chunks: list[list[Bytes]] = [[] for _ in runs]
        for begin in range(0, num_chunks * chunk, chunk):
            slices = [run[begin : begin + chunk] for run in written]
            sizes = np.clip(incoming - begin, 0, chunk)
            for rank, received in enumerate(self._exchange_chunk(slices, sizes)):
                chunks[rank].append(received)
        return [np.concatenate(parts) for parts in chunks]

    def _exchange_chunk(
        self, outgoing: Sequence[Bytes], incoming: npt.NDArray[np.int64]
    ) -> list[Bytes]:
        send = torch.from_numpy(np.concatenate(outgoing))
        sizes = [len(run) for run in outgoing]
        received = self._group.all_to_all(send, sizes, incoming.tolist()).cpu().numpy()
        return np.split(received, np.cumsum(incoming)[:-1])


class _Run:
    """The messages to one worker as a run of bytes."""

    def __init__(self, messages: Sequence[Parts]) -> None:
        self._parts = [_as_bytes(part) for parts in messages for part in parts]
        sizes = [len(part) for part in self._parts]
        index = [len(messages), *(len(parts) for parts in messages), *sizes]
        self._index = np.array(index, np.int64).view(np.uint8)
        self.num_bytes = 0
        if messages:
            self.num_bytes = sum(map(_padded, [len(self._index), *sizes]))

    def write(self) -> Bytes:
        run = np.empty(self.num_bytes, np.uint8)
        at = 0
        for part in [self._index, *self._parts] if self.num_bytes else ():
            run[at : at + len(part)] = part
            at += _padded(len(part))
        return run


def _messages_of(run: Bytes) -> list[list[memoryview]]:
    """The messages of a received run, as views of it."""
    if not len(run):
        return []
    numbers = run[: len(run) // 8 * 8].view(np.int64)
    num_messages = int(numbers[0])
    counts = numbers[1 : 1 + num_messages].tolist()
    num_parts = sum(counts)
    sizes = numbers[1 + num_messages : 1 + num_messages + num_parts].tolist()
    at = _padded(8 * (1 + num_messages + num_parts))
    parts = []
    for size in sizes:
        parts.append(run[at : at + size].data)
        at += _padded(size)
    rest = iter(parts)
    return [[next(rest) for _ in range(count)] for count in counts]


def _as_bytes(part: Any) -> Bytes:
    return np.frombuffer(part, np.uint8) if len(part) else np.empty(0, np.uint8)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
