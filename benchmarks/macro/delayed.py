"""A client that delays its pushes, by seeded delays, so that two workers are as stale as many."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from typing import Any

from trireme.protocol.membership import Pace
from trireme.worker.client import WorkerClient
from trireme.worker.pull import Pulled


class Delayed:
    """Replaces a worker's client: it holds each push until a number of later ones were made.

    The delays are uniform from 0.5 to 1.5 times their mean, and pushes stay in order. The modes
    keep their promises: in sync a push is staged before its worker continues, in bounded no more
    pushes are held than the bound allows, and all other calls to the servers come after all pushes.

    Args:
        mean: mean delay of a push in steps.
        steps_per_push: of mode geo.
        bound: of mode bounded, else None.
    """

    def __init__(
        self, client: WorkerClient, mean: int, seed: int, *, steps_per_push: int, bound: int | None
    ) -> None:
        self._client, self._mean = client, mean / steps_per_push
        self._random = random.Random(f"{seed} {client.worker}")
        self._num_pushes = 0
        # (number of the push after which it is sent, arguments, options)
        self._held: deque[tuple[float, tuple[Any, ...], dict[str, Any]]] = deque()
        self._held_max = None if bound is None else bound - 1

    def push(self, *arguments: Any, **options: Any) -> None:
        """WorkerClient.push, delayed."""
        self._num_pushes += 1
        due = self._num_pushes + self._random.uniform(0.5, 1.5) * self._mean
        self._held.append((due, arguments, options))
        while self._held and self._held[0][0] <= self._num_pushes:
            self._release(len(self._held) - 1)
        if options.get("staged"):
            self._release(0)
        elif self._held_max is not None:
            self._release(self._held_max)

    def pull(self, *arguments: Any, pace: Pace | None = None, **options: Any) -> Pulled:
        """WorkerClient.pull, while delayed pushes are not applied yet."""
        if pace is not None:
            pace = dataclasses.replace(pace, done=max(0, pace.done - len(self._held)))
        return self._client.pull(*arguments, pace=pace, **options)

    def _release(self, most: int) -> None:
        while len(self._held) > most:
            _, arguments, options = self._held.popleft()
            self._client.push(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        if name == "servers" or callable(getattr(WorkerClient, name, None)):
            self._release(0)
        return getattr(self._client, name)
