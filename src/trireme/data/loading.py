"""Loads a stream of batches into a column store, also in the background."""

import logging
import threading
import time
from collections.abc import Iterator

from trireme import _core
from trireme.bounded_queue import ReadAhead
from trireme.data.column_layout import ColumnLayout
from trireme.data.queue_dataset import Stream
from trireme.errors import Unavailable

log = logging.getLogger(__name__)

REPORT_S = 5.0
LoadedExamples = tuple[_core.ColumnStore, int]
"""The examples, and the number of broken lines."""


def load(
    stream: Stream, layout: ColumnLayout, pool: _core.Pool, is_stopped: threading.Event
) -> LoadedExamples:
    """Load the whole stream; the log shows progress every few seconds. Raises Unavailable:
    `is_stopped` was set. And what reading raises.
    """
    store: _core.ColumnStore | None = None
    started = reported = time.monotonic()
    with stream:
        for batch in stream:
            if store is None:
                has_weights = batch.bags is not None and batch.bags.weights is not None
                store = layout.new_store(has_weights=has_weights)
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
    return store or layout.new_store(has_weights=False), num_broken_lines


def preload(stream: Stream, layout: ColumnLayout, pool: _core.Pool) -> ReadAhead[LoadedExamples]:
    """Start a load in a thread of its own; its outcome is the only item. The load stops when the
    object is dropped or the interpreter ends.
    """
    is_stopped = threading.Event()

    def outcome() -> Iterator[LoadedExamples]:
        yield load(stream, layout, pool, is_stopped)

    return ReadAhead(outcome(), depth=1, name="trireme-preload", stop=is_stopped.set)
