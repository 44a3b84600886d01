"""Dumps of a model's outputs: every example once, in order, complete or absent."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor, nn

import trireme as tr
from tests.integration.dump_script import untrained
from tests.integration.planted_model import Linear, Named, bce, strings, trainer_for
from tests.jobs import Job
from tests.programs import Program, Template
from trireme.data.batch import Batch
from trireme.errors import BadRequest, NotFinite
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.storage import atomic_file

DUMP_SCRIPT = str(Path(__file__).with_name("dump_script.py"))


def read(path: Path) -> list[list[str]]:
    """The lines of all parts, in order, split at tabs."""
    parts = sorted(path.glob("part-*"))
    return [line.split("\t") for part in parts for line in part.read_text().splitlines()]


def numbers(text: str, name: str) -> list[float]:
    actual, length, *values = text.split(":")
    assert (actual, int(length)) == (name, len(values))
    return [float(value) for value in values]


@pytest.fixture
def dumper(programs: Template) -> Iterator[Callable[..., list[Program]]]:
    """Starts the workers of a job that dumps; one alone has its tables in the process."""
    with ExitStack() as exit_stack:

        def start(num_workers: int, *arguments: object) -> list[Program]:
            env = {"TRIREME_THREADS": "1", "TRIREME_TIMEOUT_S": "30"}
            started = []
            if num_workers > 1:
                serve = ["-m", "trireme", "server", "--listen", "127.0.0.1:0"]
                server = exit_stack.enter_context(programs.start("server", serve, env))
                address = server.wait_line(r"^listening on (\S+)")[1]
                env |= {"TRIREME_ROLE": "worker", "TRIREME_SERVERS": address}
                env["TRIREME_NUM_WORKERS"] = str(num_workers)
            for worker in range(num_workers):
                place = {"TRIREME_INDEX": str(worker)} if num_workers > 1 else {}
                texts = [DUMP_SCRIPT, *map(str, arguments)]
                program = programs.start(f"worker {worker}", texts, {**env, **place})
                started.append(exit_stack.enter_context(program))
            return started

        yield start


def test_parts_are_in_the_order_of_the_data_whoever_wrote_them(
    tmp_path: Path, dumper: Callable[..., list[Program]]
) -> None:
    count = 1003
    aucs = set()
    for num_workers in (1, 3):
        for worker in dumper(num_workers, tmp_path / str(num_workers), count):
            figures = json.loads(worker.wait_line("^figures (.*)")[1])
            assert worker.finish() == 0
            assert figures["examples"] == count
            aucs.add(figures["auc"])
    assert len(aucs) == 1
    names = sorted(p.name for p in (tmp_path / "3").iterdir())
    assert names == ["params", "part-00000", "part-00001", "part-00002"]
    for path in (tmp_path / "1", tmp_path / "3"):
        assert (path / "params").read_text() == "bias:1:0.1\n"
    lines = read(tmp_path / "1")
    assert lines == read(tmp_path / "3")
    data = Named(count)
    assert [line[0] for line in lines] == data.ids
    assert {line[1] for line in lines} == {""}
    outputs = np.float32([numbers(line[2], "output")[0] for line in lines])
    np.testing.assert_array_equal(outputs, outputs_of(data))
    labels = np.float32([numbers(line[3], "label")[0] for line in lines])
    np.testing.assert_array_equal(labels, data.examples.labels)
    assert [int(numbers(line[4], "a")[0]) for line in lines] == data.examples.ids[:, 0].tolist()


def outputs_of(data: Named) -> np.ndarray:
    with embedded() as cluster, torch.no_grad():
        set_default(cluster)
        model = untrained().eval()
        return torch.cat([model(batch) for batch in data.stream(0, 1)]).numpy()


@pytest.mark.parametrize("threads", [1, 3])
def test_training_dumps_each_example_once_an_epoch(tmp_path: Path, threads: int) -> None:
    data = Named(1000)

    def work(cluster: Cluster) -> float:
        trainer = trainer_for(cluster, threads=threads)
        dump = tr.Dump(path=tmp_path / "d", fields=["output"], params=["bias"])
        trainer.fit(data, epochs=2, dump=dump)
        return trainer.model.bias.item()

    with Job(1) as job:
        biases = job.run(2, work)
    for worker in (0, 1):
        mine = read_part(tmp_path / "d", worker)
        assert mine == data.ids[500 * worker : 500 * (worker + 1)] * 2
    [bias] = numbers((tmp_path / "d" / "params").read_text().rstrip("\n"), "bias")
    assert np.float32(bias) in np.float32(biases)


def read_part(path: Path, worker: int) -> list[str]:
    return [line.split("\t")[0] for line in (path / f"part-{worker:05d}").read_text().splitlines()]


class Items(nn.Module):
    """The tower of items of a two-tower model, by itself."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return {"vector": self.rows(batch).flatten(1)}


