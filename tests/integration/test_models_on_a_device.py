"""A model on another device: rows, positions and columns follow it, and gradients come back, in
every mode.

No device is needed: tensors that have crossed are of a class of their own, which refuses what would
need them on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trireme as tr
from trireme import accelerator
from trireme.data import Bags, Batch
from trireme.data.batch import Ragged, Strings
from trireme.errors import BadRequest
from trireme.inference.export import exporter
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.nn import Lookup, op
from trireme.nn.on_device import device_of
from trireme.nn.pooling import sequence_pool
from trireme.optim import FleetAdagrad
from trireme.table import Table

MODES: dict[str, tr.Strategy] = {
    "async": tr.Strategy("async"),
    "sync": tr.Strategy("sync"),
    "bounded": tr.Strategy("bounded", staleness=1),
    "geo": tr.Strategy("geo", k=2),
    "hybrid": tr.Strategy("hybrid"),
}
REPEATABLE = ("sync", "geo")  # in the others a pull may miss the last push, or not


MIXES = (torch.repeat_interleave, torch.batch_norm, nn.functional.batch_norm)
"""Functions that take a tensor which the model has made, or its buffers: these are not Far."""


class Far(Tensor):
    """A tensor as if it were on another device."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for other in (*args, *(kwargs or {}).values()):
            is_near = isinstance(other, Tensor) and not isinstance(other, (Far, nn.Parameter))
            assert not is_near or other.numel() <= 1 or func in MIXES, f"{func}: not moved"
        return super().__torch_function__(func, types, args, kwargs or {})

    def numpy(self, **_: Any) -> Any:
        raise AssertionError("not on the CPU")

    def cpu(self, *_: Any) -> Tensor:
        return near(self)


