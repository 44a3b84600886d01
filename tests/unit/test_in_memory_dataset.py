"""InMemoryDataset: contents, orders, positions, and calls in the wrong order."""

from __future__ import annotations

import gc
import itertools
import threading
from pathlib import Path
from random import Random

import pytest

from tests.criteo_text import Example, examples_of, random_line
from trireme.data import InMemoryDataset, QueueDataset, criteo
from trireme.errors import BadRequest, DataError, NotReady

NUM_EXAMPLES = 500
SPARSE = [f"C{i}" for i in range(1, 27)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = Random(3)
    for i, num_lines in enumerate([200, 1, 299]):
        lines = [random_line(random) for _ in range(num_lines)]
        (tmp_path / f"part-{i}").write_bytes(b"\n".join(lines) + b"\n")
    return tmp_path


def make(folder: Path, **options) -> InMemoryDataset:
    return InMemoryDataset(f"{folder}/part-*", **{"schema": criteo(), "batch_size": 64} | options)


def loaded(folder: Path, **options) -> InMemoryDataset:
    dataset = make(folder, **options)
    dataset.load_into_memory()
    return dataset


def flat(batches) -> list[Example]:
    return [example for batch in batches for example in examples_of(batch)]


def plain(folder: Path) -> list[Example]:
    return flat(QueueDataset(f"{folder}/part-*", schema=criteo(), batch_size=64))


class Gate:
    """A data file's stream that gives nothing until it is opened."""

    def __init__(self, stream) -> None:
        self._stream, self.opened, self.is_reached = stream, threading.Event(), threading.Event()
        self.num_broken_lines = 0

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def __iter__(self):
        self.is_reached.set()
        assert self.opened.wait(30)
        yield from self._stream

    def fraction_read(self) -> float:
        return self._stream.fraction_read()


def gated(folder: Path) -> tuple[InMemoryDataset, Gate]:
    """Its load waits for the gate."""
    dataset = make(folder)
    gate = Gate(QueueDataset(f"{folder}/part-*", schema=criteo(), batch_size=64).stream(0, 1))
    dataset._stream_of_files = lambda _: gate
    return dataset, gate


def test_it_holds_what_the_files_hold_in_their_order(folder):
    dataset = loaded(folder)
    batches = list(dataset)
    assert flat(batches) == plain(folder)
    assert [b.num_examples for b in batches] == [64] * 7 + [52]
    assert [b.num_examples for b in loaded(folder, drop_last=True)] == [64] * 7
    assert flat(dataset) == plain(folder)  # as often as wanted
    assert (dataset.get_memory_data_size(), dataset.get_shuffle_data_size()) == (NUM_EXAMPLES, 0)


def test_it_takes_little_more_memory_than_its_values(tmp_path):
    line = b"1" + b"\t7" * 13 + b"\tff" * 26 + b"\n"
    (tmp_path / "part-0").write_bytes(line * 20_000)
    dataset = loaded(tmp_path)
    assert dataset.num_value_bytes == 20_000 * (4 + 13 * 4 + 26 * 8)
    assert dataset.num_bytes <= 1.3 * dataset.num_value_bytes


def test_a_single_process_cuts_its_examples_into_streams(folder):
    dataset = loaded(folder)
    streams = [flat(dataset.stream(i, 3)) for i in range(3)]
    assert list(itertools.chain(*streams)) == plain(folder)
    assert max(map(len, streams)) - min(map(len, streams)) <= 1


def test_own_files_are_loaded_whole(folder):
    assert flat(loaded(folder, own_files=True)) == plain(folder)


def test_shuffles_are_permutations_by_seed_and_number(folder):
    dataset, again, other = loaded(folder), loaded(folder, threads=3), loaded(folder, seed=1)
    seen = [flat(dataset)]
    for shuffle in ("local_shuffle", "local_shuffle", "global_shuffle"):
        for each in (dataset, again, other):
            getattr(each, shuffle)()
        assert flat(again) == flat(dataset)
        assert flat(other) != flat(dataset)
        assert flat(dataset) not in seen
        assert sorted(map(repr, flat(dataset))) == sorted(map(repr, seen[0]))
        seen.append(flat(dataset))
    assert dataset.get_shuffle_data_size() == NUM_EXAMPLES
    is_shuffled = make(folder)
    is_shuffled.load_into_memory(is_shuffle=True)
    assert flat(is_shuffled) == seen[1]


def test_slots_shuffle_moves_the_features_together_and_nothing_else(folder):
    before, dataset = plain(folder), loaded(folder)
    dataset.slots_shuffle(["C3", "C1"])
    after = flat(dataset)
    assert [(e.label, e.dense, e.keys[1], e.keys[3:]) for e in after] == [
        (e.label, e.dense, e.keys[1], e.keys[3:]) for e in before
    ]
    pairs = [[repr((e.keys[0], e.keys[2])) for e in order] for order in (before, after)]
    assert pairs[0] != pairs[1]
    assert sorted(pairs[0]) == sorted(pairs[1])
    dataset.slots_shuffle(["dense", "label"])
    assert [e.keys for e in flat(dataset)] == [e.keys for e in after]
    assert [e.dense for e in flat(dataset)] != [e.dense for e in after]
    with pytest.raises(BadRequest, match=r"expected names out of label, dense, C1, .* found X, Y"):
        dataset.slots_shuffle(["Y", "C1", "X"])
    with pytest.raises(BadRequest, match="expected names, found 'C1'"):
        dataset.slots_shuffle("C1")


@pytest.mark.parametrize("num_streams", [1, 3])
def test_a_stream_goes_on_after_any_batch_in_another_process_and_with_other_threads(
    folder, num_streams
):
    def shuffled(threads: int) -> InMemoryDataset:
        dataset = loaded(folder, threads=threads)
        dataset.local_shuffle()
        dataset.slots_shuffle(["C1"])
        return dataset

    first, second = shuffled(1), shuffled(4)
    for index in range(num_streams):
        batches = list(first.stream(index, num_streams))
        for number, batch in enumerate(batches):
            stream = second.stream(index, num_streams, start=batch.position)
            assert stream.position == batch.position
            assert flat(stream) == flat(batches[number + 1 :])
        assert stream.fraction_read() == 1.0


def test_positions_of_another_order_are_refused(folder):
    dataset = loaded(folder)
    position = next(iter(dataset)).position
    for other in (loaded(folder, seed=1), dataset):
        other.local_shuffle()
        with pytest.raises(BadRequest, match="are files, seed, workers and the calls since"):
            other.stream(0, 1, start=position)
    for wrong in [(1,), (-1, position[1]), (501, position[1])]:
        with pytest.raises(BadRequest, match=r"expected a position"):
            loaded(folder).stream(0, 1, start=wrong)
    for wrong in [(1, 1, 0), (-1, 1, 0), (0, 1, -1)]:
        with pytest.raises(BadRequest, match=r"expected 0 <= index < num_streams and epoch >= 0"):
            dataset.stream(*wrong[:2], epoch=wrong[2])


@pytest.mark.parametrize("change", ["local_shuffle", "release_memory"])
def test_a_stream_ends_with_an_error_when_its_order_is_gone(folder, change):
    dataset = loaded(folder)
    stream = iter(dataset)
    next(stream)
    getattr(dataset, change)()
    with pytest.raises(BadRequest, match="shuffled or released; make another stream"):
        next(stream)


def test_a_release_forgets_and_a_new_load_starts_over(folder):
    dataset = loaded(folder)
    dataset.local_shuffle()
    shuffled = flat(dataset)
    with pytest.raises(BadRequest, match=r"found 500 examples; call release_memory\(\) first"):
        dataset.load_into_memory()
    dataset.release_memory()
    assert (dataset.get_memory_data_size(), dataset.get_shuffle_data_size()) == (0, 0)
    assert (dataset.num_bytes, dataset.num_value_bytes) == (0, 0)
    dataset.release_memory()
    dataset.load_into_memory(is_shuffle=True)
    assert flat(dataset) == shuffled


def test_a_preload_runs_in_the_background_and_is_waited_for(folder):
    dataset, gate = gated(folder)
    dataset.preload_into_memory(2)
    assert gate.is_reached.wait(30)
    for call in (
        *(dataset.local_shuffle, dataset.global_shuffle, dataset.release_memory),
        *(dataset.load_into_memory, dataset.preload_into_memory),
        *(lambda: dataset.slots_shuffle(["C1"]), lambda: iter(dataset)),
    ):
        with pytest.raises(NotReady, match=r"found a preload; call wait_preload_done\(\) first"):
            call()
    gate.opened.set()
    dataset.wait_preload_done()
    assert flat(dataset) == plain(folder)


def test_a_preload_with_other_threads_brings_the_same(folder):
    dataset = make(folder)
    dataset.preload_into_memory(3)
    dataset.wait_preload_done()
    assert flat(dataset) == plain(folder)


def test_calls_before_a_load_are_errors_that_name_the_call(folder):
    dataset = make(folder)
    for name in ("local_shuffle", "global_shuffle", "__iter__"):
        with pytest.raises(NotReady, match=r"found none; call load_into_memory\(\) first"):
            getattr(dataset, name)()
    with pytest.raises(NotReady, match=r"call preload_into_memory\(\) first"):
        dataset.wait_preload_done()
    with pytest.raises(BadRequest, match="expected an InsId field for by_ins_id"):
        loaded(folder).global_shuffle(by_ins_id=True)


@pytest.mark.parametrize("is_preloaded", [False, True])
def test_wrong_data_is_named_and_leaves_nothing(folder, is_preloaded):
    with (folder / "part-1").open("ab") as file:
        file.write(b"2\tno\n")
    dataset = make(folder)
    load = dataset.load_into_memory
    if is_preloaded:
        dataset.preload_into_memory()
        load = dataset.wait_preload_done
    with pytest.raises(DataError, match="part-1 line 2"):
        load()
    with pytest.raises(NotReady, match="found none"):
        iter(dataset)
    counted = loaded(folder, on_error="count")
    assert counted.num_broken_lines == 1
    assert iter(counted).num_broken_lines == 1
    assert counted.get_memory_data_size() == NUM_EXAMPLES


def test_a_dropped_dataset_ends_its_preload(folder):
    dataset, gate = gated(folder)
    dataset.preload_into_memory()
    assert gate.is_reached.wait(30)
    [thread] = [t for t in threading.enumerate() if t.name == "trireme-preload"]
    gate.opened.set()
    del dataset
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_a_long_load_logs_its_progress(folder, caplog, monkeypatch):
    monkeypatch.setattr("trireme.data.loading.REPORT_S", 0.0)
    with caplog.at_level("INFO", "trireme.data.loading"):
        loaded(folder)
    assert "loading 100%: 500 examples, " in caplog.text


def test_wrong_arguments_are_refused(folder):
    with pytest.raises(BadRequest, match="expected batch_size as an integer >= 1, found 0"):
        make(folder, batch_size=0)
    with pytest.raises(BadRequest, match="expected threads as an integer >= 1, found 0"):
        make(folder, threads=0)
    with pytest.raises(DataError, match="found none that match"):
        make(folder / "nowhere")
