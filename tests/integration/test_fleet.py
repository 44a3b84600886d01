"""Fleet's API: a script in its style runs, and settings without a meaning are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import trireme as tr
from tests.integration.criteo_folder import write_criteo_folder
from tests.integration.processes import Processes
from tests.programs import Template
from trireme import fleet
from trireme.errors import Absent, BadRequest, NotReady
from trireme.fleet.distributed_strategy import ELSEWHERE, WITHOUT_EFFECT
from trireme.job.default import set_default
from trireme.job.embedded import embedded

SCRIPT = str(Path(__file__).parents[2] / "examples" / "fleet_train.py")
NUM_TRAIN_MIN = 1000


def test_a_script_in_fleets_style_trains_on_one_server_and_two_workers(
    tmp_path: Path, programs: Template
) -> None:
    write_criteo_folder(tmp_path)
    launch = [programs.python, "-m", "trireme", "launch"]
    options = ["--server_num", "1", "--worker_num", "2"]
    with Processes(tmp_path) as processes:
        processes.start("launch", [*launch, *options, SCRIPT, "train/*.tsv", "ckpt/fleet"], {})
        processes.finish(100.0)
    logs = [(tmp_path / "log" / f"workerlog.{index}").read_text() for index in range(2)]
    actual = [
        re.search(rf"worker {index} of 2: (\d+) of (\d+) examples", log)
        for index, log in enumerate(logs)
    ]
    assert all(actual), logs
    counts = [tuple(map(int, match.groups())) for match in actual if match]
    assert counts[0][1] == counts[1][1] == counts[0][0] + counts[1][0] > NUM_TRAIN_MIN
    assert (tmp_path / "ckpt" / "fleet" / "manifest.json").is_file()


def test_files_are_dealt_in_contiguous_blocks_as_fleet_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Place:
        num_workers, num_streams = 3, 0

        def __init__(self, worker: int) -> None:
            self.worker = worker

    files = [f"part-{i}" for i in range(7)]
    dealt = []
    for worker in range(3):
        monkeypatch.setattr("trireme.fleet.util.default", lambda worker=worker: Place(worker))
        dealt.append(fleet.util.get_file_shard(files))
    assert dealt == [files[:3], files[3:5], files[5:]]
    with pytest.raises(BadRequest, match="expected a list of files"):
        fleet.util.get_file_shard("part-0")


class Heter(NamedTuple):
    """What the strategy asks of a cluster."""

    heter: tuple[tuple[str, str], ...]
    place: object = None


def test_the_guard_of_a_strategy_names_compute_workers_that_the_job_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync_configs = {"heter_worker_device_guard": "gpu"}
    module = "trireme.fleet.distributed_strategy"
    assert strategy.strategy() == tr.Strategy("async")  # there is no cluster to ask
    monkeypatch.setattr(f"{module}.is_default_set", lambda: True)
    for cluster in (Heter((("npu", "a:1"), ("gpu", "a:2"))), Heter((), place=object())):
        monkeypatch.setattr(f"{module}.default", lambda cluster=cluster: cluster)
        assert strategy.strategy() == tr.Strategy("async")
    monkeypatch.setattr(f"{module}.default", lambda: Heter((("npu", "a:1"),)))
    with pytest.raises(BadRequest, match="compute workers, npu, found 'gpu'"):
        strategy.strategy()
    assert not caplog.records
    monkeypatch.setattr(f"{module}.default", lambda: Heter(()))
    strategy.strategy()
    assert "heter_worker_device_guard=gpu has no effect" in caplog.text
    caplog.clear()
    strategy.a_sync_configs = {"heter_worker_device_guard": "cpu"}
    strategy.strategy()
    assert not caplog.records
    with pytest.raises(BadRequest, match="as a label such as gpu, found 'GPU'"):
        strategy.a_sync_configs = {"heter_worker_device_guard": "GPU"}


def test_a_compute_worker_is_known_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {
        "TRIREME_ROLE": "heter",
        "TRIREME_SERVERS": "127.0.0.1:1",
        "TRIREME_HETER": "gpu=127.0.0.1:2,gpu=127.0.0.1:3",
        "TRIREME_INDEX": "1",
        "TRIREME_NUM_WORKERS": "2",
        "TRIREME_TIMEOUT_S": "30",
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    fleet.init()
    assert (fleet.is_heter_worker(), fleet.is_worker(), fleet.is_server()) == (1, 1, 0)
    assert (fleet.is_first_worker(), fleet.worker_num(), fleet.server_num()) == (0, 2, 1)
    assert fleet.worker_index() == 3
    with pytest.raises(BadRequest, match=r"compute worker 1 \(gpu\): expected a script that makes"):
        fleet.barrier_worker()
    fleet.stop_worker()
    with pytest.raises(BadRequest, match=r"expected Role\.WORKER or Role\.SERVER, found HETER"):
        fleet.UserDefinedRoleMaker(current_id=0, role=fleet.Role.HETER_WORKER)
    with pytest.raises(BadRequest, match="expected workers that hold the rows"):
        fleet.init(is_collective=True)


def test_a_process_without_a_job_is_one_worker(capsys: pytest.CaptureFixture[str]) -> None:
    with embedded() as cluster:
        set_default(cluster)
        fleet.init()
        assert (fleet.is_worker(), fleet.is_server(), fleet.is_first_worker()) == (1, 0, 1)
        assert (fleet.worker_index(), fleet.worker_num(), fleet.server_num()) == (0, 1, 0)
        np.testing.assert_array_equal(fleet.util.all_reduce(np.arange(3), "max"), np.arange(3))
        with pytest.raises(BadRequest, match="expected mode as one of sum, max, min, found"):
            fleet.util.all_reduce(1, "median")
        fleet.util.barrier("worker")
        assert fleet.util.all_gather(3.5, "worker") == [3.5]
        for call in (fleet.util.all_gather, fleet.util.all_reduce):
            with pytest.raises(BadRequest, match="expected comm_world 'worker', found 'all'"):
                call(1, comm_world="all")
        fleet.util.print_on_rank("of worker 1", 1)
        fleet.util.print_on_rank("of worker 0", 0)
        assert capsys.readouterr().out == "of worker 0\n"
        with pytest.raises(BadRequest, match="expected a server"):
            fleet.run_server()
        with pytest.raises(BadRequest, match=r"call fleet\.load_model"):
            fleet.init_server("ckpt")
        with pytest.raises(NotReady, match="distributed_optimizer"):
            fleet.save_persistables(dirname="x")
        with pytest.raises(BadRequest, match="not a complete checkpoint"):
            fleet.load_model("x", mode=3)
        fleet.stop_worker()


@pytest.mark.parametrize("option", WITHOUT_EFFECT)
def test_options_that_never_had_an_effect_are_refused_by_name(option: str) -> None:
    with pytest.raises(BadRequest, match=f"{option} had no effect"):
        fleet.DistributedStrategy().a_sync_configs = {option: 1}


def test_a_strategy_shows_its_mode_and_refuses_unsupported_options() -> None:
    strategy = fleet.DistributedStrategy()
    assert strategy.strategy() == tr.Strategy("async")
    strategy.a_sync = False
    assert strategy.strategy() == tr.Strategy("sync")
    strategy.a_sync_configs = {"k_steps": 100, "launch_barrier": True, "use_ps_gpu": 0}
    with pytest.raises(BadRequest, match="expected a_sync True with k_steps > 0"):
        strategy.strategy()
    strategy.a_sync = True
    assert strategy.strategy() == tr.Strategy("geo", k=100)
    for k_steps in (0, -1):
        strategy.a_sync_configs = {"k_steps": k_steps}
        assert strategy.strategy() == tr.Strategy("async")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"k_steps": 1.5}, "expected k_steps as an integer >= -1, found 1.5"),
        ({"k_step": 1}, "found 'k_step'"),
        ({"use_ps_gpu": 8}, "expected use_ps_gpu as a bool, found 8"),
        ({"launch_barrier": False}, "workers always wait"),
    ]
    for configs, message in wrong:
        with pytest.raises(BadRequest, match=message):
            strategy.a_sync_configs = configs
    both = {"send_queue_size": 1, "k_steps": 0, "thread_pool_size": 2}
    with pytest.raises(BadRequest, match="send_queue_size, thread_pool_size had no effect"):
        strategy.a_sync_configs = both
    for name in ("sharding", "a_synch", "pipeline"):
        with pytest.raises(Absent, match=f"{name} has no place here, found True; a_sync, "):
            setattr(strategy, name, True)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_switches_that_have_another_place_are_refused_by_name(name: str) -> None:
    with pytest.raises(BadRequest, match=f"{name} has no place here, found 1; "):
        setattr(fleet.DistributedStrategy(), name, 1)


def test_a_role_by_arguments_reads_no_environment() -> None:
    maker = fleet.UserDefinedRoleMaker(
        current_id=1, role=fleet.Role.WORKER, worker_num=2, server_endpoints=["127.0.0.1:1"]
    )
    assert (maker.role.role, maker.role.index, maker.role.num_workers) == ("worker", 1, 2)
    endpoints = ["127.0.0.1:1", "127.0.0.1:2"]
    worker = fleet.UserDefinedRoleMaker(True, current_id=1, worker_endpoints=endpoints)
    assert (worker.role.hosts, worker.role.listen, worker.role.num_workers) == (1, endpoints[1], 2)
    for wrong in ({"worker_endpoints": endpoints}, {"server_endpoints": endpoints}):
        with pytest.raises(BadRequest, match="expected server_endpoints, or is_collective=True"):
            fleet.UserDefinedRoleMaker("server_endpoints" in wrong, current_id=0, **wrong)
    with pytest.raises(BadRequest, match="expected current_id as a place in worker_endpoints"):
        fleet.UserDefinedRoleMaker(True, current_id=2, worker_endpoints=endpoints)


def test_a_server_process_gets_its_dense_optimizer_back_unchanged() -> None:
    fleet.init(
        fleet.UserDefinedRoleMaker(
            current_id=0,
            role=fleet.Role.SERVER,
            worker_num=2,
            server_endpoints=["127.0.0.1:1"],
        )
    )
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert fleet.distributed_optimizer(optimizer, model=model) is optimizer
    with pytest.raises(BadRequest, match=r"this process is a server.*call fleet\.run_server\(\)"):
        fleet.init_worker()