class Towers(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.items = Items(self.rows)


def test_a_tower_alone_writes_the_vectors_of_unlabelled_items(tmp_path: Path) -> None:
    items = [
        {"item": torch.arange(i, i + 4), "a": torch.arange(4), "b": torch.arange(4)} for i in (0, 4)
    ]

    class Source:
        schema = None

        def stream(self, *_: Any, **__: Any) -> Any:
            for batch in items:
                yield Batch({**batch, "ins_id": batch["item"]})

    with embedded() as cluster:
        model = Towers()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = tr.Trainer(model, sgd, loss=lambda a, b: a, progress=False, cluster=cluster)
        dump = tr.Dump(path=tmp_path / "index", fields=["vector"])
        figures = trainer.evaluate(Source(), model=model.items, dump=dump)
        assert cluster.client.stats()[0]["pushes"] == 0
    assert figures["examples"] == 8
    assert read(tmp_path / "index") == [[str(i), "", "vector:2:0:0"] for i in range(8)]


def test_impossible_dumps_are_refused(tmp_path: Path) -> None:
    schema = tr.data.Schema([tr.data.Label(), tr.data.Sparse("a"), tr.data.Sparse("b")])
    columns = {"label": [1.0], "a": [1], "b": [2]}
    nameless = tr.data.ArrayDataset(columns, schema=schema, batch_size=50)
    full = tmp_path / "full"
    full.mkdir()
    (full / "part-00007").touch()
    with pytest.raises(BadRequest, match="expected fields as a list of names, found 'output'"):
        tr.Dump(path=tmp_path, fields="output")
    with pytest.raises(BadRequest, match="the names of fields or of parameters, found none"):
        tr.Dump(path=tmp_path)
    (tmp_path / "file").touch()
    with embedded() as cluster:
        trainer = trainer_for(cluster)
        for data, path, options, message in (
            (
                nameless,
                "a",
                {"fields": ["output"]},
                "an InsId field in the schema, .* schema: Label.*; .* parse_ins_id=True",
            ),
            (
                list(plain()),
                "a",
                {"fields": ["output"]},
                "a column 'ins_id' of strings or integers",
            ),
            (Named(100), "a", {"fields": ["logit"]}, "outputs output or columns a, b, label"),
            (Named(100), "a", {"params": ["bais"]}, "of the model bias, found bais"),
            (Named(100), "full", {"fields": ["output"]}, "found part-00007 in"),
            (Named(100), "file/x", {"fields": ["output"]}, r"cannot write part-00000 in .*file/x"),
        ):
            with pytest.raises(BadRequest, match=message):
                trainer.evaluate(data, dump=tr.Dump(path=tmp_path / path, **options))
    assert not (tmp_path / "a").exists() or not list((tmp_path / "a").iterdir())
    assert [path.name for path in full.iterdir()] == ["part-00007"]


def plain() -> Any:
    for batch in Named(100).stream(0, 1):
        yield {name: batch[name] for name in ("a", "b", "label")}


def test_a_dump_that_one_worker_cannot_begin_is_refused_to_all(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "params").touch()

    def work(cluster: Cluster) -> str:
        trainer = trainer_for(cluster)
        dump = tr.Dump(path=tmp_path / str(cluster.worker), fields=["output"])
        with pytest.raises(BadRequest) as refused:
            trainer.fit(Named(100), dump=dump)
        return str(refused.value)

    with Job(1) as job:
        messages = job.run(2, work)
    assert messages[0].startswith("begin of dump: worker 1: Dump: expected a folder without an")
    assert not list((tmp_path / "0").iterdir())


@pytest.mark.parametrize("has_nameless", [True, False])
def test_a_part_that_cannot_get_its_name_takes_those_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_nameless: bool
) -> None:
    path = tmp_path / "d"

    def failing(name_it: Callable[..., None]) -> Callable[..., None]:
        def fails(*arguments: Any) -> None:
            if arguments[-1].endswith("part-00001"):
                raise OSError(errno.EIO, "Input/output error")
            name_it(*arguments)

        return fails

    if not has_nameless:
        monkeypatch.setattr(atomic_file, "_open_nameless", lambda folder: None)
    monkeypatch.setattr(atomic_file, "_link", failing(atomic_file._link))
    monkeypatch.setattr(LocalFileSystem, "mv", failing(LocalFileSystem.mv))

    def work(cluster: Cluster) -> str:
        dump = tr.Dump(path=path, fields=["output"], params=["bias"])
        with pytest.raises(BadRequest) as refused:
            trainer_for(cluster).evaluate(Named(100), dump=dump)
        return str(refused.value)

    with Job(1) as job:
        messages = job.run(2, work)
    assert messages[0].startswith("names of dump: worker 1: Dump: cannot write part-00001 in")
    assert not list(path.iterdir())


