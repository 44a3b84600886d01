"""Fleet's datasets: they read what they were configured to read, and refuse the rest."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trireme as tr
from trireme import fleet
from trireme.data import Dense, Label, Sparse
from trireme.errors import BadRequest, NotReady
from trireme.fleet.dataset import WITHOUT_EFFECT
from trireme.job.default import set_default
from trireme.job.embedded import embedded

FIELDS = [Label("click"), Sparse("a"), Sparse("b"), Dense("d", 2)]


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    with embedded(threads=1) as cluster:
        set_default(cluster)
        yield


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two files of 30 lines; d[0] counts them."""
    paths = [tmp_path / f"part-{i}" for i in range(2)]
    for i, path in enumerate(paths):
        numbers = range(30 * i, 30 * i + 30)
        path.write_text("".join(f"1 {n % 2} 1 {n} 2 {n} {n + 1} 2 {n} 0.5\n" for n in numbers))
    return [str(path) for path in paths]


def numbers(dataset: Any) -> list[int]:
    return [int(row[0]) for batch in dataset for row in batch["d"].tolist()]


def test_a_queue_reads_the_list_in_its_order(files: list[str]) -> None:
    dataset = fleet.QueueDataset()
    dataset.init(batch_size=7, thread_num=2, use_var=FIELDS, pipe_command="cat")
    dataset.set_filelist(files[::-1])
    assert numbers(dataset) == [*range(30, 60), *range(30)]
    dataset.update_settings(batch_size=60)
    (batch,) = dataset
    assert batch["a"].values[:60].tolist() == numbers([batch])
    own = dataset.stream(2, 3)  # the list is this worker's own
    assert numbers(own) == [*range(30, 60), *range(30)]


