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
from torch import Tensor

from trireme.train.modes.worker_group import WorkerGroup

Bytes = npt.NDArray[np.uint8]
Parts = Sequence[Any]  # buffers

ALIGNMENT = 64
CHUNK_BYTES = 64 << 20
"""Most bytes of one all-to-all: larger ones fail in some versions of gloo (pytorch #81684)."""


@dataclass(frozen=True)
class Received:
    """What an exchange has brought.

    messages, notes: of each worker. is_empty: no worker has sent a message to any.
    """

    messages: list[list[list[memoryview]]]
    notes: list[int]
    is_empty: bool


class ByteExchange:
    """Exchanges messages with all workers of a group. Every worker calls `exchange` as often."""

    def __init__(self, group: WorkerGroup, rank: int, size: int) -> None:
        self._group, self._rank, self._size = group, rank, size

    def exchange(self, outgoing: Sequence[Sequence[Parts]], *, note: int = 0) -> Received:
        """Send each worker its messages. Raises as `WorkerGroup.all_to_all`.

        Args:
            outgoing: per worker. None for the own one.
            note: a number that every worker gets.
        """
        runs = [_Run(messages) for messages in outgoing]
        sizes = self._share_sizes([run.num_bytes for run in runs], note)
        between = sizes[:, :-1]
        written = [torch.from_numpy(run.write()) for run in runs]
        received = exchange_in_chunks(self._group, self._rank, written, between)
        return Received(
            [_messages_of(run.numpy()) for run in received],
            sizes[:, -1].tolist(),
            not between.any(),
        )

    def _share_sizes(self, own: list[int], note: int) -> npt.NDArray[np.int64]:
        """(size, size + 1) bytes from each worker to each, then its note."""
        width = self._size + 1
        row = torch.tensor([*own, note], dtype=torch.int64)
        widths = [width] * self._size
        rows = self._group.all_to_all(row.repeat(self._size), widths, widths).cpu()
        return rows.reshape(self._size, width).numpy()


def exchange_in_chunks(
    group: WorkerGroup, rank: int, sent: Sequence[Tensor], between: npt.NDArray[np.int64]
) -> list[Tensor]:
    """Send each worker its (n,) elements, in as many chunks as the largest message needs: in none
    if there are no elements. Every worker calls it. Raises as `WorkerGroup.all_to_all`.

    Args:
        rank: of this worker. What is sent to it comes back.
        sent: by worker, of one dtype and device.
        between: (size, size) how many elements go from each worker to each.

    Returns:
        What each worker has sent here, on the device of what is sent.
    """
    sizes = between.copy()
    np.fill_diagonal(sizes, 0)
    chunk = max(1, CHUNK_BYTES // sent[0].element_size() // len(sent))
    parts: list[list[Tensor]] = [[] for _ in sent]
    for begin in range(0, int(sizes.max()), chunk):
        now = np.clip(sizes - begin, 0, chunk)
        outgoing = [one[begin : begin + int(num)] for one, num in zip(sent, now[rank], strict=True)]
        incoming = now[:, rank].tolist()
        received = group.all_to_all(torch.cat(outgoing), now[rank].tolist(), incoming)
        split = torch.split(received.to(sent[0].device), incoming)
        for part, new in zip(parts, split, strict=True):
            part.append(new)
    parts[rank] = [sent[rank]]
    return [torch.cat(one or [sent[0][:0]]) if len(one) != 1 else one[0] for one in parts]


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
