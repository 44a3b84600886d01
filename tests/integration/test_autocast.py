"""Trainer(autocast=): forward in bfloat16 and all else in float32, in every mode and everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.test_device_passes import RULES, Net, data
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.table import RowClassId

HALF = torch.bfloat16
MODES: dict[str, tr.Strategy] = {
    "async": tr.Strategy("async"),
    "sync": tr.Strategy("sync"),
    "bounded": tr.Strategy("bounded", staleness=1),
    "geo": tr.Strategy("geo", k=2),
    "hybrid": tr.Strategy("hybrid"),
    "collective": tr.Strategy("collective"),
}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with embedded(threads=1) as opened:
        set_default(opened)
        yield opened


class _OfAllThreads(set[torch.dtype]):
    """Which replicas of a module share."""

    def __deepcopy__(self, _: object) -> _OfAllThreads:
        return self


class Watched(Net):
    """Notes what forward computes in, and what gradients come to rows and weights."""

    def __init__(self, table: tr.Table) -> None:
        super().__init__(table)
        self.computed, self.returned = _OfAllThreads(), _OfAllThreads()

    def forward(self, batch: Any) -> torch.Tensor:
        out = super().forward(batch)
        self.computed.add(out.dtype)
        for lookup in getattr(batch, "lookups", {}).values():
            if lookup.rows.requires_grad:
                lookup.rows.register_hook(lambda grad: self.returned.add(grad.dtype))
        return out


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    assert logits.dtype == torch.float32
    return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def trainer(mode: str = "sync", **options: Any) -> tr.Trainer:
    torch.manual_seed(3)
    model = Watched(tr.Table("keys", dim=4, optimizer=RULES["adagrad"](), seed=1))
    options = {"autocast": HALF, "strategy": MODES[mode], "metrics": ["auc"], **options}
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return tr.Trainer(model, optimizer, loss=loss, progress=False, **options)


def rows_of(cluster: Cluster) -> torch.Tensor:
    rows = RowClassId("keys")
    return cluster.client.pull({rows: np.arange(60, dtype=np.uint64)}).rows[rows]


def check_types(model: Any) -> None:
    assert model.computed == {HALF}
    assert model.returned <= {torch.float32}
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_computes_in_bfloat16_and_trains_in_float32(mode: str, cluster: Cluster) -> None:
    one = trainer(mode)
    figures = one.fit(data(1), epochs=2)
    assert figures["loss"] < 0.75
    check_types(one.model)
    assert one.model.returned == {torch.float32}
    batches = data(1)
    outputs = one.predict(batches)["output"]
    assert outputs.dtype == torch.float32
    assert torch.equal(outputs, outputs.to(HALF).float())
    check_types(one.model)
    assert one.evaluate(batches).keys() == {"loss", "auc", "examples", "examples_per_s"}


def test_each_thread_has_an_autocast_of_its_own(cluster: Cluster) -> None:
    one = trainer("async", threads=2)
    one.fit(data(1))
    check_types(one.model)


def test_the_trainer_has_the_bits_of_a_loop_under_torch_autocast(cluster: Cluster) -> None:
    one = trainer()
    one.fit(data(1))
    actual = [p.detach().clone() for p in one.model.parameters()]
    rows = rows_of(cluster)
    with embedded(threads=1) as other:
        set_default(other)
        torch.manual_seed(3)
        model = Net(tr.Table("keys", dim=4, optimizer=RULES["adagrad"](), seed=1))
        inner = torch.optim.Adam(model.parameters(), 0.01)
        optimizer = tr.DistributedOptimizer(inner, model, strategy=MODES["sync"])
        for batch in tr.prefetch(data(1), model):
            optimizer.zero_grad()
            with torch.autocast("cpu", HALF):
                outputs = model(batch)
            loss(outputs.float(), batch["label"]).backward()
            optimizer.step()
        optimizer.flush()
        for ours, plain in zip(actual, model.parameters(), strict=True):
            assert torch.equal(ours, plain)
        assert torch.equal(rows, rows_of(other))


@pytest.mark.parametrize("kind", ["pass", "window"])
def test_passes_and_windows_have_the_bits_of_sync(kind: str, cluster: Cluster) -> None:
    batches = data(1)
    one = trainer()
    with one.on_device(batches) if kind == "pass" else one.in_window(2, "1MiB"):
        inside = one.fit(batches)
    check_types(one.model)
    parameters = [p.detach().clone() for p in one.model.parameters()]
    with embedded(threads=1) as other:
        set_default(other)
        two = trainer()
        outside = two.fit(batches)
        assert inside["loss"] == outside["loss"]
        for a, b in zip(parameters, two.model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_checkpoints_know_nothing_of_it(cluster: Cluster, tmp_path: Path) -> None:
    one = trainer()
    one.fit(data(1))
    one.save(tmp_path / "half")
    expected = one.predict(data(2))["output"]
    with embedded(threads=1) as other:
        set_default(other)
        plain = trainer(autocast=None)
        plain.load(tmp_path / "half")
        plain.save(tmp_path / "full")
        for a, b in zip(one.model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(a, b)
        outputs = plain.predict(data(2))["output"]
        assert plain.model.computed == {torch.float32}
        torch.testing.assert_close(outputs, expected, rtol=2e-2, atol=2e-2)
        with torch.no_grad(), torch.autocast("cpu", HALF):
            half = torch.cat([plain.model.eval()(batch).float() for batch in data(2)])
        assert torch.equal(half, expected)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (
            torch.float16,
            "found torch.float16, whose .* use torch.bfloat16, or a loop of .*GradScaler",
        ),
        (torch.float64, "found torch.float64; .* computes in float32"),
        (torch.float32, "found torch.float32; .* computes in float32"),
        ("bfloat16", "found 'bfloat16'; without"),
    ],
)
def test_other_types_are_refused(dtype: Any, message: str, cluster: Cluster) -> None:
    with pytest.raises(BadRequest, match=rf"expected autocast=torch.bfloat16 or None, {message}"):
        trainer(autocast=dtype)


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_an_autocast_around_a_pass_is_refused(call: str, cluster: Cluster) -> None:
    one = trainer(autocast=None)
    with (
        torch.autocast("cpu", HALF),
        pytest.raises(BadRequest, match=rf"expected {call} outside of torch.autocast"),
    ):
        getattr(one, call)(data(1))
    assert one.model.computed == set()
