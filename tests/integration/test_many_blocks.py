"""Jobs with more blocks than a header could name, and marks of more streams than it could list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trireme as tr
from tests.jobs import Job
from trireme.job.cluster import Cluster
from trireme.protocol.block_spec import BlockSpec
from trireme.server.block_store import BlockStore

BLOCK = 64


class Model(nn.Module):
    """One matrix of so many blocks."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight_of_the_first_layer_of_the_tower = nn.Parameter(torch.randn(num_blocks, BLOCK))

    def forward(self, batch: Any) -> torch.Tensor:
        return (self.weight_of_the_first_layer_of_the_tower @ batch["x"].T).mean(0)


def trained(cluster: Cluster, model: nn.Module) -> tr.Trainer:
    """After one step, which must change all weights."""
    trainer = tr.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=tr.Strategy("async"),
        loss=nn.functional.mse_loss,
        blocks=tr.Blocks(BLOCK),
        progress=False,
        cluster=cluster,
    )
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    trainer.fit([{"x": torch.ones(2, BLOCK), "label": torch.ones(2)}])
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (before != after).all()
    return trainer


def test_a_job_of_forty_thousand_blocks_trains() -> None:
    with Job(2) as job:
        job.run(1, lambda cluster: trained(cluster, Model(40_000)))
        assert [len(server.state.blocks) for server in job.servers] == [20_000] * 2


def test_a_load_does_not_list_all_blocks_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def specs(store: BlockStore) -> list[BlockSpec]:
        calls.append(len(store))
        return list(store._specs.values())

    def load(cluster: Cluster) -> None:
        trainer = trained(cluster, Model(300))
        trainer.save(tmp_path / "c")
        monkeypatch.setattr(BlockStore, "specs", specs)
        trainer.load(tmp_path / "c")

    with Job(1) as job:
        job.run(1, load)
    assert 0 < len(calls) < 20


def test_a_save_of_many_streams_and_blocks_loads_with_all_marks(tmp_path: Path) -> None:
    num_blocks, num_streams = 1000, 400

    def save(cluster: Cluster) -> nn.Module:
        model = Model(num_blocks)
        trainer = trained(cluster, model)
        for server in job.servers:  # as workers of so many streams would have left them
            server.state.blocks.advance([(stream, 7) for stream in range(1, num_streams)])
        trainer.save(tmp_path / "c")
        return model

    def load(cluster: Cluster) -> nn.Module:
        model = Model(num_blocks)
        trained(cluster, model).load(tmp_path / "c")
        return model

    with Job(1) as job:
        [saved] = job.run(1, save)
    with Job(2) as job:
        [loaded] = job.run(1, load)
        for server in job.servers:
            blocks = server.state.blocks
            for spec in blocks.specs():
                assert blocks.marks_of(spec.id) == {0: 1, **dict.fromkeys(range(1, 400), 7)}
    torch.testing.assert_close(loaded.state_dict(), saved.state_dict(), rtol=0, atol=0)
    assert (tmp_path / "c" / "manifest.json").stat().st_size < 200 * num_blocks
