"""All examples of a pass in memory: loaded once, shuffled, read any number of times."""

from __future__ import annotations

import hashlib
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from trireme import _core
from trireme.bounded_queue import ReadAhead
from trireme.data.batch import Batch, check_stream
from trireme.data.column_layout import ColumnLayout
from trireme.data.global_shuffle import deal_examples
from trireme.data.loading import LoadedExamples, load, preload
from trireme.data.queue_dataset import QueueDataset
from trireme.data.schema import Schema
from trireme.data.sources import Paths
from trireme.errors import BadRequest, NotReady, check_flags, check_values
from trireme.job.cluster import Cluster
from trireme.job.default import default, is_default_set

# Values of one batch of a load: some megabytes.
_LOAD_VALUES = 1 << 18
_LOAD_EXAMPLES_MAX = 1 << 13


class InMemoryDataset:
    """Batches of the lines of text files, which are first loaded into memory.

        dataset = InMemoryDataset("part-*", schema=schema, batch_size=4096)
        dataset.load_into_memory()
        dataset.global_shuffle()
        trainer.fit(dataset)
        dataset.release_memory()

    Each worker of a job loads and holds its own part of the data: the stream of the files that
    QueueDataset would give it, or with `own_files` all files. `stream(worker, workers)` reads all
    of these examples, and no other stream can be read here. After global_shuffle they are the ones
    that the worker received. A process alone (embedded, or before tr.init()) holds everything, and
    cuts it into any number of streams, sizes equal to within 1.

    The order of the examples is a function of the files, the schema, the seed, the number of
    workers and the calls since the load. So a position is valid after the same calls in another
    process, with any number of threads; after other calls it is refused. The order is the same in
    every epoch: shuffle again in between for another.

    Memory: at most 1.3 times the values (8 bytes a key, 4 a number, 1 a character) for examples of
    a few values or more. A shuffle takes one column more, and 8 bytes an example; a global shuffle,
    at its peak, less than half as much again.

    Args:
        paths, schema: as QueueDataset.
        batch_size: examples per batch; the last one of a stream may have fewer.
        threads: for loading, shuffling, and making a batch.
        drop_last: leave out the last batch of a stream if it is short.
        seed: of all shuffles; the same at all workers.
        cluster: the job; default that of tr.init(), if it has been called when loading begins.
        reading: options of QueueDataset on reading files: on_error, own_files, pipe_command,
            storage_options.

    Threads: calls one at a time; streams may be read from several.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        schema: Schema,
        batch_size: int,
        threads: int = 1,
        drop_last: bool = False,
        seed: int = 0,
        cluster: Cluster | None = None,
        **reading: Any,
    ) -> None:
        check_flags("InMemoryDataset", drop_last=drop_last)
        check_values("InMemoryDataset", batch_size=(batch_size >= 1, ">= 1", batch_size))
        self.schema, self.batch_size, self.drop_last = schema, batch_size, drop_last
        self._paths, self._reading, self._threads, self._seed = paths, reading, threads, seed
        self._cluster = cluster
        self._files = self._open(threads)
        self._layout = ColumnLayout(schema)
        self._pool = _core.Pool(threads)
        self._lock = threading.Lock()  # a batch is made in one order
        self._history = ShuffleHistory(seed)
        self._preload: ReadAhead[LoadedExamples] | None = None
        self._store: _core.ColumnStore | None = None
        self._forget()

    def __repr__(self) -> str:
        return (
            f"InMemoryDataset({self._num_loaded} examples in memory, batch_size={self.batch_size},"
            f" columns {', '.join(self.schema.names)})"
        )

    @property
    def cut(self) -> str:
        """What a batch's examples depend on, beside those that are loaded."""
        return (
            f"{self._files.cut} in memory, seed={self._seed}, batch_size={self.batch_size},"
            f" drop_last={self.drop_last}"
        )

    @property
    def own_files(self) -> bool:
        """Whether the files are this worker's; else all workers divide them."""
        return self._files.own_files

    def load_into_memory(self, is_shuffle: bool = False) -> None:
        """Load this worker's part; with `is_shuffle`, then shuffle it (local_shuffle).

        Raises:
            BadRequest: loaded already. NotReady: being preloaded. DataError: as QueueDataset.
        """
        self._check_empty("load_into_memory")
        stream = self._stream_of_files(self._files)
        self._take(load(stream, self._layout, self._pool, threading.Event()))
        if is_shuffle:
            self.local_shuffle()

    def preload_into_memory(self, thread_num: int | None = None) -> None:
        """Begin to load in the background, with `thread_num` threads. Raises as load_into_memory;
        wait_preload_done raises the errors of the data.
        """
        self._check_empty("preload_into_memory")
        files, pool = self._files, self._pool
        if thread_num is not None and thread_num != self._threads:
            files, pool = self._open(thread_num), _core.Pool(thread_num)
        self._preload = preload(self._stream_of_files(files), self._layout, pool)

    def wait_preload_done(self) -> None:
        """Wait until everything is loaded. Raises NotReady without preload_into_memory; DataError
        for wrong data.
        """
        if self._preload is None:
            raise NotReady(
                "InMemoryDataset.wait_preload_done: expected a load under way, found none; "
                "call preload_into_memory() first"
            )
        under_way, self._preload = self._preload, None
        self._take(next(under_way))

    def release_memory(self) -> None:
        """Drop the examples and free their memory; streams over them end with an error."""
        self._check_idle("release_memory")
        with self._lock:
            self._store = None
            self._forget()
        _core.give_back_memory()

    def _open(self, threads: int) -> QueueDataset:
        width = sum(getattr(field, "dim", 1) for field in self.schema.fields)
        return QueueDataset(
            self._paths,
            schema=self.schema,
            batch_size=min(max(_LOAD_VALUES // width, 1), _LOAD_EXAMPLES_MAX),
            threads=threads,
            **self._reading,
        )

    def _stream_of_files(self, files: QueueDataset) -> Any:
        cluster = self._cluster or (default() if is_default_set() else None)
        if cluster is not None and cluster.num_streams:
            raise BadRequest(
                "InMemoryDataset.load_into_memory: expected a job in which each worker has its own"
                f" part of the examples, found one with {cluster.num_streams} leased streams, whose"
                " workers may come late: use a QueueDataset"
            )
        self._place = (0, 1) if cluster is None else (cluster.worker, cluster.num_workers)
        return files.stream(*self._place)

    def _take(self, loaded: LoadedExamples) -> None:
        with self._lock:
            self._store, self.num_broken_lines = loaded
            self._num_loaded = self._store.num_rows
            self._history.begin(*self._place, self._num_loaded)

    def _forget(self) -> None:
        self._place = (0, 1)
        self._num_loaded = self._num_shuffled = self.num_broken_lines = 0

    def local_shuffle(self) -> None:
        """Put this worker's examples into a random order, another one at each call after a load.

        Raises:
            NotReady: not loaded, or being preloaded.
        """
        store = self._loaded("local_shuffle")
        with self._lock:
            self._shuffle(store, "local_shuffle", self._layout.all_numbers)
            self._num_shuffled = store.num_rows

    def global_shuffle(self, cluster: Cluster | None = None, *, by_ins_id: bool = False) -> None:
        """Deal the examples of all workers to all workers at random, then shuffle each one's.

        Every worker calls it. The result depends on the seed, the examples and the number of
        workers. If it fails, the examples are lost: load them again.

        Args:
            cluster: the job; default that of tr.init(). Alone, the same as local_shuffle.
            by_ins_id: all examples of an ins_id go to worker hash(ins_id) % workers, where hash is
                XXH64 with seed 0.

        Raises:
            NotReady: not loaded, or being preloaded. BadRequest: `by_ins_id` without InsId in the
            schema; loaded as a worker of another job.
            SchemaMismatch: the workers hold other columns. DeadlineExceeded, Unavailable: another
            worker has ended or does not answer.
        """
        store = self._loaded("global_shuffle")
        if by_ins_id and self._layout.ins_id is None:
            raise BadRequest(
                "InMemoryDataset.global_shuffle: expected an InsId field for by_ins_id, "
                f"found {self.schema}"
            )
        cluster = self._job(cluster)
        with self._lock:
            if cluster is not None:
                self._store = None  # incomplete until all examples have arrived
                self._store = store = self._deal(store, cluster, by_ins_id)
            call = f"global_shuffle by_ins_id={by_ins_id}"
            self._shuffle(store, call, self._layout.all_numbers)
            self._num_shuffled = store.num_rows
        _core.give_back_memory()

    def slots_shuffle(self, features: Iterable[str]) -> None:
        """Permute the values of these features (or other fields) over the examples.

        The features of one call move together, by one random permutation of this worker's examples;
        the others stay. A model that needs a feature is worse on data in which it was shuffled: the
        drop of its AUC measures the feature's importance.

        Raises:
            NotReady: not loaded, or being preloaded. BadRequest: a name that the schema lacks.
        """
        if isinstance(features, str):
            raise BadRequest(f"InMemoryDataset.slots_shuffle: expected names, found {features!r}")
        names = sorted(set(features))
        numbers = self._layout.numbers_of(names)
        store = self._loaded("slots_shuffle")
        with self._lock:
            self._shuffle(store, f"slots_shuffle {names}", numbers)

    def _shuffle(self, store: _core.ColumnStore, call: str, numbers: list[int]) -> None:
        """The caller holds the lock."""
        self._history.add(call, store.num_rows)
        store.shuffle(self._history.seed(call, self._place[0]), numbers, self._pool)

    def _deal(
        self, store: _core.ColumnStore, cluster: Cluster, by_ins_id: bool
    ) -> _core.ColumnStore:
        seed = self._history.seed("exchange", cluster.worker)

        def receivers(rows: _core.ColumnStore, number: int) -> Any:
            if by_ins_id:
                assert self._layout.ins_id is not None
                return rows.parts_by_string(self._layout.ins_id, cluster.num_workers)
            return rows.random_parts((seed + number) % (1 << 64), cluster.num_workers)

        return deal_examples(
            store,
            lambda has_weights: self._layout.new_store(has_weights=has_weights),
            receivers,
            columns=str(self.schema.fields),
            cluster=cluster,
            pool=self._pool,
        )

    def _job(self, cluster: Cluster | None) -> Cluster | None:
        """The cluster, if it has other workers."""
        cluster = cluster or self._cluster or (default() if is_default_set() else None)
        place = (0, 1) if cluster is None else (cluster.worker, cluster.num_workers)
        if place != self._place:
            raise BadRequest(
                f"InMemoryDataset.global_shuffle: expected examples loaded as worker {place[0]} of "
                f"{place[1]}, found them loaded as {self._place[0]} of {self._place[1]}; call "
                "tr.init() before load_into_memory()"
            )
        return cluster if place[1] > 1 else None

    def get_memory_data_size(self, cluster: Cluster | None = None) -> int:
        """Examples that the latest load gave this worker; with a cluster, all workers together
        (every worker calls it). 0 after release_memory.
        """
        return _sum(self._num_loaded, cluster)

    def get_shuffle_data_size(self, cluster: Cluster | None = None) -> int:
        """Examples that this worker holds since the latest local or global shuffle, 0 before it;
        with a cluster, all workers together (every worker calls it).
        """
        return _sum(self._num_shuffled, cluster)

    @property
    def num_bytes(self) -> int:
        """Memory of the examples in this process; 0 if none are loaded."""
        return 0 if self._store is None else self._store.num_bytes

    @property
    def num_value_bytes(self) -> int:
        """Memory of their values alone: 8 bytes a key, 4 a number, 1 a character."""
        return 0 if self._store is None else self._store.num_value_bytes

    def __iter__(self) -> InMemoryStream:
        """All examples that this worker holds."""
        return self.stream(*self._place)

    def stream(
        self, index: int, num_streams: int, *, start: tuple[int, ...] | None = None, epoch: int = 0
    ) -> InMemoryStream:
        """This worker's examples, as stream `index` of `num_streams`.

        Args:
            index, num_streams: the worker and the number of workers that loaded; alone, any.
            start: the `position` of a batch of this stream, after the same calls: the stream
                continues after that batch. None or (): from its beginning.
            epoch: ignored: the order is the one in memory in every epoch.

        Raises:
            NotReady: not loaded, or being preloaded. BadRequest: another worker's stream, a number
            out of range, or a position in another order.
        """
        store = self._loaded("stream")
        check_stream("InMemoryDataset", index, num_streams, epoch)
        begin, end = 0, store.num_rows
        if self._place[1] == 1:
            begin, end = (store.num_rows * i // num_streams for i in (index, index + 1))
        elif self._place != (index, num_streams):
            raise BadRequest(
                f"InMemoryDataset.stream: expected the stream of the worker that loaded, "
                f"{self._place[0]} of {self._place[1]}, found {index} of {num_streams}"
            )
        order = self._history.order
        start = tuple(start or (begin, order))
        if len(start) != 2 or not begin <= start[0] <= end or start[1] != order:
            raise BadRequest(
                f"InMemoryDataset.stream: expected a position (example from {begin} to {end}, "
                f"{order} for this order), found {start}; are files, seed, workers and the "
                "calls since the load those it was taken with?"
            )
        return InMemoryStream(self, index, begin, end, (start[0], order))

    def _batch(self, begin: int, end: int, order: int) -> Batch:
        """The examples [begin, end). Raises BadRequest if they are in another order now."""
        with self._lock:
            if self._store is None or self._history.order != order:
                raise BadRequest(
                    "InMemoryDataset: expected a stream to be read before its examples are "
                    "shuffled or released; make another stream"
                )
            return self._layout.batch(self._store, begin, end, self._pool)

    def _loaded(self, what: str) -> _core.ColumnStore:
        self._check_idle(what)
        if self._store is None:
            raise NotReady(
                f"InMemoryDataset.{what}: expected examples in memory, found none; "
                "call load_into_memory() first"
            )
        return self._store

    def _check_idle(self, what: str) -> None:
        if self._preload is not None:
            raise NotReady(
                f"InMemoryDataset.{what}: expected no load under way, found a preload; "
                "call wait_preload_done() first"
            )

    def _check_empty(self, what: str) -> None:
        self._check_idle(what)
        if self._store is not None:
            raise BadRequest(
                f"InMemoryDataset.{what}: expected nothing in memory, found "
                f"{self._store.num_rows} examples; call release_memory() first"
            )
        self._forget()


class ShuffleHistory:
    """The calls since a load, in order.

    Attributes:
        order: a number for the order of the examples: equal after the same calls.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.order = self._num_shuffles = 0

    def begin(self, worker: int, num_workers: int, num_examples: int) -> None:
        """Examples have been loaded."""
        self.order = zlib.crc32(
            repr(("load", self._seed, worker, num_workers, num_examples)).encode()
        )
        self._num_shuffles = 0

    def add(self, call: str, num_examples: int) -> None:
        """Another shuffle begins."""
        self._num_shuffles += 1
        text = repr((call, self._num_shuffles, num_examples))
        self.order = zlib.crc32(text.encode(), self.order)

    def seed(self, call: str, worker: int) -> int:
        """64 bits for the current shuffle."""
        text = repr((self._seed, call, self._num_shuffles, worker))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class InMemoryStream(Iterator[Batch]):
    """The batches of the examples [position[0], end); made by InMemoryDataset.stream.

    Attributes:
        position: after the latest batch returned: (example, number of the order).
        seconds: spent making batches.

    Threads: one at a time.
    """

    def __init__(
        self, dataset: InMemoryDataset, index: int, begin: int, end: int, position: tuple[int, int]
    ) -> None:
        self.position = position
        self.seconds = {"read": 0.0, "parse": 0.0}
        self.num_broken_lines = dataset.num_broken_lines
        self._dataset, self._index, self._begin, self._end = dataset, index, begin, end

    def __next__(self) -> Batch:
        begin, order = self.position
        end = min(begin + self._dataset.batch_size, self._end)
        is_short = end - begin < self._dataset.batch_size
        if begin == end or (is_short and self._dataset.drop_last):
            raise StopIteration
        started = time.monotonic()
        batch = self._dataset._batch(begin, end, order)
        self.seconds["read"] += time.monotonic() - started
        self.position = (end, order)
        batch.stream, batch.position = self._index, self.position
        return batch

    def fraction_read(self) -> float:
        """The fraction of the stream that has been returned, 0 to 1."""
        size = self._end - self._begin
        return (self.position[0] - self._begin) / size if size else 1.0

    def close(self) -> None:
        """Do nothing: batches are made on demand."""

    def __enter__(self) -> InMemoryStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sum(number: int, cluster: Cluster | None) -> int:
    """Of all workers, if there is a cluster."""
    if cluster is None:
        return number
    parts = cluster.client.coordinator.gather({}, [np.array([number])], purpose="sum of examples")
    return sum(int(arrays[0][0]) for _, arrays in parts)
