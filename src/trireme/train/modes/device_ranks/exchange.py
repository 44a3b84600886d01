"""What the workers of a pass tell each other: messages, and numbers that stay on their devices.

All workers make the same exchanges in the same order. A worker without a batch takes part in those
of the others (`IDLE`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trireme.errors import BadRequest, TriremeError, class_of_code
from trireme.protocol.wire import Array
from trireme.rpc import Limits, frames
from trireme.train.modes.collective.byte_exchange import ByteExchange, exchange_in_chunks
from trireme.train.modes.device_ranks.next_keys import NextKeys
from trireme.train.modes.worker_group import WorkerGroup

IDLE = "idle"
"""The kind of exchange of a worker that has no batch."""
_LIMITS = Limits()


class Message(NamedTuple):
    """kind: of the exchange that its sender makes."""

    kind: str
    body: dict[str, Any]
    arrays: Sequence[Array]


class Exchange:
    """One thread uses it at a time. rank: of this worker, of `size`.

    next_keys: sends a part with each message, and takes those of the others; None: there are none.
    """

    def __init__(self, group: WorkerGroup, rank: int, size: int) -> None:
        self._group, self.rank, self.size = group, rank, size
        self._bytes = ByteExchange(group, rank, size)
        self.next_keys: NextKeys | None = None

    @property
    def device(self) -> torch.device:
        """Where numbers are."""
        return self._group.device

    @property
    def has_lost_workers(self) -> bool:
        """Whether an exchange has failed because another worker is missing."""
        return self._group.is_broken

    def close(self) -> None:
        """Leave the others, who learn of it."""
        self._group.close()

    def share(
        self, kind: str, body: dict[str, Any], arrays: Sequence[Sequence[Array]] | None = None
    ) -> list[Message]:
        """Send all workers a body, and each its arrays; returns the messages of all, in their
        order. Raises BadRequest, at all of them: they make exchanges of different kinds.
        """
        each = arrays or [()] * self.size
        is_last, ahead = self._next_part()
        header = {"t": frames.CALL, "k": kind, "b": body, "ends": is_last}
        outgoing = [
            [] if rank == self.rank else [frames.pack({**header, "own": len(own)}, [*own, *more])]
            for rank, (own, more) in enumerate(zip(each, ahead, strict=True))
        ]
        received = self._bytes.exchange(outgoing).messages
        messages = []
        for rank, parts in enumerate(received):
            if rank == self.rank:
                messages.append(Message(kind, body, each[rank]))
                more, ends = ahead[rank], is_last
            else:
                head, taken = frames.unpack(parts[0], _LIMITS)
                num, ends = int(head["own"]), bool(head["ends"])
                messages.append(Message(str(head["k"]), head["b"], taken[:num]))
                more = taken[num:]
            if self.next_keys is not None:
                self.next_keys.take(rank, more, is_last=ends)
        if len({one.kind for one in messages} - {IDLE}) > 1:
            raise BadRequest(
                "pass on devices: expected all workers to do the same in the same order, found"
                f" {[one.kind for one in messages]}"
            )
        return messages

    def _next_part(self) -> tuple[bool, list[list[Array]]]:
        if self.next_keys is None:
            return False, [[] for _ in range(self.size)]
        return self.next_keys.next_part()

    def agree(
        self, failure: TriremeError | None = None, body: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Wait for all workers; returns their bodies. Raises the failure of the first worker that
        has one, of the same class at all of them.
        """
        text = {} if failure is None else {"code": failure.code, "error": str(failure)}
        messages = self.share("agree", {"failure": text, "body": body or {}})
        for rank, message in enumerate(messages):
            if text := message.body["failure"]:
                if rank == self.rank and failure is not None:
                    raise failure
                error = class_of_code(int(text["code"]))
                raise error(f"worker {rank} of the pass on devices: {text['error']}")
        return [message.body["body"] for message in messages]

    def numbers(
        self,
        outgoing: Sequence[Sequence[Tensor]],
        between: npt.NDArray[np.int64],
        failure: TriremeError | None = None,
    ) -> list[Tensor]:
        """Send each worker float32 tensors of any shape, on the device of the group.

        Args:
            outgoing: per worker; the own ones come back.
            between: (size, size) how many numbers go from each worker to each.
            failure: why this worker has nothing to send; all raise it, as `agree` does.

        Returns:
            Per worker what it has sent here, (n,).
        """
        flags = torch.full((1,), float(failure is not None), device=self._group.device)
        sent = [
            self._flat(flags, tensors, int(between[self.rank, rank]), is_empty=failure is not None)
            for rank, tensors in enumerate(outgoing)
        ]
        received = exchange_in_chunks(self._group, self.rank, sent, between + 1)
        if bool(torch.stack([one[0] for one in received]).any()):
            self.agree(failure)
        return [one[1:] for one in received]

    def _flat(
        self, flags: Tensor, tensors: Sequence[Tensor], size: int, *, is_empty: bool
    ) -> Tensor:
        if is_empty:
            return torch.cat([flags, flags.new_zeros(size)])
        device = self._group.device
        return torch.cat([flags, *(one.detach().reshape(-1).to(device) for one in tensors)])


def caught(work: Callable[[], Any]) -> TriremeError | None:
    """The error of the work, which other workers have to learn of; None: there is none."""
    try:
        work()
    except TriremeError as error:
        return error
    return None
