"""Which files a run reads, and which worker reads them."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from tests.jobs import Job
from trireme.config import Config
from trireme.data import InsId, Label, Schema, Sparse, criteo, multislot
from trireme.data.sources import find_files
from trireme.errors import BadRequest, DataError
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.run.data import ReaderOptions, dataset_of, files_below, find_data, make_dataset
from trireme.run.settings import Settings
from trireme.train import Evaluation, Recipe

SCHEMA = Schema([Label("click"), Sparse("a")])


def load(folder: Path, *overrides: str) -> tuple[Config, Settings]:
    path = folder / "config.yaml"
    path.write_text("runner: {train_data_dir: data, train_batch_size: 4}\n")
    config = Config.load(path, overrides)
    return config, Settings.read(config)


def write_files(folder: Path, num: int = 4) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(num):
        (folder / f"part-{number}").write_text(f"1 {number % 2} 1 {number}\n")


def test_a_folder_means_all_files_below_it_in_natural_order(tmp_path: Path) -> None:
    _, settings = load(tmp_path)
    names = ["20190720/0030/part-10", "20190720/0030/part-9", "20190720/0000/part-0", "20190719/x"]
    for name in [*names, ".hidden", ".folder/x", "20190719/_SUCCESS", "_temporary/part-1"]:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text("x\n")
    files = find_data("runner.train_data_dir", str(tmp_path / "data"), settings)
    assert [str(Path(file).relative_to(tmp_path / "data")) for file in files] == [
        "20190719/x", "20190720/0000/part-0", "20190720/0030/part-9", "20190720/0030/part-10",
    ]  # fmt: skip
    pattern = str(tmp_path / "data" / "20190720" / "0030" / "*-9")
    assert find_data("k", pattern, settings) == [files[2]]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"runner\.x: expected files below .*empty, found none"):
        find_data("runner.x", str(tmp_path / "empty"), settings)


def test_a_reader_class_gets_the_files_and_folders_of_a_folder(tmp_path: Path) -> None:
    _, settings = load(tmp_path, "runner.reader_type=DataLoader")
    for name in ("10/a", "9/a", "b", "_SUCCESS", ".hidden/x"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text("x\n")
    entries = find_data("runner.train_data_dir", str(tmp_path / "data"), settings)
    assert [Path(entry).name for entry in entries] == ["9", "10", "b"]


def test_a_folder_that_cannot_be_listed_is_refused_and_not_skipped(tmp_path: Path) -> None:
    """os.walk says nothing of it, and its files would be missing in the training."""
    write_files(tmp_path)
    name, below = "d" * 250, os.open(tmp_path, os.O_RDONLY)
    for _ in range(4096 // 250 + 1):  # until its path is too long, for root as well
        os.mkdir(name, dir_fd=below)
        above, below = below, os.open(name, os.O_RDONLY, dir_fd=below)
        os.close(above)
    os.close(below)
    _, settings = load(tmp_path)
    with pytest.raises(DataError, match=r"^runner.*: cannot list '.*': File name too long"):
        find_data("runner.train_data_dir", str(tmp_path), settings)
    with pytest.raises(DataError, match="cannot list"):  # as trireme stream does
        files_below(str(tmp_path), {})
    with pytest.raises(DataError, match="cannot list"):
        find_data("runner.train_data_dir", f"{tmp_path}/**/part-*", settings)


@pytest.mark.parametrize("pattern", ["*/part-*", "*/part-0", "*/*/part-0", "*/**/part-0"])
def test_a_pattern_refuses_a_folder_that_it_cannot_list(tmp_path: Path, pattern: str) -> None:
    """As one without permission, for root as well."""
    for name in ("part-0", "below/part-0"):
        (tmp_path / "day" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "day" / name).write_text("x\n")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")  # no folder
    assert find_files(f"{tmp_path}/{pattern}")
    (tmp_path / "next").symlink_to(tmp_path / "next")
    with pytest.raises(DataError, match=r"cannot list '.*/next/?(part-0)?': Too many levels"):
        find_files(f"{tmp_path}/{pattern}")


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    """Their files would be missing in the training, or, of a stream, be an empty file."""
    write_files(tmp_path / "elsewhere")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "day").symlink_to(tmp_path / "elsewhere")
    _, settings = load(tmp_path)
    names = [f"{tmp_path}/data/day/{path.name}" for path in (tmp_path / "elsewhere").iterdir()]
    (tmp_path / "data" / "zero").symlink_to("..")  # a circle, and another way to the same files
    paths = find_data("runner.train_data_dir", str(tmp_path / "data"), settings)
    assert [path for path in paths if "part-" in path] == sorted(names)
    sizes = files_below(str(tmp_path / "data"), {})
    assert sizes == {path: os.path.getsize(path) for path in paths}
    (tmp_path / "data" / "lost").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"cannot read '.*/data/lost': No such file"):
        files_below(str(tmp_path / "data"), {})


def test_a_folder_elsewhere_is_listed_too(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for name in ("b/part-2", "b/part-10", "a", "b/_SUCCESS", "_old/a"):
        memory.pipe(f"/listed/{name}", b"x\n")
    _, settings = load(tmp_path)
    files = find_data("k", "memory://listed", settings)
    assert [file.removeprefix("memory:///") for file in files] == [
        "listed/a", "listed/b/part-2", "listed/b/part-10",
    ]  # fmt: skip
    assert find_data("k", "memory://listed/a", settings) == ["memory://listed/a"]
    with pytest.raises(DataError, match="found nothing at 'memory://listed/c'"):
        find_data("k", "memory://listed/c", settings)


@pytest.mark.parametrize(
    ("overrides", "shares", "is_warned"),
    [
        ([], [2, 2], False),
        (["runner.split_file_list=True"], [2, 2], False),
        (["runner.split_file_list=False"], [4, 4], True),
        (["own"], [4, 4], False),
    ],
)
def test_workers_divide_examples_unless_each_reads_its_own(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    overrides: list[str],
    shares: list[int],
    is_warned: bool,
) -> None:
    is_own = overrides == ["own"]
    made = []  # before the workers run, which are threads
    for worker in range(2):
        folder = tmp_path / (str(worker) if is_own else "all")
        folder.mkdir(exist_ok=True)
        made.append(load(folder, *([] if is_own else overrides)))
        write_files(folder / "data")

    def work(cluster: Cluster) -> int:
        config, settings = made[cluster.worker]
        dataset: Any = make_dataset(config, settings, settings.train, SCHEMA, cluster)
        stream = dataset.stream(cluster.worker, cluster.num_workers)
        return sum(batch.num_examples for batch in stream)

    with caplog.at_level(logging.WARNING), Job(1) as job:
        assert job.run(2, work) == shares
    assert ("each of 2 workers reads all of the same 4 files" in caplog.text) is is_warned


def test_workers_that_see_some_files_in_common_are_refused(tmp_path: Path) -> None:
    """As where a file has come after one of them has listed the folder."""
    write_files(tmp_path / "data")
    config, settings = load(tmp_path)
    files = find_data("runner.train_data_dir", str(tmp_path / "data"), settings)

    def work(cluster: Cluster, first: int) -> Any:
        seen = files[first * cluster.worker :]
        return dataset_of(seen, config, settings, settings.train, SCHEMA, cluster)

    with Job(1) as job, pytest.raises(BadRequest, match=r"4 of which 3 are at several, [34] at"):
        job.run(2, lambda cluster: work(cluster, 1))
    with Job(1) as job:
        assert job.run(2, lambda cluster: work(cluster, 4) is None) == [False, True]


@pytest.mark.parametrize("divides", [False, True])
def test_a_reader_that_divides_what_is_divided_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, divides: bool
) -> None:
    write_files(tmp_path / "data")
    own = "lines[paddle.get_rank() :: paddle.get_world_size()]" if divides else "lines"
    (tmp_path / "reader.py").write_text(f"""
