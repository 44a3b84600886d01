"""Examples dealt among workers over real sockets: none lost, none doubled, the same every time."""

from __future__ import annotations

import resource
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from tests.example_lists import Example, batch_of, examples_of, random_examples
from tests.jobs import Job, in_threads
from trireme import _core
from trireme.data import (
    Dense,
    InMemoryDataset,
    InsId,
    Label,
    Schema,
    Sparse,
    global_shuffle,
    multislot,
)
from trireme.data.column_layout import ColumnLayout
from trireme.errors import (
    BadRequest,
    Corruption,
    DeadlineExceeded,
    NotReady,
    SchemaMismatch,
    TriremeError,
    Unavailable,
)
from trireme.job.cluster import Cluster
from trireme.job.connecting import connect
from trireme.nn import EmbeddingBag
from trireme.rpc import ClientKeys, RpcClient, Server, ServerKeys, make_keys
from trireme.table import Table
from trireme.train.loop.worker_batches import worker_batches
from trireme.train.trainer import Trainer

SCHEMA = Schema([Label(), InsId(), Dense("d", 3), *(Sparse(f"s{i}") for i in range(3))])
CHUNK_EXAMPLES = 20


@pytest.fixture(autouse=True)
def _many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_shuffle, "SLICE_BYTES_MIN", 1 << 10)


class Fed:
    """What a dataset loads from, given as a list of examples."""

    num_broken_lines = 0

    def __init__(self, schema: Schema, examples: list[Example]) -> None:
        self._schema, self._examples = schema, examples

    def __enter__(self) -> Fed:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __iter__(self) -> Any:
        for i in range(0, len(self._examples), CHUNK_EXAMPLES):
            yield batch_of(self._schema, self._examples[i : i + CHUNK_EXAMPLES])


class Given(InMemoryDataset):
    """Loads a list of examples instead of files."""

    def __init__(
        self, cluster: Cluster, examples: list[Example], schema: Schema, threads: int
    ) -> None:
        self._drawn = Fed(schema, examples)
        super().__init__("", schema=schema, batch_size=64, threads=threads, cluster=cluster)

    def _open(self, threads: int) -> Any:
        return self._drawn

    def _stream_of_files(self, files: Any) -> Any:
        assert self._cluster is not None
        self._place = (self._cluster.worker, self._cluster.num_workers)
        return files


def dataset_of(
    cluster: Cluster, examples: list[Example], *, schema: Schema = SCHEMA, threads: int = 1
) -> InMemoryDataset:
    """Loaded, as from a file of these examples."""
    dataset = Given(cluster, examples, schema, threads)
    dataset.load_into_memory()
    return dataset


def examples_in(dataset: InMemoryDataset) -> list[Example]:
    return [e for batch in dataset for e in examples_of(dataset.schema, batch)]


def some_examples(sizes: Sequence[int], *, has_weights: bool = False) -> list[list[Example]]:
    """Of each worker; every one is there once."""
    random = Random(5)
    return [
        [
            {**example, "d": (float(worker), float(i), 0.0)}
            for i, example in enumerate(
                random_examples(random, SCHEMA, size, has_weights=has_weights)
            )
        ]
        for worker, size in enumerate(sizes)
    ]


def shuffled(
    sizes: Sequence[int], *, has_weights: bool = False, threads: int = 1, by_ins_id: bool = False
) -> list[list[Example]]:
    """What each worker holds after a global shuffle."""
    examples = some_examples(sizes, has_weights=has_weights)

    def work(cluster: Cluster) -> list[Example]:
        dataset = dataset_of(cluster, examples[cluster.worker], threads=threads)
        dataset.global_shuffle(by_ins_id=by_ins_id)
        held = examples_in(dataset)
        assert dataset.get_memory_data_size() == sizes[cluster.worker]
        assert dataset.get_shuffle_data_size() == len(held)
        assert dataset.get_memory_data_size(cluster) == sum(sizes)
        assert dataset.get_shuffle_data_size(cluster) == sum(sizes)
        return held

    with Job(1) as job:
        return job.run(len(sizes), work)


def as_counts(examples: Sequence[list[Example]]) -> Counter[str]:
    return Counter(repr(sorted(e.items())) for part in examples for e in part)


@pytest.mark.parametrize(
    ("sizes", "has_weights"),
    [([400], False), ([300, 500, 401], False), ([0, 300, 0], True), ([0, 0], False)],
    ids=str,
)
def test_no_example_is_lost_or_doubled(sizes: list[int], has_weights: bool) -> None:
    examples = some_examples(sizes, has_weights=has_weights)
    held = shuffled(sizes, has_weights=has_weights)
    assert as_counts(held) == as_counts(examples)
    for part in held:  # about a share from each
        origins = Counter(e["d"][0] for e in part)
        for worker, size in enumerate(sizes):
            assert abs(origins[float(worker)] - size / len(sizes)) <= 6 * (size / 4) ** 0.5
    assert held[0] != examples[0] or not examples[0]


