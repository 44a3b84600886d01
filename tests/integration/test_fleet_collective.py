"""Fleet's names for jobs without servers: is_collective, and the oldest generation's nccl2."""

from __future__ import annotations

import logging
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import trireme as tr
from tests.integration.criteo_folder import write_criteo_folder
from tests.ports import free_ports
from tests.programs import Template
from trireme import fleet
from trireme.errors import BadRequest, NotReady

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "fleet_collective.py")
TRAINED = r"worker (\d) of 2, 0 servers, Strategy\('collective'\): (\d+) of (\d+) examples"
TWO = "127.0.0.1:1,127.0.0.1:2"

# As seed documents of the oldest generation have it: the environment states the place.
NCCL2 = """
import os, torch, trireme as tr
from trireme import fleet
trainer_id = int(os.environ["PADDLE_TRAINER_ID"])
config = fleet.DistributeTranspilerConfig()
config.mode = "nccl2"
fleet.memory_optimize(None, skip_grads=True)
t = fleet.DistributeTranspiler(config=config)
t.transpile(trainer_id, trainers=os.environ["PADDLE_TRAINER_ENDPOINTS"],
            current_endpoint=os.environ["PADDLE_CURRENT_ENDPOINT"])
t.get_trainer_program()
torch.manual_seed(0)
rows = tr.nn.EmbeddingBag(tr.Table("t", dim=2, optimizer=tr.optim.SGD(lr=0.5)), features=["a"])
optimizer = fleet.distributed_optimizer(None, config, model=rows)
for step in range(3):
    rows({"a": torch.tensor([trainer_id, 7])}).sum().backward()
    optimizer.step()
optimizer.end_pass()
fleet.barrier_worker()
print(optimizer.strategy, "SUM", fleet.util.all_reduce(trainer_id + 1), fleet.worker_num())
fleet.stop_worker()
"""
# A job with servers, both roles by arguments.
PSERVER = """
import sys
from trireme import fleet
role, endpoint = sys.argv[1:]
t = fleet.DistributeTranspiler()
t.transpile(0, pservers=endpoint, trainers=1, sync_mode=False)
if role == "PSERVER":
    fleet.Executor().run(t.get_pserver_program(endpoint))
t.get_trainer_program()
print(t.config.strategy(), fleet.server_num())
fleet.stop_worker()
"""


def test_a_collective_script_in_fleets_style_trains_on_two_workers(
    tmp_path: Path, programs: Template
) -> None:
    write_criteo_folder(tmp_path)
    launch = ["-m", "trireme", "launch", "--gpus", "0,1", EXAMPLE]
    env = {"TRIREME_DEVICE_GPU": "cpu"}
    programs.run(tmp_path, [*launch, "train/*.tsv", "ckpt/fleet", "gpu"], env)
    logs = [(tmp_path / "log" / f"workerlog.{index}").read_text() for index in range(2)]
    counts = [tuple(map(int, match)) for log in logs for match in re.findall(TRAINED, log)]
    assert [count[0] for count in counts] == [0, 1]
    assert counts[0][2] == counts[1][2] == counts[0][1] + counts[1][1] > 1000
    assert (tmp_path / "ckpt" / "fleet" / "manifest.json").is_file()


@pytest.mark.parametrize("starts", ["by hand", "by trireme launch"])
def test_nccl2_scripts_run_with_the_variables_of_fleets_launcher(
    starts: str, tmp_path: Path, programs: Template
) -> None:
    (tmp_path / "nccl2.py").write_text(NCCL2)
    if starts == "by trireme launch":
        programs.run(tmp_path, ["-m", "trireme", "launch", "--nproc_per_node", "2", "nccl2.py"])
        outputs = [(tmp_path / "log" / f"workerlog.{i}").read_text() for i in range(2)]
    else:
        port = free_ports(["127.0.0.1"], 2)
        places = [f"127.0.0.1:{port + i}" for i in range(2)]
        job = {"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ENDPOINTS": ",".join(places)}
        with ExitStack() as end:
            workers = [
                end.enter_context(
                    programs.start(
                        place,
                        ["nccl2.py"],
                        {**job, "PADDLE_TRAINER_ID": str(i), "PADDLE_CURRENT_ENDPOINT": place},
                        folder=tmp_path,
                    )
                )
                for i, place in enumerate(places)
            ]
            assert [worker.finish() for worker in workers] == [0, 0]
        outputs = [worker.output for worker in workers]
    for output in outputs:
        assert "Strategy('collective') SUM 3 2" in output
        assert "memory_optimize, release_memory: nothing to do: torch frees" in output