import trireme.fleet.paddle as paddle
class RecDataset:
    def __init__(self, files, config):
        self.files = files
    def __iter__(self):
        lines = [line for path in self.files for line in open(path)]
        for line in {own}:
            yield [[1], [2], [3.0]]
""")
    keys = ["reader_type=RecDataset", "train_reader_path=reader"]
    made = load(tmp_path, *(f"runner.{key}" for key in keys))

    def work(cluster: Cluster) -> None:
        make_dataset(*made, made[1].train, SCHEMA, cluster)

    with caplog.at_level(logging.WARNING), Job(1) as job:
        job.run(2, work)
    assert ("reader.py: get_rank: workers have divided the data" in caplog.text) is divides
    assert caplog.text.count("runner.split_file_list=False gives every reader") == divides


@pytest.mark.parametrize("reader", ["QueueDataset", "InMemoryDataset"])
def test_text_is_multislot_with_names_unless_the_model_declares_another_format(
    tmp_path: Path, reader: str
) -> None:
    def work(cluster: Cluster) -> None:
        write_files(tmp_path / "data")
        (tmp_path / "data" / "part-0").write_text("1 name 1 0 1 7\n")
        config, settings = load(
            tmp_path,
            f"runner.reader_type={reader}",
            "runner.parse_ins_id=True",
            "runner.train_data_dir=data/part-0",
        )
        dataset: Any = make_dataset(config, settings, settings.train, SCHEMA, cluster)
        (batch,) = dataset.stream(0, 1)
        assert dataset.schema == multislot([InsId(), *SCHEMA.fields])
        assert batch["ins_id"].decode() == ["name"]
        with pytest.raises(BadRequest, match="with a schema without a format, found schema"):
            make_dataset(config, settings, settings.train, criteo(), cluster)
        with pytest.raises(BadRequest, match="expected a Recipe with a schema"):
            make_dataset(config, settings, settings.train, None, cluster)

    with Job(1) as job:
        job.run(1, work)


def test_a_reader_class_without_a_command_is_explained(tmp_path: Path) -> None:
    def work(cluster: Cluster) -> None:
        write_files(tmp_path / "data")
        queue = ["runner.reader_type=QueueDataset", "runner.train_reader_path=reader"]
        config, settings = load(tmp_path, *queue)
        with pytest.raises(BadRequest, match=r"or reader_type: DataLoader for reader\.py"):
            make_dataset(config, settings, settings.train, SCHEMA, cluster)
        (tmp_path / "reader.py").write_text("x = 1\n")
        config, settings = load(tmp_path, "runner.train_reader_path=reader")
        with pytest.raises(BadRequest, match=r"reader\.py: expected a class RecDataset, found"):
            make_dataset(config, settings, settings.train, SCHEMA, cluster)

    with Job(1) as job:
        job.run(1, work)


@pytest.mark.parametrize(
    ("overrides", "is_training", "message"),
    [
        ([], True, "train_reader_path: expected a Python file that defines RecDataset, found none"),
        (
            [],
            False,
            "infer_reader_path: expected a Python file that defines RecDataset, found none",
        ),
        (["train_reader_path=raeder"], True, r"train_reader_path: .* at .*/raeder\.py, found none"),
        (
            ["infer_reader_path=raeder"],
            False,
            r"infer_reader_path: .* at .*/raeder\.py, found none",
        ),
        # Inference reads by the class of training, unless its key names another.
        (["train_reader_path=raeder"], False, r"train_reader_path: .* at .*; -o runner\.train_"),
    ],
)
def test_a_missing_reader_is_told_by_its_key(
    overrides: list[str], is_training: bool, message: str, tmp_path: Path
) -> None:
    def work(cluster: Cluster) -> None:
        write_files(tmp_path / "data")
        keys = [f"runner.{key}" for key in ("reader_type=RecDataset", *overrides)]
        config, settings = load(tmp_path, *keys)
        part = settings.train if is_training else settings.infer
        part = replace(part, paths=(f"{tmp_path}/data",))
        with pytest.raises(BadRequest, match=rf"^runner\.{message}"):
            make_dataset(config, settings, part, SCHEMA, cluster)

    with Job(1) as job:
        job.run(1, work)


READER = """
class RecDataset:
    def __init__(self, files, config):
        self.files, self.mode = files, config.get("runner.mode", "train")

    def __iter__(self):
        return iter([[float(self.mode == "test"), [len(self.files)]]] * 8)
"""


def test_a_recipe_says_how_its_reader_gets_files_and_configuration(tmp_path: Path) -> None:
    (tmp_path / "reader.py").write_text(READER)
    write_files(tmp_path / "data")
    keys = ("reader_type=DataLoader", "train_reader_path=reader", "mode=train")
    config, settings = load(tmp_path, *(f"runner.{key}" for key in keys))
    model = torch.nn.Linear(1, 1)
    recipe = Recipe(model=model, loss=torch.nn.functional.mse_loss, optimizer=None)
    evaluation = Evaluation(model=model, files_are_one=True, reader_config={"runner.mode": "test"})
    with embedded() as cluster:
        for source, mode, num_files, num_batches in ((recipe, 0, 2, 2), (evaluation, 1, 4, 1)):
            options = ReaderOptions.of(source)
            dataset: Any = make_dataset(config, settings, settings.train, SCHEMA, cluster, options)
            batches = list(dataset.stream(1, 2))
            assert len(batches) == num_batches
            assert set(batches[0]["click"].tolist()) == {mode}
            assert set(batches[0]["a"].values.tolist()) == {num_files}
