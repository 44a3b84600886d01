"""Models with several outputs, losses that read the batch, and custom metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trireme as tr
from tests.integration.planted_model import Linear, loader, trainer_for
from tests.jobs import Job
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.metrics import AUC, GAUC
from trireme.train import gather_arrays

bce = nn.functional.binary_cross_entropy_with_logits


class TwoTasks(Linear):
    """A click's logit, and that of the opposite."""

    def forward(self, batch: Any) -> Any:
        logit = super().forward(batch)
        return {"click": logit, "pass": -logit}


class SumsByUser:
    """The sum of the scores of each user: as many values as there are users."""

    def __init__(self, name: str = "by_user", output: str | None = "click") -> None:
        self.name, self.output, self.label = name, output, None
        self.columns = {"users": "a"}
        self.reset()

    def update(self, scores: Tensor, labels: Tensor, *, users: Tensor) -> None:
        assert not scores.requires_grad
        for user, label in zip(users.tolist(), labels.tolist(), strict=True):
            self.sums[user] = self.sums.get(user, 0.0) + label

    def state(self) -> dict[str, np.ndarray]:
        users = np.array(sorted(self.sums), np.int64)
        return {"users": users, "sums": np.array([self.sums[u] for u in sorted(self.sums)])}

    def merge(self, state: Mapping[str, np.ndarray]) -> None:
        for user, value in zip(state["users"], state["sums"], strict=True):
            self.sums[int(user)] = self.sums.get(int(user), 0.0) + float(value)

    def compute(self) -> dict[str, float]:
        return {"users": float(len(self.sums)), "sum": sum(self.sums.values())}

    def reset(self) -> None:
        self.sums: dict[int, float] = {}


def batches(count: int = 1000, seed: int = 0) -> list[dict[str, Tensor]]:
    return [{**batch, "skipped": 1 - batch["label"]} for batch in loader(count, seed)]


def recipe(label: str | None = "label") -> tr.Recipe:
    model = TwoTasks(lr=20.0)

    def loss(outputs: Any, labels: Any) -> Tensor:
        return bce(outputs["click"], labels if label else labels["label"])

    metrics: list[Any] = [
        AUC(output="click"),
        AUC(output="pass", label="skipped", name="pass_auc"),
        GAUC(users="a", output="click"),
        SumsByUser(),
    ]
    if label is None:
        for metric in metrics:
            metric.label = metric.label or "label"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return tr.Recipe(model=model, loss=loss, optimizer=optimizer, label=label, metrics=metrics)


@pytest.mark.parametrize("label", ["label", None])
def test_outputs_by_name_reach_the_metrics_that_name_them(label: str | None) -> None:
    def work(cluster: Cluster) -> dict[str, float]:
        trainer = tr.Trainer.from_recipe(recipe(label), progress=False, cluster=cluster)
        trainer.fit(batches(4000))
        return trainer.evaluate(batches(2000, seed=1))

    with embedded() as cluster:
        figures = work(cluster)
    assert figures["auc"] > 0.85
    assert figures["pass_auc"] == pytest.approx(figures["auc"], abs=1e-4)


def test_states_of_any_size_merge_over_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(cluster: Cluster) -> dict[str, float]:
        trainer = tr.Trainer.from_recipe(recipe(), progress=False, cluster=cluster)
        return trainer.evaluate(batches(1000))

    with embedded() as cluster:
        expected = work(cluster)
    data = batches(1000)
    assert expected["by_user.users"] == len({int(u) for batch in data for u in batch["a"]})
    assert expected["by_user.sum"] == sum(float(batch["label"].sum()) for batch in data)
    # Pieces of different numbers of meetings, which no array's end fits.
    monkeypatch.setattr(gather_arrays, "_WORKER_BYTES_MAX", 1_000_003)
    with Job(1) as job:
        results = job.run(3, work)
    for actual in results:
        for name in ("auc", "pass_auc", "gauc", "by_user.users", "by_user.sum", "examples"):
            assert actual[name] == expected[name]
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_wrong_outputs_labels_and_metrics_get_typed_errors() -> None:
    class Bare(Linear):
        def forward(self, batch: Any) -> Any:
            return (super().forward(batch),)

    with embedded() as cluster:

        def trainer(model: nn.Module, **options: Any) -> tr.Trainer:
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            options = {"loss": bce, "progress": False, "cluster": cluster, **options}
            return tr.Trainer(model, sgd, **options)

        with pytest.raises(BadRequest, match="tensors by name, found tuple"):
            trainer(Bare()).fit(batches(50))
        with pytest.raises(BadRequest, match="column 'click' in the batch, found a, b, label"):
            trainer(Linear(), label="click").fit(batches(50))
        with pytest.raises(BadRequest, match=r"label is None; found none for auc"):
            trainer(Linear(), label=None, metrics=[AUC()])
        several = {"loss": lambda outputs, labels: bce(outputs["click"], labels)}
        with pytest.raises(BadRequest, match="model's outputs click, pass, found None"):
            trainer(TwoTasks(), metrics=[AUC()], **several).fit(batches(50))
        with pytest.raises(BadRequest, match="model's outputs output, found 'click'"):
            trainer(Linear(), metrics=[AUC(output="click")]).fit(batches(50))
        assert trainer_for(cluster).fit(loader(100))["examples"] == 100