def test_the_result_depends_on_neither_timing_nor_threads() -> None:
    first = shuffled([300, 200, 250])
    assert shuffled([300, 200, 250], threads=3) == first


def test_by_ins_id_all_examples_of_one_meet() -> None:
    held = shuffled([300, 200, 250], by_ins_id=True)
    assert as_counts(held) == as_counts(some_examples([300, 200, 250]))
    names = [{e["ins_id"] for e in part} for part in held]
    assert all(names)
    assert not names[0] & names[1]
    assert not names[0] & names[2]
    assert not names[1] & names[2]


def test_a_trainer_reads_the_examples_of_its_own_worker() -> None:
    examples = some_examples([150, 100])

    def work(cluster: Cluster) -> list[Example]:
        dataset = dataset_of(cluster, examples[cluster.worker])
        return [e for batch in worker_batches(dataset, cluster) for e in examples_of(SCHEMA, batch)]

    with Job(1) as job:
        assert job.run(2, work) == examples


def test_a_second_shuffle_deals_anew_and_positions_hold_at_each_worker() -> None:
    examples = some_examples([150, 100])

    def work(cluster: Cluster) -> Any:
        actual = []
        for _ in range(2):  # as two processes, one after the other
            dataset = dataset_of(cluster, examples[cluster.worker])
            dataset.global_shuffle()
            once = examples_in(dataset)
            dataset.global_shuffle()
            assert examples_in(dataset) != once
            batches = list(dataset.stream(cluster.worker, 2))
            actual.append((dataset, batches))
        (_, batches), (dataset, again) = actual
        for batch in batches:
            stream = dataset.stream(cluster.worker, 2, start=batch.position)
            rest = [e for b in stream for e in examples_of(SCHEMA, b)]
            number = batches.index(batch) + 1
            assert rest == [e for b in again[number:] for e in examples_of(SCHEMA, b)]
        with pytest.raises(BadRequest, match="expected the stream of the worker that loaded"):
            dataset.stream(0, 1)
        return len(batches)

    with Job(1) as job:
        assert all(job.run(2, work))


def test_memory_stays_below_one_and_a_half_times_the_data() -> None:
    """By the stores' own count, with slices on their way: one sent, two received."""
    examples = some_examples([3000, 3000, 3000])
    peaks: list[float] = []

    def work(cluster: Cluster) -> None:
        dataset = dataset_of(cluster, examples[cluster.worker])
        store, layout, made = dataset._store, ColumnLayout(SCHEMA), []
        assert store is not None
        num_bytes = store.num_bytes

        def new_store(has_weights: bool) -> _core.ColumnStore:
            made.append(layout.new_store(has_weights=has_weights))
            return made[0]

        def deal(rows: _core.ColumnStore, number: int) -> Any:
            held = rows.num_bytes + store.num_bytes + made[0].num_bytes
            peaks.append((held + 3 * rows.num_bytes) / num_bytes)
            return rows.random_parts(number, 3)

        global_shuffle.deal_examples(
            store, new_store, deal, columns="", cluster=cluster, pool=_core.Pool(1)
        )
        assert store.num_rows == 0

    with Job(1) as job:
        job.run(3, work)
    assert len(peaks) == 3 * global_shuffle.SLICES
    assert max(peaks) <= 1.5


def test_different_columns_of_workers_are_an_error_on_all() -> None:
    def work(cluster: Cluster) -> str:
        schema = Schema([Label(), Dense("d", 2 + cluster.worker)])
        examples = random_examples(Random(1), schema, 50, has_weights=False)
        dataset = dataset_of(cluster, examples, schema=schema)
        with pytest.raises(SchemaMismatch) as caught:
            dataset.global_shuffle()
        return str(caught.value)

    with Job(1) as job:
        errors = job.run(2, work)
    assert errors[0] == errors[1]
    assert "found at worker 1: (Label(name='label'), Dense(name='d', dim=3))" in errors[0]


def test_weights_at_some_workers_only_are_refused() -> None:
    def work(cluster: Cluster) -> None:
        examples = random_examples(Random(1), SCHEMA, 50, has_weights=cluster.worker == 1)
        dataset = dataset_of(cluster, examples)
        with pytest.raises(SchemaMismatch, match=r"found \(by worker\) \[False, True\]"):
            dataset.global_shuffle()

    with Job(1) as job:
        job.run(2, work)