def test_a_transpiled_pserver_script_serves_and_trains(tmp_path: Path, programs: Template) -> None:
    (tmp_path / "old.py").write_text(PSERVER)
    endpoint = f"127.0.0.1:{free_ports(['127.0.0.1'], 1)}"
    with ExitStack() as end:
        server, worker = (
            end.enter_context(programs.start(role, ["old.py", role, endpoint], {}, folder=tmp_path))
            for role in ("PSERVER", "TRAINER")
        )
        assert (worker.finish(), server.finish()) == (0, 0)
    assert "Strategy('async') 1" in worker.output


@pytest.mark.parametrize(
    ("mode", "arguments", "words"),
    [
        ("nccl2", {"trainers": TWO, "current_endpoint": "127.0.0.1:1"}, "that of worker 1 as"),
        ("nccl2", {"trainers": 2, "current_endpoint": "127.0.0.1:1"}, "found trainers=2"),
        ("nccl2", {"trainers": TWO, "pservers": TWO}, "and no pservers"),
        ("pserver", {"trainers": TWO}, "config.mode = 'nccl2' is without servers"),
        ("pserver", {"trainers": 2, "pservers": TWO, "program": 1}, "expected program=None"),
    ],
)
def test_a_transpiler_refuses_the_arguments_of_another_mode(
    mode: str, arguments: dict[str, Any], words: str
) -> None:
    config = fleet.DistributeTranspilerConfig()
    config.mode = mode
    with pytest.raises(BadRequest, match=words):
        fleet.DistributeTranspiler(config).transpile(1, **arguments)
    with pytest.raises(NotReady, match=r"expected transpile\(\)"):
        fleet.DistributeTranspiler(config).get_pserver_program("127.0.0.1:9")


def test_modes_of_collective_jobs_and_of_others_are_not_mixed() -> None:
    config = fleet.DistributeTranspilerConfig()
    with pytest.raises(BadRequest, match="a job without servers, found 'pserver'"):
        config.strategy(is_collective=True)
    config.mode = "nccl2"
    assert config.strategy(is_collective=True) == tr.Strategy("collective")
    with pytest.raises(BadRequest, match="a job with servers"):
        config.strategy()
    config.sync_mode = False
    with pytest.raises(BadRequest, match="expected sync_mode True"):
        config.strategy(is_collective=True)
    with pytest.raises(BadRequest, match="mode as one of pserver, nccl2, found"):
        config.mode = "nccl3"
    strategy = fleet.DistributedStrategy()
    assert strategy.strategy(is_collective=True) == tr.Strategy("collective")
    strategy.a_sync = True
    with pytest.raises(BadRequest, match="expected a_sync False and no k_steps"):
        strategy.strategy(is_collective=True)
    strategy.a_sync_configs = {"use_ps_gpu": 1}  # PaddleRec's gpubox sets both
    assert strategy.strategy(is_collective=True) == tr.Strategy("collective")
    assert strategy.strategy() == tr.Strategy("sync")


def test_is_collective_refuses_a_job_with_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"PADDLE_PSERVERS_IP_PORT_LIST": TWO, "TRAINING_ROLE": "TRAINER"}
    job |= {"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ID": "0"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadRequest, match=r"hold the rows with is_collective=True.*servers 127"):
        fleet.init(is_collective=True)
    maker = fleet.PaddleCloudRoleMaker()
    with pytest.raises(BadRequest, match="is_collective=True of the role maker too"):
        fleet.init(maker, is_collective=True)


def test_memory_optimize_says_that_torch_needs_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fleet.memory_optimize(None, skip_grads=True)
        fleet.release_memory(None)
    assert len(caplog.records) == 2
    assert "torch frees what forward has kept" in caplog.text
