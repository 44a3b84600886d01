"""Loads a stream of batches into a column store, also in the background."""

import logging
import threading
import time
import weakref
from dataclasses import dataclass

from trireme import _core
from trireme.data.column_layout import ColumnLayout, has_weights
from trireme.data.queue_dataset import Stream
from trireme.errors import Internal, Unavailable

log = logging.getLogger(__name__)

REPORT_S = 5.0
_JOIN_S = 30.0


@dataclass
class LoadedExamples:
    """The outcome of a load."""

    store: _core.ColumnStore
    num_broken_lines: int


def load(
    stream: Stream, layout: ColumnLayout, pool: _core.Pool, is_stopped: threading.Event
) -> LoadedExamples:
    """Load the whole stream; the log shows progress every few seconds.

    Raises:
        Unavailable: `is_stopped` was set. And what reading raises.
    """
    store: _core.ColumnStore | None = None
    started = reported = time.monotonic()
    with stream:
        for batch in stream:
            if store is None:
                store = layout.new_store(has_weights=has_weights(batch))
            layout.append(store, batch, pool)
            if is_stopped.is_set():
                raise Unavailable("InMemoryDataset: stopped before everything was loaded")
            now = time.monotonic()
            if now - reported >= REPORT_S:
                reported = now
                log.info(
                    "loading %.0f%%: %s examples, %s examples/s, %s MB",
                    100 * stream.fraction_read(),
                    f"{store.num_rows:,}",
                    f"{store.num_rows / (now - started):,.0f}",
                    f"{store.num_bytes / 1e6:,.0f}",
                )
        num_broken_lines = stream.num_broken_lines
    return LoadedExamples(store or layout.new_store(has_weights=False), num_broken_lines)


class Preload:
    """A load in a thread of its own. It stops when the object is dropped or the interpreter ends.

    Threads: one at a time.
    """

    def __init__(self, stream: Stream, layout: ColumnLayout, pool: _core.Pool) -> None:
        self._outcome: list[LoadedExamples | BaseException] = []
        is_stopped = threading.Event()
        self._thread = threading.Thread(
            target=_load,
            args=(stream, layout, pool, is_stopped, self._outcome),
            name="trireme-preload",
            daemon=True,
        )
        self._stop = weakref.finalize(self, _stop, is_stopped, self._thread)
        self._thread.start()

    def wait(self) -> LoadedExamples:
        """Wait for its end; returns the outcome, or raises its error."""
        self._thread.join()
        self._stop.detach()
        if not self._outcome:
            raise Internal("InMemoryDataset: the thread that loads ended without a word")
        [outcome] = self._outcome
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def _load(
    stream: Stream,
    layout: ColumnLayout,
    pool: _core.Pool,
    is_stopped: threading.Event,
    outcome: list[LoadedExamples | BaseException],
) -> None:
    try:
        outcome.append(load(stream, layout, pool, is_stopped))
    except BaseException as error:  # noqa: BLE001 raised again by wait()
        outcome.append(error)


def _stop(is_stopped: threading.Event, thread: threading.Thread) -> None:
    is_stopped.set()
    thread.join(_JOIN_S)
