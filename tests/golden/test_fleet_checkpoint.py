"""Checkpoints written by Paddle 2.6.2: the loaded model predicts what Paddle predicts.

The files were written under Paddle by benchmarks/paddle/checkpoint.py --accessor A --rule R --dense
D into A-R-D; of `inference` only dnn_plugin, of one of them, is kept.
"""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from benchmarks.paddle.checkpoint import (
    DIMS,
    EMBEDX_THRESHOLD,
    FEATURES,
    INITIAL_RANGE,
    LAYERS,
    SHARDS,
)
from trireme.dense.adam_d2sum import AdamD2Sum
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded

FOLDER = Path(__file__).with_name("fleet_checkpoint")
CASES = sorted(path.name for path in FOLDER.iterdir())
RULES: dict[str, Any] = {
    "naive": tr.optim.FleetSGD(lr=0.05),
    "adagrad": tr.optim.FleetAdagrad(lr=0.05),
    "std_adagrad": tr.optim.FleetAdagrad(lr=0.05, shared=False),
    "adam": tr.optim.FleetAdam(lr=1e-2),
    "shared_adam": tr.optim.FleetSharedAdam(lr=1e-2),
}
NAMES = [f"C{i}" for i in range(FEATURES)]


class Net(nn.Module):
    """The net of benchmarks/paddle/checkpoint.py."""

    def __init__(self, accessor: str, rule: str) -> None:
        super().__init__()
        policy = getattr(tr.policy, accessor)(embedx_threshold=EMBEDX_THRESHOLD)
        self.rows = tr.nn.EmbeddingBag(
            tr.Table(
                "embedding",
                dim=DIMS[accessor] - 2 * policy.pulls_statistics,
                optimizer=RULES[rule],
                initializer=tr.initializer.TailUniform(-INITIAL_RANGE, INITIAL_RANGE),
                absent="zeros",
                policy=policy,
            ),
            features=NAMES,
        )
        self.cvm = tr.nn.CVM() if policy.pulls_statistics else None
        widths = [FEATURES * DIMS[accessor], *LAYERS]
        layers: list[nn.Module] = []
        for into, out in pairwise(widths):
            layers += [nn.Linear(into, out), nn.ReLU()]
        self.mlp = nn.Sequential(*layers[:-1])

    def forward(self, batch: Any) -> torch.Tensor:
        rows = self.rows(batch)
        if self.cvm is not None:
            rows = self.cvm(
                rows, torch.ones(len(rows), 2)
            )  # what the examples count: no matter here
        return self.mlp(rows.flatten(1)).squeeze(1)


def make_trainer(cluster: Cluster, case: str) -> tr.Trainer:
    accessor, rule, dense = case.split("-")
    model = Net(accessor, rule)
    kinds = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD, "d2sum": AdamD2Sum}
    return tr.Trainer(
        model,
        kinds[dense](model.parameters(), lr=1e-2),
        loss=nn.functional.binary_cross_entropy_with_logits,
        progress=False,
        cluster=cluster,
    )


def predictions(trainer: tr.Trainer, recorded: dict[str, Any]) -> np.ndarray:
    keys = torch.from_numpy(np.array(recorded["keys"], np.uint64).view(np.int64))
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(dict(zip(NAMES, keys.unbind(1), strict=True)))
    return torch.sigmoid(logits).numpy()


@pytest.mark.parametrize("case", CASES)
def test_predictions_are_paddles(case, tmp_path):
    recorded = json.loads((FOLDER / case / "predicted.json").read_text())
    with embedded(threads=1) as cluster:
        set_default(cluster)
        trainer = make_trainer(cluster, case)
        tr.interchange.import_fleet(trainer, FOLDER / case / "saved", accessor=case.split("-")[0])
        actual = predictions(trainer, recorded)
        expected = np.array(recorded["predictions"])
        assert np.ptp(expected) > 1e-3
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_imported_files_are_exported_unchanged(case, tmp_path):
    """Every number of Paddle's text; the powers of betas up to its six digits."""
    accessor = case.split("-")[0]
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster, case)
        tr.interchange.import_fleet(trainer, FOLDER / case / "saved", accessor=accessor)
        tr.interchange.export_fleet(
            trainer, tmp_path / "ours", accessor=accessor, shard_num=SHARDS, compress=True
        )
    saved = FOLDER / case / "saved"
    for path in sorted(saved.glob("*/*")):
        expected, actual = lines(path), lines(tmp_path / "ours" / path.relative_to(saved))
        if path.parent.name == "000":  # rows have no order
            expected, actual = sorted(expected), sorted(actual)
            assert [line[0] for line in actual] == [line[0] for line in expected]
        for ours, right in zip(actual, expected, strict=True):
            np.testing.assert_allclose(np.array(ours, float), np.array(right, float), rtol=5e-6)


def lines(path: Path) -> list[list[str]]:
    with gzip.open(path, "rt") as text:
        return [line.split() for line in text]


def test_an_inference_model_has_the_exact_dense_weights():
    """Its rows are the same text, its dense weights what the other's have been rounded from."""
    case = "SparseAccessor-adagrad-adam"
    names = {f"fc_{i}.{paddle_name}": f"mlp.{2 * i}.{ours}" for i in range(3)
             for paddle_name, ours in (("w_0", "weight"), ("b_0", "bias"))}  # fmt: skip
    recorded = json.loads((FOLDER / case / "predicted.json").read_text())
    with embedded(threads=1) as cluster:
        set_default(cluster)
        trainer = make_trainer(cluster, case)
        tr.interchange.import_fleet(trainer, FOLDER / case / "saved", dense=names)
        rounded = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        tr.interchange.import_fleet(trainer, FOLDER / case / "inference", dense=names)
        for name, exact in trainer.model.named_parameters():
            torch.testing.assert_close(exact.detach(), rounded[name], rtol=5e-6, atol=0)
        assert any((p != rounded[n]).any() for n, p in trainer.model.named_parameters())
        actual = predictions(trainer, recorded)
    np.testing.assert_allclose(actual, recorded["predictions"], rtol=0, atol=1e-5)
