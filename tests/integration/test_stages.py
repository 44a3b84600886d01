"""Models in stages, in one process: training in every mode, checkpoints, exports, compilation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trireme as tr
from tests.integration.planted_model import Named, bce
from trireme.inference import Predictor
from trireme.inference.export.exporter import export_model
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded

MODES: dict[str, tr.Strategy] = {
    "async": tr.Strategy("async"),
    "sync": tr.Strategy("sync"),
    "bounded": tr.Strategy("bounded", staleness=1),
    "geo": tr.Strategy("geo", k=2),
    "hybrid": tr.Strategy("hybrid"),
    "collective": tr.Strategy("collective"),
}
REPEATABLE = ("sync", "geo", "collective")  # in others a pull may miss the last push, or not


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = tr.Table("w", dim=4, optimizer=tr.optim.Adagrad(lr=0.3))
        self.bags = tr.nn.EmbeddingBag(table, features=["a", "b"])
        self.side = nn.Linear(4, 2)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        x = self.bags(batch)
        return {"x": x.flatten(1), "side": self.side(x.sum(1)).bfloat16(), "a": batch["a"]}


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3)
        )

    def forward(self, values: Any) -> dict[str, Tensor]:
        return {**values, "tower": self.layers(values["x"])}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 1)

    def forward(self, values: Any) -> Tensor:
        x = torch.cat([values["tower"], values["side"].float()], 1)
        return self.out(x * (values["a"] > 3)[:, None]).squeeze(1)


class Plain(nn.Module):
    """The same modules without stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stage_cpu, self.stage_gpu, self.stage_cpu_2 = Wide(), Tower(), Head()

    def forward(self, batch: Any) -> Tensor:
        return self.stage_cpu_2(self.stage_gpu(self.stage_cpu(batch)))


def staged() -> tr.Stages:
    return tr.Stages(cpu=Wide(), gpu=Tower(), cpu_2=Head())


def home() -> Cluster:
    return embedded(devices={"gpu": "cpu"})


def trainer_for(cluster: Cluster, make: Any = staged, **options: Any) -> tr.Trainer:
    torch.manual_seed(5)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return tr.Trainer(model, optimizer, loss=bce, progress=False, cluster=cluster, **options)


def figures(trainer: tr.Trainer) -> tuple[list[float], dict[str, Tensor]]:
    losses = [trainer.fit(Named(600), epochs=2)["loss"], trainer.evaluate(Named(300, 1))["loss"]]
    return losses, {k: v.clone() for k, v in trainer.model.state_dict().items()}


@pytest.mark.parametrize(
    ("mode", "threads"), [*((mode, 1) for mode in MODES), ("async", 2), ("bounded", 2)]
)
def test_stages_train_as_the_modules_without_stages(mode: str, threads: int) -> None:
    results = []
    for make in (staged, Plain):
        with home() as cluster:
            trainer = trainer_for(cluster, make, strategy=MODES[mode], threads=threads)
            results.append(figures(trainer))
    (losses, state), (plain_losses, plain_state) = results
    assert state.keys() == plain_state.keys()
    if mode in REPEATABLE:
        assert losses == plain_losses
        assert all(torch.equal(state[name], plain_state[name]) for name in state)
    else:
        assert losses == pytest.approx(plain_losses, abs=0.05)
    assert losses[1] < 0.69


def test_a_loop_without_a_trainer_trains_all_stages() -> None:
    def weights(make: Any) -> dict[str, Tensor]:
        with home() as cluster:
            torch.manual_seed(5)
            model = make()
            dense = torch.optim.Adam(model.parameters(), 1e-2)
            optimizer = tr.DistributedOptimizer(
                dense, model, strategy=tr.Strategy("sync"), cluster=cluster
            )
            for batch in tr.prefetch(Named(300).stream(0, 1), model, cluster=cluster):
                optimizer.zero_grad()
                bce(model(batch), batch["label"]).backward()
                optimizer.step()
            return {k: v.clone() for k, v in model.state_dict().items()}

    stages, plain = weights(staged), weights(Plain)
    assert all(torch.equal(stages[name], plain[name]) for name in plain)


def test_a_checkpoint_of_stages_is_resumed(tmp_path: Path) -> None:
    sync = tr.Strategy("sync")
    with home() as cluster:
        trainer = trainer_for(cluster, strategy=sync)
        trainer.fit(Named(300))
        trainer.save(tmp_path / "1")
        trainer.fit(Named(300))
        expected = trainer.model.state_dict()
        saved_loss = trainer.evaluate(Named(300, 1))["loss"]
    with home() as cluster:
        trainer = trainer_for(cluster, strategy=sync)
        assert trainer.load(tmp_path / "1") == []
        trainer.fit(Named(300))
        state = trainer.model.state_dict()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        assert trainer.evaluate(Named(300, 1))["loss"] == saved_loss
    with home() as cluster:  # and by the modules without stages
        trainer = trainer_for(cluster, Plain, strategy=sync)
        assert trainer.load(tmp_path / "1", dense="match") == []


@pytest.mark.parametrize("num_examples", [1, 7])
def test_an_export_predicts_as_the_stages(tmp_path: Path, num_examples: int) -> None:
    with home() as cluster:
        set_default(cluster)
        trainer = trainer_for(cluster)
        trainer.fit(Named(300))
        batch = next(Named(100, 1).stream(0, 1))
        base = export_model(trainer, tmp_path / "base", batch=batch)
        assert base.max_error == 0
        trainer.fit(Named(300, 2))
        export_model(trainer, tmp_path / "delta", batch=batch, follows=tmp_path / "base")
        asked = {name: batch[name][:num_examples] for name in ("a", "b")}
        trainer.model.eval()
        with torch.no_grad():
            expected = trainer.model(asked)
    predictor = Predictor(tmp_path / "base")
    predictor.apply(tmp_path / "delta")
    assert torch.allclose(predictor.predict(asked).outputs["output"], expected, atol=1e-6)


def test_one_stage_is_exported(tmp_path: Path) -> None:
    with home() as cluster:
        trainer = trainer_for(cluster)
        trainer.fit(Named(300))
        batch = next(Named(100, 1).stream(0, 1))
        export_model(trainer, tmp_path / "wide", batch=batch, model=trainer.model["cpu"])
    outputs = Predictor(tmp_path / "wide").predict(batch).outputs
    assert outputs["x"].shape == (50, 8)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which the compiler itself reads
def test_stages_may_be_compiled_one_by_one() -> None:
    with home() as cluster:
        trainer = trainer_for(cluster, strategy=tr.Strategy("sync"))
        trainer.model["gpu"].compile(backend="eager")
        compiled = figures(trainer)
    with home() as cluster:
        assert figures(trainer_for(cluster, strategy=tr.Strategy("sync")))[0] == compiled[0]