@pytest.mark.parametrize("command", ["cat", "sed p"])
@pytest.mark.parametrize("kind", [fleet.QueueDataset, fleet.InMemoryDataset])
def test_an_empty_list_is_an_empty_share_with_a_warning(
    kind: Any, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = kind()
    dataset.init(batch_size=7, use_var=FIELDS, pipe_command=command)
    dataset.set_filelist([])
    if isinstance(dataset, fleet.InMemoryDataset):
        dataset.load_into_memory()
        dataset.global_shuffle(fleet)
        assert dataset.get_memory_data_size(fleet) == 0
    assert list(dataset) == []
    assert list(dataset.stream(0, 1)) == []
    assert caplog.text.count("this worker has no files, and no examples") == 1


def test_a_position_in_files_that_are_gone_is_refused(files: list[str]) -> None:
    dataset = fleet.QueueDataset()
    dataset.init(batch_size=7, use_var=FIELDS)
    dataset.set_filelist(files)
    with dataset.stream(0, 1) as stream:
        position = next(stream).position
    dataset.set_filelist([])
    with pytest.raises(BadRequest, match=r"expected the files of the position .*, found no files"):
        dataset.stream(0, 1, start=position)


def test_a_command_runs_for_every_file(files: list[str]) -> None:
    dataset = fleet.QueueDataset()
    head = f"{sys.executable} -c 'import sys; sys.stdout.writelines(sys.stdin.readlines()[:2])'"
    dataset.init(batch_size=100, schema=tr.data.Schema(FIELDS), pipe_command=head)
    dataset.set_filelist(files)
    assert numbers(dataset) == [0, 1, 30, 31]


def test_examples_have_names_where_the_settings_say_so(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_text("1 first 1 some-text 1 1 1 7 1 8 2 0.5 0.5\n")
    dataset = fleet.InMemoryDataset()
    dataset.init(use_var=FIELDS)
    dataset._init_distributed_settings(parse_ins_id=True, parse_content=True, merge_size=-1)
    dataset.set_filelist([str(path)])
    dataset.load_into_memory()
    (batch,) = dataset
    assert batch["ins_id"].decode() == ["first"]
    assert batch["content"].decode() == ["some-text"]


def test_memory_is_loaded_shuffled_counted_and_released(files: list[str]) -> None:
    dataset = fleet.InMemoryDataset()
    dataset.init(batch_size=16, thread_num=1, use_var=FIELDS, seed=3)
    dataset.set_filelist(files)
    dataset.preload_into_memory()
    dataset.wait_preload_done()
    assert numbers(dataset) == list(range(60))
    assert dataset.get_memory_data_size() == dataset.get_memory_data_size(fleet) == 60
    dataset.global_shuffle(fleet)
    shuffled = numbers(dataset)
    assert shuffled != list(range(60))
    assert sorted(shuffled) == list(range(60))
    assert dataset.get_shuffle_data_size(fleet) == 60
    dataset.local_shuffle()
    assert numbers(dataset) != shuffled
    dataset.slots_shuffle(["a"])
    dataset.release_memory()
    assert dataset.get_memory_data_size() == 0
    dataset.load_into_memory(is_shuffle=True)
    assert sorted(numbers(dataset)) == list(range(60))


@pytest.mark.parametrize("change", ["init", "update_settings", "set_use_var"])
def test_an_example_has_the_columns_of_the_last_settings(change: str, files: list[str]) -> None:
    dataset = fleet.InMemoryDataset()
    dataset.init(batch_size=1000, use_var=FIELDS)
    assert dataset.example() is None
    dataset.set_filelist(files)
    dataset.load_into_memory()
    dataset.release_memory()
    example = dataset.example()
    assert example is not None
    assert example.num_examples == 60
    dataset.set_filelist(files[:1])  # of the same columns
    assert dataset.example() is example
    renamed = [Label("click"), Sparse("c"), Sparse("b"), Dense("d", 2)]
    if change == "set_use_var":
        dataset.set_use_var(renamed)
    else:
        getattr(dataset, change)(use_var=renamed)
    assert dataset.example() is None
    dataset.load_into_memory()
    example = dataset.example()
    assert example is not None
    assert "c" in example
    assert "a" not in example


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_settings_without_a_meaning_are_refused_unless_they_ask_for_nothing(name: str) -> None:
    nothing, why = WITHOUT_EFFECT[name]
    dataset = fleet.InMemoryDataset()
    dataset.init(**{name: nothing})
    with pytest.raises(BadRequest, match=re.escape(f"expected {name}={nothing!r}, found 7: {why}")):
        dataset.init(**{name: 7})


def test_a_date_sets_the_data_time_of_training() -> None:
    dataset = fleet.InMemoryDataset()
    assert dataset.data_time == 0
    dataset.set_date("19700102")
    assert dataset.data_time == 86_400
    for wrong in ("1970-01-02", "19690101", "19700101", "20190231", "22000101", 20190720):
        with pytest.raises(BadRequest, match=r"set_date: expected a day .* like '20190720', found"):
            dataset.set_date(wrong)


def test_missing_data_is_named(files: list[str]) -> None:
    dataset = fleet.QueueDataset()
    with pytest.raises(BadRequest, match="found batchsize"):
        dataset.init(batchsize=3)
    with pytest.raises(BadRequest, match="expected filelist as a list, found 'part'"):
        dataset.set_filelist("part")
    with pytest.raises(NotReady, match=r"expected set_filelist\(\) first"):
        iter(dataset)
    dataset.set_filelist(files)
    with pytest.raises(BadRequest, match="expected use_var or schema, found both or neither"):
        iter(dataset)
    dataset.init(schema=tr.data.criteo(), parse_ins_id=True)
    with pytest.raises(BadRequest, match="parse_content with use_var, found schema"):
        iter(dataset)
    dataset.init(use_var=FIELDS, schema=tr.data.Schema(FIELDS))
    with pytest.raises(BadRequest, match="expected use_var or schema, found both or neither"):
        iter(dataset)


def test_a_script_trains_infers_and_saves(files: list[str], tmp_path: Path) -> None:
    fleet.init()
    fleet.init_worker()
    dataset = fleet.QueueDataset()
    dataset.init(batch_size=10, use_var=FIELDS)
    dataset.set_filelist(fleet.util.get_file_shard(files))
    rows = tr.Table("embedding", dim=2)
    model = tr.models.CtrDnn(rows, features=["a", "b"], num_dense=2, dense="d", layers=[4])
    trainer = tr.Trainer(
        model,
        torch.optim.Adam(model.parameters()),
        loss=torch.nn.functional.binary_cross_entropy_with_logits,
        label="click",
        progress=False,
    )
    assert fleet.train_from_dataset(trainer, dataset)["examples"] == 60
    assert fleet.infer_from_dataset(trainer, dataset)["examples"] == 60
    fleet.save_persistables(dirname=str(tmp_path / "ckpt"))
    assert (tmp_path / "ckpt" / "manifest.json").is_file()
    example = next(iter(dataset))
    with pytest.raises(BadRequest, match=r"feeded_var_names of the columns .*a.* found c"):
        fleet.save_inference_model(None, str(tmp_path / "model"), ["a", "c"], batch=example)
    with pytest.raises(BadRequest, match=r"or 1 \(delta\) with follows=FOLDER, found 1 with None"):
        fleet.save_inference_model(None, str(tmp_path / "model"), mode=1, batch=example)
    fleet.save_inference_model(None, str(tmp_path / "model"), batch=example)
    fleet.train_from_dataset(trainer, dataset)
    follows = str(tmp_path / "model")
    delta = str(tmp_path / "delta")
    fleet.save_inference_model(dirname=delta, mode=1, batch=example, follows=follows)
    with pytest.raises(BadRequest, match="expected mode 0 or 2, found 1"):
        fleet.load_inference_model(delta, mode=1)
    predictor = fleet.load_inference_model(follows)
    before = predictor.predict(example).outputs["output"]
    predictor.apply(delta)
    assert not torch.equal(predictor.predict(example).outputs["output"], before)


def test_a_model_is_saved_after_the_data_was_released(files: list[str], tmp_path: Path) -> None:
    fleet.init()
    fleet.init_worker()
    dataset = fleet.InMemoryDataset()
    dataset.init(batch_size=10, use_var=FIELDS)
    dataset.set_filelist(files)
    rows = tr.Table("embedding", dim=2)
    model = tr.models.CtrDnn(rows, features=["a", "b"], num_dense=2, dense="d", layers=[4])
    adam = torch.optim.Adam(model.parameters())
    loss = torch.nn.functional.mse_loss
    trainer = tr.Trainer(model, adam, loss=loss, label="click", progress=False)
    dataset.load_into_memory()
    (example, *_) = dataset
    fleet.train_from_dataset(trainer, dataset)
    dataset.release_memory()
    fleet.save_inference_model(None, str(tmp_path / "model"), ["a", "b", "d"])
    predictor = fleet.load_inference_model(str(tmp_path / "model"))
    assert predictor.predict(example).outputs["output"].shape == (10,)

    native = tr.data.InMemoryDataset(files, schema=dataset.schema, batch_size=10)
    native.load_into_memory()
    fleet.train_from_dataset(trainer, native)
    native.release_memory()
    with pytest.raises(NotReady, match=r"expected an example .*found no dataset .*give batch="):
        fleet.save_inference_model(None, str(tmp_path / "native"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("batch_size", "8"), ("batch_size", None), ("batch_size", 2.0), ("thread_num", "2")),
        *(("use_var", None), ("use_var", 3), ("pipe_command", 3), ("fs_name", 3)),
        *(("parse_ins_id", "False"), ("parse_content", "x"), ("seed", "x"), ("seed", None)),
    ],
)
@pytest.mark.parametrize("kind", [fleet.QueueDataset, fleet.InMemoryDataset])
def test_settings_of_another_type_are_refused_and_change_nothing(
    kind: type[Any], name: str, value: Any, files: list[str]
) -> None:
    dataset = kind()
    dataset.init(batch_size=4, use_var=FIELDS)
    dataset.set_filelist(files)
    with pytest.raises(BadRequest, match=rf"\.init: expected {name} as .*, found"):
        dataset.init(**{"batch_size": 7, name: value})
    if kind is fleet.InMemoryDataset:
        dataset.load_into_memory()
    assert next(iter(dataset)).num_examples == 4


def test_files_and_flags_of_another_type_are_refused(files: list[str]) -> None:
    dataset = fleet.InMemoryDataset()
    dataset.init(batch_size=4, use_var=FIELDS)
    wrong: Any
    for wrong in (None, 3, [3], [b"part"]):
        with pytest.raises(
            BadRequest, match=r"set_filelist: expected (filelist as a list|files as paths)"
        ):
            dataset.set_filelist(wrong)
    dataset.set_filelist(files)
    wrong = "False"
    with pytest.raises(BadRequest, match="expected is_shuffle as True or False, found 'False'"):
        dataset.load_into_memory(wrong)
    with pytest.raises(BadRequest, match="expected thread_num as an integer >= 1, found 'False'"):
        dataset.preload_into_memory(wrong)