def test_a_run_that_fails_leaves_no_file(tmp_path: Path) -> None:
    factor = torch.ones(1000)
    factor[777] = torch.nan

    class Fails(Linear):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(batch) * batch["factor"]

    with embedded() as cluster:
        model = Fails()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = tr.Trainer(model, sgd, loss=bce, progress=False, cluster=cluster)
        dump = tr.Dump(path=tmp_path / "d", fields=["output"])
        with pytest.raises(NotFinite, match="'id777'"):
            trainer.fit(Named(1000, factor=factor), dump=dump)
        assert not list((tmp_path / "d").iterdir())
        trainer.fit(Named(1000, factor=torch.ones(1000)), dump=dump)
        assert len(read(tmp_path / "d")) == 1000


@pytest.mark.parametrize("count", [20, 2000])  # seen at the end, and on the way
def test_a_full_disk_is_an_error_and_leaves_no_file(
    tmp_path: Path, dumper: Callable[..., list[Program]], count: int
) -> None:
    path = tmp_path / "d"
    [program] = dumper(1, path, count, "--file_bytes_max", 500)
    assert program.finish() == 1
    assert "ResourceExhausted: Dump: cannot write part-00000 in" in program.output
    assert not list(path.iterdir())


def test_any_file_system_will_do_and_strings_are_escaped() -> None:
    class Texts(Named):
        schema = tr.data.Schema(
            [tr.data.InsId("who"), tr.data.Content("what"), tr.data.Sparse("a"), tr.data.Label()]
        )

        def stream(self, index: int, num_streams: int, **options: Any) -> Any:
            for batch in super().stream(index, num_streams, **options):
                batch.columns["who"] = strings([f"a\tb{i}" for i in range(batch.num_examples)])
                batch.columns["what"] = strings([f"x\n{i}" for i in range(batch.num_examples)])
                yield batch

    def work(cluster: Cluster) -> None:
        dump = tr.Dump(path="memory://dumps/first", fields=["label", "ins_id"])
        trainer_for(cluster).evaluate(Texts(100), dump=dump)

    with Job(1) as job:
        job.run(2, work)
    fs = fsspec.filesystem("memory")
    names = sorted(path.rpartition("/")[2] for path in fs.ls("/dumps/first", detail=False))
    assert names == ["part-00000", "part-00001"]
    lines = fs.cat("/dumps/first/part-00001").decode().splitlines()
    label = int(Named(100).examples.labels[51])
    assert lines[1] == f"a\\tb1\tx\\n1\tlabel:1:{label}\tins_id:1:id51"
    fs.rm("/dumps", recursive=True)
