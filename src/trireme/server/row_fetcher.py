"""Rows on SSD that workers announce: fetched into memory before they are pulled, where that helps.

An announcement is a hint. It is dropped where too many wait, and what is left of one is void when
its keys are pulled: the pull reads the same pages, and reads are what training waits for.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Sequence
from threading import Lock, Thread

from trireme import _core
from trireme.errors import ResourceExhausted, TriremeError, start_thread
from trireme.protocol.routing import Keys

log = logging.getLogger("trireme.server")

_WAITING_MAX = 32  # announcements
_KEYS_MAX = 4 << 20  # of one
_FETCHED_KEYS = 4096  # at a time
_PULLED_MAX = 256  # pulls that are remembered
_Announced = Sequence[tuple[_core.Table, Keys]]  # tables, and (K,) keys of each


class RowFetcher:
    """Threads: any. num_dropped: announcements that were."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[_Announced | None] = queue.Queue(_WAITING_MAX)
        self._thread: Thread | None = None
        self._thread_lock = Lock()
        self._pulled: dict[tuple[int, ...], None] = {}  # the oldest first
        self._pulled_lock = Lock()
        self.num_dropped = 0

    def end(self) -> Thread | None:
        """Fetch no more; returns the thread, which ends after what it fetches now."""
        if self._thread is not None:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._waiting.get_nowait()
            self._waiting.put(None)
        return self._thread

    def announce(self, wanted: _Announced) -> None:
        """Fetch rows soon, in a thread of its own. If too many announcements wait, this one is
        dropped: whoever needs the rows reads them.
        """
        if sum(len(keys) for _, keys in wanted) > _KEYS_MAX:
            self.num_dropped += 1
            return
        with self._pulled_lock:
            for rows, keys in wanted:
                if len(keys):  # perhaps of an earlier batch with the same keys
                    self._pulled.pop(_signature(rows, keys), None)
        with self._thread_lock:
            if self._thread is None:
                thread = Thread(target=self._fetch, name="trireme-fetch", daemon=True)
                try:
                    start_thread(thread)
                except ResourceExhausted as error:
                    log.warning("rows that workers announce are not fetched now: %s", error)
                    self.num_dropped += 1
                    return
                self._thread = thread
        try:
            self._waiting.put_nowait(wanted)
        except queue.Full:
            self.num_dropped += 1

    def note_pull(self, rows: _core.Table, keys: Keys) -> None:
        """These keys are pulled now: what is left of their announcement is void."""
        if self._thread is None or not len(keys):
            return
        with self._pulled_lock:
            self._pulled[_signature(rows, keys)] = None
            if len(self._pulled) > _PULLED_MAX:
                del self._pulled[next(iter(self._pulled))]

    def _fetch(self) -> None:
        pool = _core.Pool(1)
        while (wanted := self._waiting.get()) is not None:
            self._fetch_announced(wanted, pool)
            del wanted  # a table that is dropped or replaced must not live on while this waits

    def _fetch_announced(self, wanted: _Announced, pool: _core.Pool) -> None:
        for rows, keys in wanted:
            signature = _signature(rows, keys) if len(keys) else ()
            for begin in range(0, len(keys), _FETCHED_KEYS):
                if signature in self._pulled:  # else both would read the same pages
                    break
                try:
                    rows.fetch(keys[begin : begin + _FETCHED_KEYS], pool)
                except TriremeError as error:  # the pull that needs the rows gets it too
                    log.warning("rows that workers announced cannot be fetched: %s", error)
                    break


def _signature(rows: _core.Table, keys: Keys) -> tuple[int, ...]:
    """Tells announcements apart; keys: not empty."""
    return (id(rows), len(keys), int(keys[0]), int(keys[len(keys) // 2]), int(keys[-1]))
