"""The models learn a planted signal of ids and numbers, and every option shapes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from trireme.cluster import embedded, set_default
from trireme.models import CtrDnn, WideDeep

FEATURES = ("a", "b")
NUM_IDS, NUM_DENSE = 50, 3
SCHEMA = tr.data.Schema(
    [tr.data.Label(), tr.data.Dense("dense", NUM_DENSE), *map(tr.data.Sparse, FEATURES)]
)


def planted(num_examples: int, seed: int) -> tuple[tr.data.ArrayDataset, float]:
    """Labels of logit = u[a] + v[b] + dense . w, and the AUC that the logits themselves reach."""
    fixed = np.random.default_rng(7)
    u, v = 2 * fixed.normal(size=(2, NUM_IDS))
    w = fixed.normal(size=NUM_DENSE)
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, NUM_IDS, (2, num_examples))
    dense = rng.normal(size=(num_examples, NUM_DENSE)).astype(np.float32)
    logits = u[a] + v[b] + dense @ w
    labels = (rng.random(num_examples) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    best = tr.metrics.AUC()
    best.update(torch.from_numpy(logits).float(), torch.from_numpy(labels))
    # One table holds both features: their ids must differ.
    columns = {"label": labels, "dense": dense, "a": a, "b": b + NUM_IDS}
    return tr.data.ArrayDataset(columns, schema=SCHEMA, batch_size=100), best.compute()


@pytest.mark.parametrize(
    ("make", "rules"),
    [
        (CtrDnn, {"optimizer": tr.optim.Adam(lr=0.03)}),
        (WideDeep, {"wide": tr.optim.Adagrad(lr=0.1), "deep": tr.optim.Adam(lr=0.03)}),
    ],
)
def test_a_model_learns_a_planted_signal(
    make: Callable[..., nn.Module], rules: dict[str, tr.optim.Rule]
) -> None:
    torch.manual_seed(0)
    train, _ = planted(8000, seed=1)
    test, auc_possible = planted(4000, seed=2)
    model = make(features=FEATURES, num_dense=NUM_DENSE, dim=4, layers=(16, 8), **rules)
    with embedded() as cluster:
        trainer = tr.Trainer(
            model,
            torch.optim.Adam(model.parameters(), lr=3e-3),
            loss=nn.functional.binary_cross_entropy_with_logits,
            metrics=[tr.metrics.AUC()],
            progress=False,
            cluster=cluster,
        )
        assert trainer.evaluate(test)["auc"] < 0.6
        trainer.fit(train, epochs=2)
        assert auc_possible - 0.03 < trainer.evaluate(test)["auc"] < auc_possible + 0.001


@pytest.mark.parametrize("make", [CtrDnn, WideDeep])
def test_every_option_shapes_the_model(make: Callable[..., nn.Module]) -> None:
    options: dict[str, Any] = {"features": FEATURES, "num_dense": 3, "dim": 4, "layers": (16, 8)}

    def shapes(**changed: Any) -> list[tuple[int, ...]]:
        return [tuple(p.shape) for p in make(**{**options, **changed}).parameters()]

    assert (16, 2 * 4 + 3) in shapes()
    assert (1, 8) in shapes()
    changes: dict[str, Any] = {"features": ("a",), "num_dense": 0, "dim": 5, "layers": (16,)}
    for name, value in changes.items():
        assert shapes(**{name: value}) != shapes(), name


@pytest.mark.parametrize("make", [CtrDnn, WideDeep])
def test_a_model_without_dense_columns_gives_one_logit_per_example(
    make: Callable[..., nn.Module],
) -> None:
    model = make(features=FEATURES, num_dense=0)
    with embedded() as cluster:
        set_default(cluster)
        batch = {name: torch.arange(6) for name in FEATURES}
        assert model.eval()(batch).shape == (6,)