def test_examples_loaded_outside_the_job_are_refused() -> None:
    def work(cluster: Cluster) -> None:
        dataset = dataset_of(cluster, [])
        dataset._place = (0, 1)
        with pytest.raises(BadRequest, match=r"found them loaded as 0 of 1; call tr.init\(\)"):
            dataset.global_shuffle()

    with Job(1) as job:
        job.run(2, work)


# ---- keys ----


def test_workers_prove_their_keys_to_each_other(tmp_path: Path) -> None:
    """Each worker has a key of its own; a stranger is not let in."""
    pairs = [make_keys(tmp_path / name) for name in ("server", "worker0", "worker1", "stranger")]
    examples = some_examples([100, 100])
    reached: list[str] = []

    def work(worker: int, endpoint: str, spy: Callable[[str], None]) -> list[Example]:
        keys = ClientKeys(own=pairs[1 + worker], server=pairs[0].public)
        with connect([endpoint], worker=worker, num_workers=2, threads=1, keys=keys) as cluster:
            dataset = dataset_of(cluster, examples[worker])
            gather = cluster.client.coordinator.gather

            def watch(body: Any, *args: Any, **options: Any) -> Any:
                if "endpoint" in body:
                    spy(body["endpoint"])
                return gather(body, *args, **options)

            cluster.client.coordinator.gather = watch  # type: ignore[method-assign]
            dataset.global_shuffle()
            return examples_in(dataset)

    def intrude(endpoint: str) -> None:
        keys = ClientKeys(own=pairs[3], server=pairs[1].public)
        strangers = ((RpcClient(name="no keys"), 0.3), (RpcClient(name="stranger", keys=keys), 30))
        for client, timeout_s in strangers:
            with client, pytest.raises(TriremeError) as caught:
                client.call(endpoint, "exchange.piece", {}, timeout_s=timeout_s)
            reached.append(type(caught.value).__name__)

    job = Job(1)
    job.servers[0].rpc = Server(
        "127.0.0.1:0",
        job.servers[0].rpc._handlers,
        name="server",
        keys=ServerKeys(own=pairs[0], admitted=frozenset(p.public for p in pairs[1:3])),
    )
    with job:
        held = in_threads(
            [
                lambda: work(0, job.endpoints[0], intrude),
                lambda: work(1, job.endpoints[0], lambda _: None),
            ]
        )
    assert as_counts(held) == as_counts(examples)
    assert reached == ["Unavailable", "NotAdmitted"]


# ---- what comes from outside ----


def test_pieces_out_of_place_are_refused_and_repeated_ones_ignored() -> None:
    inbox = global_shuffle._Inbox(2, 0.05)
    inbox.token = "t"
    piece = np.arange(3, dtype=np.uint8)
    with (
        Server("127.0.0.1:0", {"exchange.piece": inbox.on_piece}, name="w") as server,
        RpcClient(name="c") as client,
    ):

        def send(*arrays: Any, **body: Any) -> None:
            body = {"exchange": "t", "round": 0, "worker": 1} | body
            client.call(server.endpoint, "exchange.piece", body, arrays, timeout_s=5)

        send(piece)
        send(piece + 1)
        send(piece + 2, round=1)
        for wrong in (
            *({"exchange": "u"}, {"round": 2}, {"round": -1}, {"round": "0"}),
            *({"worker": 2}, {"worker": -1}, {"worker": None}),
        ):
            with pytest.raises(BadRequest, match="expected one array of bytes for this exchange"):
                send(piece, **wrong)
        for arrays in ((), (piece, piece), (piece.astype(np.int8),), (piece[None],)):
            with pytest.raises(BadRequest, match="expected one array of bytes for this exchange"):
                send(*arrays)
    assert inbox.take(0, 1).tolist() == [0, 1, 2]
    assert inbox.take(1, 1).tolist() == [2, 3, 4]
    with pytest.raises(DeadlineExceeded, match="no examples from worker 1 in round 2 within"):
        inbox.take(2, 1)


def test_a_piece_that_is_none_is_refused() -> None:
    store = ColumnLayout(SCHEMA).new_store(has_weights=False)
    for junk in (b"", b"TRC1", b"x" * 1000, bytes(1000)):
        with pytest.raises(Corruption, match=r"ColumnStore\.append_piece: expected"):
            store.append_piece(np.frombuffer(junk, np.uint8))
    assert store.num_rows == 0


