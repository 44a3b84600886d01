"""The cut and the placement of dense parameters change no result, and a checkpoint of one cut loads
into any other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.durable_servers import DurableServers
from tests.jobs import Job
from tests.programs import Template
from trireme import fleet
from trireme.errors import BadRequest, SchemaMismatch
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.train.checkpointing.checkpoint_location import Location
from trireme.train.checkpointing.load import load
from trireme.train.checkpointing.save import save

Weights = dict[str, np.ndarray]
Optimizers = Callable[[Any], torch.optim.Optimizer]
STEPS = 12
AT = 7  # steps that both servers had applied when they were saved; the first had one more
SMALL = tr.Blocks(64)


def make_model(width: int = 25) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(30, width), nn.Linear(width, 1))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3, generator=generator)
    return model


class Run:
    """A model that is trained on gradients of its own: those of step n are the same in any run."""

    def __init__(
        self,
        cluster: Cluster,
        blocks: tr.Blocks | None,
        mode: str = "async",
        optimizer: Optimizers = torch.optim.NAdam,
        width: int = 25,
    ) -> None:
        self.cluster, self.model = cluster, make_model(width)
        self.optimizer = tr.DistributedOptimizer(
            optimizer(self.model.parameters()),
            self.model,
            strategy=tr.Strategy(mode),
            blocks=blocks,
            cluster=cluster,
        )

    def train(self, last: int) -> Weights:
        """Until this step, from wherever the stream stands."""
        while self.optimizer.sequence < last:
            seed = 1000 * self.cluster.worker + self.optimizer.sequence
            generator = torch.Generator().manual_seed(seed)
            for parameter in self.model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            self.optimizer.step(examples=8)
        self.optimizer.end_pass()
        return {name: p.detach().numpy().copy() for name, p in self.model.named_parameters()}


def undisturbed(optimizer: Optimizers = torch.optim.NAdam) -> Weights:
    with embedded(threads=1) as cluster:
        return Run(cluster, None, optimizer=optimizer).train(STEPS)


def assert_same_bits(actual: Weights, expected: Weights) -> None:
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values, err_msg=name)


def last_server(name: str, number: int, num_servers: int) -> int:
    return num_servers - 1 if name.endswith("weight") else number % num_servers


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.ASGD])
def test_sync_computes_the_same_bits_whatever_the_cut_and_the_place(optimizer: Optimizers) -> None:
    results = []
    choices = [
        (1, None),
        (2, SMALL),
        (3, tr.Blocks(None)),
        (3, tr.Blocks(192, place="hash")),
        (3, tr.Blocks(128, place=last_server)),
    ]
    for num_servers, blocks in choices:

        def train(cluster: Cluster, blocks: tr.Blocks | None = blocks) -> Weights:
            run = Run(cluster, blocks, "sync", optimizer)
            weights = run.train(STEPS)
            cluster.client.coordinator.gather({}, [])
            run.optimizer.refresh()
            return weights

        with Job(num_servers) as job:
            results += job.run(2, train)
            owners = job.servers[0].state.assignment.map().blocks
    for actual in results:
        assert_same_bits(actual, results[0])
    assert {owners[f"0.weight@{start}"] for start in range(0, 750, 128)} == {2}
    assert owners["0.bias@0"] == owners["1.bias@0"] == 0


def save_of_unlike_moments(folder: Path, optimizer: Optimizers = torch.optim.NAdam) -> Path:
    """Of two servers, the first of which has one step more than the second."""
    with Job(2) as job, job.join(0, 1) as cluster:
        run = Run(cluster, SMALL, optimizer=optimizer)
        run.train(AT)
        client: Any = cluster.client
        everywhere = client.servers.pushes.call_all
        client.servers.pushes.call_all = lambda calls, timeout_s: everywhere(calls[:1], timeout_s)
        run.train(AT + 1)
        save(run.optimizer, Location(folder / "saved"))
    return folder / "saved"


@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.Adagrad])
@pytest.mark.parametrize(
    ("num_servers", "blocks"),
    [
        (1, tr.Blocks(None)),
        (3, tr.Blocks(192, place="hash")),
        (2, tr.Blocks(320, place=last_server)),
    ],
)
def test_a_checkpoint_of_unlike_moments_loads_in_any_cut_and_each_step_counts_once(
    num_servers: int, blocks: tr.Blocks, optimizer: Optimizers, tmp_path: Path
) -> None:
    path = save_of_unlike_moments(tmp_path, optimizer)
    with Job(num_servers) as job, job.join(0, 1) as cluster:
        run = Run(cluster, blocks, optimizer=optimizer)
        load(run.optimizer, Location(path))
        assert run.optimizer.sequence == AT
        # Saved before the difference is made up for, and loaded in the first cut again.
        save(run.optimizer, Location(tmp_path / "again"))
        actual = run.train(STEPS)
    assert_same_bits(actual, undisturbed(optimizer))
    with Job(3) as job, job.join(0, 1) as cluster:
        run = Run(cluster, SMALL, optimizer=optimizer)
        load(run.optimizer, Location(tmp_path / "again"))
        assert run.optimizer.sequence == AT
        assert_same_bits(run.train(STEPS), undisturbed(optimizer))


def test_a_killed_server_recovers_blocks_that_were_cut_anew(
    programs: Template, tmp_path: Path
) -> None:
    path = save_of_unlike_moments(tmp_path)
    with DurableServers(programs, 2, tmp_path) as servers, servers.join(0, 1) as cluster:
        run = Run(cluster, tr.Blocks(320, place="hash"))
        load(run.optimizer, Location(path))
        for last in (AT, AT + 2):
            run.train(last)
            for server in range(2):
                servers.kill(server)
                servers.start(server)
        assert_same_bits(run.train(STEPS), undisturbed())


def test_workers_with_different_cuts_or_places_are_refused() -> None:
    def unlike(blocks: Callable[[int], tr.Blocks]) -> Callable[[Cluster], None]:
        def make(cluster: Cluster) -> None:
            Run(cluster, blocks(cluster.worker), "sync")

        return make

    with Job(2) as job, pytest.raises(SchemaMismatch, match=r"blocks is .Blocks\(.*worker"):
        job.run(2, unlike(lambda worker: tr.Blocks(64 + 64 * worker)), timeout_s=5)
    with Job(2) as job, pytest.raises(SchemaMismatch, match="workers must place blocks alike"):
        job.run(2, unlike(lambda worker: tr.Blocks(place=lambda *_: worker)), timeout_s=5)


def test_what_has_no_effect_and_what_cannot_be_is_refused() -> None:
    with embedded() as cluster:
        with pytest.raises(BadRequest, match=r"no blocks in mode 'hybrid'.*Blocks\(64"):
            Run(cluster, SMALL, "hybrid")
        for blocks in (None, SMALL):
            with pytest.raises(BadRequest, match=r"needs whole parameters.*blocks=Blocks\(None\)"):
                Run(cluster, blocks, optimizer=torch.optim.Adafactor)
        with pytest.raises(BadRequest, match="Adafactor needs whole parameters; in mode 'hybrid'"):
            Run(cluster, None, "hybrid", torch.optim.Adafactor)
        with pytest.raises(BadRequest, match=r"such as torch.optim.NAdam\(model.parameters\(\)\)"):
            Run(cluster, None, optimizer=lambda _: torch.optim.NAdam)


def test_a_checkpoint_of_parameters_of_another_shape_is_refused(tmp_path: Path) -> None:
    place = Location(tmp_path / "saved")
    with Job(2) as job, job.join(0, 1) as cluster:
        run = Run(cluster, SMALL)
        run.train(2)
        save(run.optimizer, place)
    with Job(1) as job, job.join(0, 1) as cluster:
        narrow = Run(cluster, tr.Blocks(None), width=7)
        with pytest.raises(SchemaMismatch, match=r"0.weight of shape \[7, 30\], found \[25, 30\]"):
            load(narrow.optimizer, place)
    with Job(1) as job, job.join(0, 1) as cluster:
        model = nn.Sequential(make_model()[0])
        dense = torch.optim.NAdam(model.parameters())
        shallow = tr.DistributedOptimizer(dense, model, cluster=cluster)
        with pytest.raises(SchemaMismatch, match=r"found \['1.bias', '1.weight'\] too; .*match"):
            load(shallow, place)


def test_fleets_names_for_the_cut_mean_the_same() -> None:
    config = fleet.DistributeTranspilerConfig()
    assert config.strategy() == tr.Strategy("sync")
    assert repr(config.blocks()) == "Blocks(8192, place='round_robin')"
    config.min_block_size, config.split_method = 128, fleet.HashName
    assert repr(config.blocks()) == "Blocks(128, place='hash')"
    config.slice_var_up = False
    with pytest.raises(BadRequest, match="expected slice_var_up True with min_block_size"):
        config.blocks()
    config = fleet.DistributeTranspilerConfig()
    config.slice_var_up, config.split_method, config.geo_sgd_mode = False, fleet.HashName, True
    assert repr(config.blocks()) == "Blocks(None, place='hash')"
    with pytest.raises(BadRequest, match="expected sync_mode False with geo_sgd_mode"):
        config.strategy()
    config.sync_mode, config.geo_sgd_need_push_nums = False, 5
    assert config.strategy() == tr.Strategy("geo", k=5)
    config.geo_sgd_mode = False
    with pytest.raises(BadRequest, match="expected geo_sgd_mode True with geo_sgd_need_push_nums"):
        config.strategy()
    config.mode, config.geo_sgd_need_push_nums = "nccl2", 100
    with pytest.raises(BadRequest, match=r"a mode for a job with servers.*, found 'nccl2'"):
        config.strategy()
    wrong: dict[str, Any] = {"slice_var_up": 1, "min_block_size": 0, "split_method": "hash"}
    for name, value in {**wrong, "block_size": 1}.items():
        with pytest.raises(BadRequest, match=f"expected .*{name}"):
            setattr(config, name, value)
    with pytest.raises(BadRequest, match="min_block_size has no place here"):
        fleet.DistributedStrategy().min_block_size = 8192
