"""Fleet's PSGPU: passes on a device, with the bits of training without them; calls in a wrong order
name what to call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.criteo_folder import write_criteo_folder
from tests.integration.processes import Processes
from tests.integration.test_device_passes import assert_equal, contents
from tests.programs import Template
from trireme import fleet
from trireme.errors import BadRequest, NotReady
from trireme.fleet.ps_gpu import ELSEWHERE
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.models import CtrDnn

SCRIPT = str(Path(__file__).parents[2] / "examples" / "fleet_ps_gpu.py")
USE = {"use_ps_gpu": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("criteo")
    write_criteo_folder(path, repeats=2)
    return path


def trainer_of(strategy: tr.Strategy | None = None) -> tr.Trainer:
    """That of the example."""
    torch.manual_seed(0)
    model = CtrDnn(tr.Table("embedding", dim=9, optimizer=tr.optim.Adam(lr=1e-3)), layers=(64, 32))
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-3),
        strategy=strategy or tr.Strategy("sync"),
        loss=nn.functional.binary_cross_entropy_with_logits,
        metrics=[tr.metrics.AUC()],
        progress=False,
    )


@pytest.mark.parametrize("servers", [1, 2])
def test_the_example_gives_the_bits_of_training_without_passes(
    folder: Path, tmp_path: Path, programs: Template, servers: int
) -> None:
    launch = [programs.python, "-m", "trireme", "launch", "--server_num", str(servers)]
    arguments = ["--worker_num", "1", SCRIPT, str(folder / "train/*.tsv"), "ckpt/fleet"]
    with Processes(tmp_path) as processes:
        processes.start("launch", [*launch, *arguments], {"TRIREME_DEVICE_GPU": "cpu"})
        processes.finish(100.0)
    log = (tmp_path / "log" / "workerlog.0").read_text()
    assert re.findall(r"(\d).tsv: 4000 examples, training AUC 0.\d+", log) == ["0", "1"]
    with embedded() as cluster:
        set_default(cluster)
        one = trainer_of()
        for name in ("0", "1"):
            files = tr.data.QueueDataset(
                str(folder / f"train/{name}.tsv"), schema=tr.data.criteo(), batch_size=256
            )
            one.fit(files)
        expected = contents(cluster)
    with embedded() as cluster:
        set_default(cluster)
        trainer_of().load(tmp_path / "ckpt" / "fleet")
        assert_equal(contents(cluster), expected)


@pytest.mark.parametrize("place", [("--server_num", "1"), ("--server_num", "0")])
def test_workers_of_the_example_make_each_pass_together(
    folder: Path, tmp_path: Path, programs: Template, place: tuple[str, str]
) -> None:
    launch = [programs.python, "-m", "trireme", "launch", *place, "--worker_num", "2", SCRIPT]
    with Processes(tmp_path) as processes:
        arguments = [str(folder / "train/*.tsv"), "ckpt"]
        processes.start("launch", [*launch, *arguments], {"TRIREME_DEVICE_GPU": "cpu"})
        processes.finish(100.0)
    logs = [(tmp_path / "log" / f"workerlog.{worker}").read_text() for worker in range(2)]
    figures = [re.findall(r"\d.tsv: 8000 examples, training AUC 0.\d+", log) for log in logs]
    assert len(figures[0]) == 2
    assert figures[0] == figures[1]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with embedded() as opened:
        set_default(opened)
        fleet.init()
        yield opened
        fleet.init()  # forgets a pass that a test has left open


def dataset_of(folder: Path, *, uses: bool = True) -> fleet.InMemoryDataset:
    dataset = fleet.InMemoryDataset()
    dataset._set_use_ps_gpu(uses)
    dataset.init(batch_size=1000, schema=tr.data.criteo())
    dataset.set_filelist([str(folder / "test/0.tsv")])
    return dataset


def test_rows_are_on_the_device_between_begin_and_end(cluster: Cluster, folder: Path) -> None:
    dataset, one, psgpu = dataset_of(folder), trainer_of(), fleet.PSGPU()
    assert psgpu is fleet.PSGPU()
    dataset.load_into_memory()
    before = contents(cluster)
    psgpu.begin_pass(one)
    fleet.train_from_dataset(one, dataset)
    assert_equal(contents(cluster), before)
    psgpu.end_pass()
    assert contents(cluster).keys() > before.keys()
    dataset.release_memory()
    psgpu.finalize()
    fleet.stop_worker()


def test_the_calls_of_a_dataset_that_was_set(cluster: Cluster, folder: Path) -> None:
    dataset, one, psgpu = dataset_of(folder), trainer_of(), fleet.PSGPU()
    psgpu.set_dataset(dataset)
    psgpu.set_date(2019, 7, 20)
    psgpu.load_into_memory(True)
    assert (dataset.data_time, dataset.get_memory_data_size()) == (1563580800, 2000)
    psgpu.begin_pass(one)
    fleet.train_from_dataset(one, dataset)
    psgpu.abandon_pass()
    psgpu.finalize()
    assert cluster.server is not None
    assert not cluster.server.tables["embedding"].rows.rows


def test_calls_in_a_wrong_order_name_what_to_call(cluster: Cluster, folder: Path) -> None:
    dataset, second, one, psgpu = dataset_of(folder), trainer_of(), trainer_of(), fleet.PSGPU()
    for call in (lambda: psgpu.begin_pass(one), psgpu.load_into_memory):
        with pytest.raises(NotReady, match=r"call dataset\._set_use_ps_gpu\(True\) and dataset\."):
            call()
    dataset.load_into_memory()
    with pytest.raises(NotReady, match=r"expected PSGPU\(\)\.begin_pass\(trainer\) before train"):
        fleet.train_from_dataset(one, dataset)
    for method in ("end_pass", "abandon_pass"):
        with pytest.raises(NotReady, match=rf"PSGPU\.{method}: expected begin_pass\(trainer\)"):
            getattr(psgpu, method)()
    psgpu.begin_pass(one)
    for call in (psgpu.finalize, fleet.stop_worker, lambda: psgpu.begin_pass(one)):
        with pytest.raises(BadRequest, match=r"call PSGPU\(\)\.end_pass\(\) before"):
            call()
    other = dataset_of(folder)
    other.load_into_memory()  # of the next pass
    for pair in ((one, other), (second, dataset)):
        with pytest.raises(BadRequest, match="the trainer and the dataset of the pass under way"):
            fleet.train_from_dataset(*pair)
    psgpu.abandon_pass()
    psgpu.finalize()
    with pytest.raises(NotReady, match="expected a dataset, found none"):
        psgpu.begin_pass(one)


def test_data_and_slots_that_passes_cannot_train_are_refused(
    cluster: Cluster, folder: Path
) -> None:
    dataset, one, psgpu = dataset_of(folder, uses=False), trainer_of(), fleet.PSGPU()
    dataset.load_into_memory()
    with pytest.raises(BadRequest, match=r"for which _set_use_ps_gpu\(True\) was called"):
        psgpu.set_dataset(dataset)
    fleet.train_from_dataset(one, dataset)  # without passes
    with pytest.raises(BadRequest, match=r"Trainer\.in_window for a stream"):
        fleet.QueueDataset()._set_use_ps_gpu(True)
    with pytest.raises(BadRequest, match="expected a bool, found 8"):
        dataset._set_use_ps_gpu(8)  # type: ignore[arg-type]
    dataset._set_use_ps_gpu(True)
    psgpu.set_dataset(dataset)
    psgpu.set_slot_vector([1, 2])
    with pytest.raises(BadRequest, match=r"expected the slots \['1', '2'\] among the fields"):
        psgpu.begin_pass(one)


def test_what_fleet_has_and_needs_nothing_here_explains_itself(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    psgpu = fleet.PSGPU()
    for name, why in ELSEWHERE.items():
        with pytest.raises(BadRequest, match=rf"PSGPU\.{name}: it has no place here; ") as caught:
            getattr(psgpu, name)([8])
        assert why in str(caught.value)
    with pytest.raises(AttributeError):
        _ = psgpu.unknown
    with pytest.raises(BadRequest, match=r"expected one GPU, found \[0, 1\]"):
        psgpu.init_gpu_ps([0, 1])
    psgpu.init_gpu_ps([0])
    assert "FLAGS_selected_gpus choose the GPU of a process" in caplog.text


@pytest.mark.parametrize("a_sync", [False, True])
def test_the_strategy_of_fleets_gpu_parameter_server_trains_as_sync(a_sync: bool) -> None:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = a_sync, USE
    assert strategy.strategy() == tr.Strategy("sync")
    assert strategy.strategy(is_collective=True) == tr.Strategy("collective")