def test_a_piece_that_claims_many_rows_costs_no_memory() -> None:
    """2^31 rows with counts of 32 bits: the bits of all rows do not fit 32 bits."""
    store = _core.ColumnStore([], 0, 1, False)
    piece = np.array([0x31435254, 1, 1 << 31, 0, 1 << 31, 0, 32, 0], np.uint32).view(np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Corruption, match="expected no more than 0 bytes, found a column of 2147"):
        store.append_piece(piece)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


@pytest.mark.parametrize("when", ["before", "midway"])
def test_a_worker_that_fails_is_an_error_of_the_others(when: str) -> None:
    """What is left of the examples is not used."""
    examples = some_examples([200, 200, 200])

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("no more")

    def work(cluster: Cluster) -> str:
        dataset = dataset_of(cluster, examples[cluster.worker])
        if cluster.worker == 2:
            cluster.client.coordinator.gather, gather = fail, cluster.client.coordinator.gather  # type: ignore[method-assign]
            if when == "midway":
                cluster.client.coordinator.gather = gather  # type: ignore[method-assign]
                dataset._layout.new_store = fail  # type: ignore[method-assign]
        failures = (MemoryError, DeadlineExceeded, Unavailable, BadRequest)
        with pytest.raises(failures) as caught:
            dataset.global_shuffle()
        with pytest.raises(NotReady, match=r"call load_into_memory\(\) first"):
            iter(dataset)
        return type(caught.value).__name__

    with Job(1) as job:
        errors = job.run(3, work, timeout_s=1.5)
    assert errors[2] == "MemoryError"
    assert "MemoryError" not in errors[:2]
    if when == "before":  # its script ends: the others need not wait for their deadline
        assert errors[:2] == ["BadRequest", "BadRequest"]


@pytest.mark.parametrize("shuffles", [False, True])
def test_workers_that_load_other_files_than_the_others_are_refused(
    tmp_path: Path, shuffles: bool
) -> None:
    loaded = threading.Barrier(2)

    def write(name: str) -> None:
        (tmp_path / name).write_text("".join(f"1 {i % 2} 1 {i}\n" for i in range(100)))

    def work(cluster: Cluster) -> str:
        if cluster.worker == 1:
            loaded.wait(60)
        schema = multislot([Label("click"), Sparse("item")])
        dataset = InMemoryDataset(
            f"{tmp_path}/part-*", schema=schema, batch_size=16, cluster=cluster
        )
        dataset.load_into_memory()
        if cluster.worker == 0:
            write("part-1")
            loaded.wait(60)
        if shuffles:
            dataset.global_shuffle()
        rows = EmbeddingBag(Table("items", dim=1), features=["item"])
        trainer = Trainer(
            rows, None, loss=lambda rows, _: rows.sum(), label=None, progress=False, cluster=cluster
        )
        with pytest.raises(BadRequest) as caught:  # of the other, that this one has ended
            trainer.fit(dataset)
        return str(caught.value)

    write("part-0")
    with Job(1) as job:
        errors = job.run(2, work, timeout_s=10)
    assert any("expected the data with which it was begun" in error for error in errors)
    assert any("or files of their own by own_files=True" in error for error in errors)


def test_a_list_of_which_each_worker_has_cut_its_own_part_is_refused() -> None:
    """Each would train on every second batch of its half: half of the examples would be lost."""

    def work(cluster: Cluster) -> str:
        batches = [{"item": item} for item in torch.arange(200)[::2].split(10)]
        rows = EmbeddingBag(Table("items", dim=1), features=["item"])
        trainer = Trainer(
            rows, None, loss=lambda rows, _: rows.sum(), label=None, progress=False, cluster=cluster
        )
        with pytest.raises(BadRequest) as caught:  # of the other, that this one has ended
            trainer.fit(batches[cluster.worker :: 2])
        return str(caught.value)

    with Job(1) as job:
        errors = job.run(2, work, timeout_s=10)
    assert any("expected the data with which it was begun, 5 batches" in error for error in errors)


def test_columns_of_workers_that_are_in_different_orders_are_refused() -> None:
    """As of a DataFrame that each has shuffled by itself."""

    def work(cluster: Cluster) -> str:
        items = np.random.default_rng(cluster.worker).permutation(100)
        rows = EmbeddingBag(Table("items", dim=1), features=["item"])
        trainer = Trainer(
            rows, None, loss=lambda rows, _: rows.sum(), label=None, progress=False, cluster=cluster
        )
        with pytest.raises(BadRequest) as caught:  # of the other, that this one has ended
            trainer.fit({"item": items})
        return str(caught.value)

    with Job(1) as job:
        errors = job.run(2, work, timeout_s=10)
    assert any("expected the data with which it was begun" in error for error in errors)