def far(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().as_subclass(Far)


def near(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().as_subclass(Tensor)


class FarLink(accelerator.Link):
    """A link to where tensors are Far."""

    is_host = False

    def __init__(self) -> None:
        super().__init__(accelerator.HOST)
        self.num_sent = self.num_returned = 0

    def send(self, tensors: Sequence[Tensor]) -> accelerator.Sent:
        assert not any(isinstance(tensor, Far) for tensor in tensors)
        assert len({id(tensor) for tensor in tensors}) == len(tensors), "each once"
        self.num_sent += len(tensors)
        return accelerator.Sent([far(tensor) for tensor in tensors])

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.num_returned += len(tensors)
        return [near(tensor) for tensor in tensors]


def far_gather(lookup: Lookup, num_examples: int, num_features: int, pool: Any) -> Tensor:
    assert all(isinstance(tensor, Far) for tensor in lookup)
    plain = Lookup(*map(near, lookup))
    return far(op._gather_torch(plain, num_examples, num_features, pool))


def far_scatter(grad: Tensor, *rest: Any) -> Tensor:
    return op._scatter_torch(near(grad), *(near(x) if isinstance(x, Tensor) else x for x in rest))


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> FarLink:
    made = FarLink()
    monkeypatch.setattr(accelerator, "link_to", lambda _: made)
    monkeypatch.setattr(op, "_kernels", lambda _: (far_gather, far_scatter))
    return made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table("t", dim=4, optimizer=tr.optim.Adagrad(lr=0.1))
        scaled = Table("u", dim=3, optimizer=FleetAdagrad(lr=0.1))
        self.emb = tr.nn.EmbeddingBag(self.table, features=["a", "b"], mode="mean", padding_key=0)
        self.seq = tr.nn.Embedding(scaled, features="b")
        torch.manual_seed(0)
        self.top = nn.Sequential(nn.BatchNorm1d(13), nn.Linear(13, 1))

    def forward(self, batch: Batch) -> Tensor:
        bags = batch["b"]
        assert isinstance(bags, Ragged)
        pooled = sequence_pool(self.seq(batch), bags.offsets)
        return self.top(torch.cat([self.emb(batch).flatten(1), pooled, batch["x"]], 1)).squeeze(1)


def batches(num: int = 6, num_examples: int = 8) -> Iterator[Batch]:
    rng = np.random.default_rng(0)
    for _ in range(num):
        sizes = rng.integers(0, 4, 2 * num_examples)
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
        ids = torch.from_numpy(rng.integers(0, 30, int(sizes.sum())))
        columns = {
            "label": torch.from_numpy(rng.integers(0, 2, num_examples).astype(np.float32)),
            "x": torch.from_numpy(rng.standard_normal((num_examples, 2)).astype(np.float32)),
            "ins_id": Strings.encode([str(i) for i in range(num_examples)]),
        }
        yield Batch(columns, Bags(("a", "b"), ids, offsets))


@contextmanager
def new_cluster() -> Iterator[Cluster]:
    with embedded(threads=1) as cluster:
        set_default(cluster)
        yield cluster


def train(strategy: tr.Strategy, folder: Path) -> tuple[Any, ...]:
    """What training leaves: figures, rows, parameters and buffers."""
    with new_cluster() as cluster:
        model = Model()
        trainer = tr.Trainer(
            model,
            torch.optim.Adam(model.parameters(), 0.01),
            strategy=strategy,
            loss=nn.functional.binary_cross_entropy_with_logits,
            metrics=[tr.metrics.AUC()],
            progress=False,
        )
        fitted = trainer.fit(list(batches()))
        evaluated = trainer.evaluate(list(batches(3)))
        trainer.save(folder / "checkpoint")
        pulled = cluster.client.pull({model.table.class_id: np.arange(30, dtype=np.uint64)})
        rows = pulled.rows[model.table.class_id].tolist()
        state = {name: t.tolist() for name, t in model.state_dict().items()}
        for figures in (fitted, evaluated):
            del figures["examples_per_s"]
        return fitted, evaluated, rows, state


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_a_model_elsewhere(
    mode: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    expected = train(MODES[mode], tmp_path / "near")
    link = request.getfixturevalue("link")
    actual = train(MODES[mode], tmp_path / "far")
    assert link.num_sent > 0
    assert link.num_returned > 0
    if mode in REPEATABLE:
        assert actual == expected
    for one, other in zip(actual[:2], expected[:2], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=0.1)


@pytest.mark.parametrize("prefetches", [False, True])
def test_a_plain_loop_trains_a_model_elsewhere(
    prefetches: bool, request: pytest.FixtureRequest
) -> None:
    def run(is_far: bool) -> list[list[float]]:
        with new_cluster() as cluster:
            model = Model()
            inner = torch.optim.SGD(model.parameters(), 0.1)
            optimizer = tr.DistributedOptimizer(inner, model, strategy=tr.Strategy("sync"))
            source = list(batches())
            for batch in tr.prefetch(source, model) if prefetches else source:
                if is_far and not prefetches:  # the user moves the batch
                    batch = batch._map(lambda t: t if t.dtype == torch.uint8 else far(t))
                optimizer.zero_grad()
                nn.functional.mse_loss(model(batch), batch["label"]).backward()
                optimizer.step()
            pulled = cluster.client.pull({model.table.class_id: np.arange(30, dtype=np.uint64)})
            return pulled.rows[model.table.class_id].tolist()

    expected = run(False)
    request.getfixturevalue("link")
    assert run(True) == expected


def test_an_exported_model_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    assert exporter._on_host(model, (model.table,)) is model
    monkeypatch.setattr(exporter, "device_of", lambda _: torch.device("meta"))
    copied = exporter._on_host(model, (model.table,))
    assert copied is not model
    assert copied.table is model.table
    assert torch.equal(copied.top[1].weight, model.top[1].weight)


# ---- which device ----


def test_rows_go_where_the_model_goes() -> None:
    with new_cluster():
        model = Model()
        assert device_of(model) == torch.device("cpu")
        model.to("meta")
        assert device_of(model) == torch.device("meta")
        assert model.half().emb.rows_device == torch.device("meta")
        model.seq.to_empty(device="cpu")
        with pytest.raises(BadRequest, match="expected one device, found cpu, meta"):
            device_of(model)
        assert device_of(nn.Linear(1, 1)) == torch.device("cpu")


def test_a_link_to_the_cpu_leaves_tensors_where_they_are() -> None:
    link, tensor = accelerator.link_to(torch.device("cpu")), torch.ones(3)
    assert link.is_host
    assert link.send([tensor]).receive()[0] is tensor
    assert accelerator.to_host([tensor])[0] is tensor


def test_gradients_are_summed_on_the_cpu_or_a_gpu_alone() -> None:
    assert not accelerator.reduces_by_nccl(torch.device("cpu"))
    with pytest.raises(BadRequest, match="expected tensors on cpu or cuda, found meta"):
        accelerator.reduces_by_nccl(torch.device("meta"))


@pytest.mark.gpu
def test_tensors_come_back_from_a_gpu() -> None:
    device = accelerator.device_of_label("gpu", {})
    link = accelerator.link_to(device)
    tensors = [torch.randn(1000, 7), torch.arange(5, dtype=torch.int32), torch.empty(0)]
    moved = link.send(tensors).receive()
    assert all(tensor.device.type == device.type for tensor in moved)
    back = accelerator.to_host([tensor * 2 for tensor in moved])
    for tensor, other in zip(tensors, back, strict=True):
        assert torch.equal(tensor * 2, other)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_a_model_on_a_gpu(mode: str, tmp_path: Path) -> None:
    with new_cluster() as cluster:
        model = Model().to(cluster.device("gpu"))
        trainer = tr.Trainer(
            model,
            torch.optim.Adam(model.parameters(), 0.01),
            strategy=MODES[mode],
            loss=nn.functional.binary_cross_entropy_with_logits,
            metrics=[tr.metrics.AUC()],
            progress=False,
        )
        trainer.fit(list(batches()))
        figures = trainer.evaluate(list(batches(3)))
    reference = train(MODES[mode], tmp_path)[1]
    assert figures["loss"] == pytest.approx(reference["loss"], rel=0.05)


def test_a_label_stands_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert accelerator.device_of_label("cpu", {}) == cpu
    assert accelerator.device_of_label("gpu", {"gpu": "cpu"}) == cpu
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadRequest, match="TRIREME_DEVICE_GPU=cpu"):
        accelerator.device_of_label("gpu", {})
    with pytest.raises(BadRequest, match="expected a label"):
        accelerator.device_of_label("tpu", {})
    with pytest.raises(BadRequest, match="expected a device of torch for gpu, found 'vector'"):
        accelerator.device_of_label("gpu", {"gpu": "vector"})


def test_the_environment_lets_the_cpu_stand_in_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIREME_DEVICE_GPU", "cpu")
    with tr.init() as cluster:
        assert cluster.device("gpu") == torch.device("cpu")
