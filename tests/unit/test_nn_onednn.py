"""Products by oneDNN: the values of torch's own, for every input that a layer may get."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trireme as tr
import trireme.nn.onednn as onednn_module
from trireme.commands import cli
from trireme.errors import BadRequest
from trireme.inference import Predictor
from trireme.inference.export import export_model
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded


def both(in_features: int, out_features: int, *, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """Two layers with the same weights: torch's, and one by oneDNN."""
    torch.manual_seed(1)
    plain = nn.Linear(in_features, out_features, bias=bias)
    return plain, tr.nn.use_onednn(copy.deepcopy(plain))


def passed(layer: nn.Linear, x: Tensor, weights: Tensor) -> list[Tensor | None]:
    """The output, and the gradients of input, weight and bias."""
    x = x.detach().clone().requires_grad_()
    output = layer(x)
    (output * weights).sum().backward()
    bias = None if layer.bias is None else layer.bias.grad
    return [output.detach(), x.grad, layer.weight.grad, bias]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "shape", [(512, 100), (709, 100), (8, 64, 100), (100,), (0, 100), (3, 100)]
)
def test_values_and_gradients_are_those_of_torch(shape: tuple[int, ...], bias: bool) -> None:
    plain, onednn = both(100, 64, bias=bias)
    x, weights = torch.randn(shape), torch.randn(*shape[:-1], 64)
    for expected, actual in zip(passed(plain, x, weights), passed(onednn, x, weights), strict=True):
        if expected is None:
            assert actual is None
        else:
            assert actual is not None
            assert actual.shape == expected.shape
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shape of the first factor of each product that oneDNN has computed."""
    shapes: list[torch.Size] = []
    multiply = onednn_module._product

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.append(x.shape)
        return multiply(x, weight, bias)

    monkeypatch.setattr(onednn_module, "_product", noted)
    return shapes


def test_it_is_onednn_that_multiplies(shapes: list[torch.Size]) -> None:
    _, onednn = both(100, 64)
    passed(onednn, torch.randn(512, 100), torch.ones(512, 64))
    assert shapes == [(512, 100), (512, 64), (64, 512)]
    passed(onednn, torch.randn(4, 100), torch.ones(4, 64))
    assert len(shapes) == 3, "a small product is left to torch"


def test_inputs_of_many_sizes_have_few_shapes(shapes: list[torch.Size]) -> None:
    """Each shape costs oneDNN milliseconds and a megabyte."""
    plain, onednn = both(100, 64)
    with torch.no_grad():
        for num_rows in range(512, 1024, 3):
            x = torch.randn(num_rows, 100)
            torch.testing.assert_close(onednn(x), plain(x), rtol=1e-4, atol=1e-3)
    assert len(set(shapes)) == 9
    assert max(shape[0] for shape in shapes) == 1024


def test_inputs_of_any_strides() -> None:
    plain, onednn = both(100, 64)
    x = torch.randn(100, 512).t()
    ones = torch.ones(1, 1).expand(512, 64)  # a gradient with strides of 0
    for expected, actual in zip(passed(plain, x, ones), passed(onednn, x, ones), strict=True):
        assert expected is not None
        assert actual is not None
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(onednn(x), plain(x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parameters_get_no_gradient(frozen: str) -> None:
    _, onednn = both(100, 64)
    getattr(onednn, frozen).requires_grad_(False)
    onednn(torch.randn(512, 100)).sum().backward()
    assert (onednn.weight.grad is None) == (frozen == "weight")
    assert (onednn.bias.grad is None) == (frozen == "bias")


def test_autocast_and_other_types_are_torchs() -> None:
    plain, onednn = both(100, 64)
    x = torch.randn(512, 100)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(onednn(x), plain(x))
    plain, onednn = plain.double(), onednn.double()
    assert torch.equal(onednn(x.double()), plain(x.double()))
    with pytest.raises(RuntimeError):
        onednn(x)
    with pytest.raises(RuntimeError, match="shape"):
        onednn.float()(torch.randn(512, 99))


def test_gradients_of_gradients_are_refused() -> None:
    _, onednn = both(100, 64)
    x = torch.randn(512, 100, requires_grad=True)
    (gradient,) = torch.autograd.grad(onednn(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()  # type: ignore[no-untyped-call]


def test_a_model_stays_what_it_was() -> None:
    model = nn.Sequential(nn.Linear(100, 64), nn.ReLU(), nn.Linear(64, 2))
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    assert tr.nn.use_onednn(tr.nn.use_onednn(model)) is model
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
    x = torch.randn(512, 100)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(x), model(x))
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x), rtol=1e-4, atol=1e-3)


def test_graphs_are_those_of_torch() -> None:
    """Also for batches of any size: the size from which oneDNN is used is no part of them."""
    _, onednn = both(100, 64)
    x = torch.randn(512, 100)
    sizes = ({0: torch.export.Dim("batch", min=2)},)
    exported = torch.export.export(onednn, (x,), dynamic_shapes=sizes).module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)  # what torch 2.14 makes of it
        traced = torch.jit.trace(onednn, x)  # type: ignore[no-untyped-call]
    for graph in (exported, traced):
        for num in (3, 512, 1000):
            y = torch.randn(num, 100)
            torch.testing.assert_close(graph(y), onednn(y), rtol=1e-4, atol=1e-3)


def test_inputs_that_are_no_plain_tensors_of_the_cpu_are_torchs() -> None:
    plain, onednn = both(100, 64)
    x = torch.randn(512, 100)
    assert torch.equal(onednn(x.to_sparse()), plain(x.to_sparse()))
    with pytest.raises(RuntimeError, match="device"):
        onednn.to("meta")(x)


def test_what_it_cannot_change_is_refused() -> None:
    with pytest.raises(
        BadRequest, match=r"expected a model with layers torch.nn.Linear, found none"
    ):
        tr.nn.use_onednn(nn.Sequential(nn.ReLU()))
    attention = nn.MultiheadAttention(8, 2)
    with pytest.raises(BadRequest, match="found none in MultiheadAttention"):
        tr.nn.use_onednn(attention)


class Clicks(nn.Module):
    """Two ids and eight numbers through an MLP of 512."""

    def __init__(self) -> None:
        super().__init__()
        table = tr.Table("ids", dim=8, optimizer=tr.optim.Adagrad(lr=0.1), seed=1)
        self.ids = tr.nn.EmbeddingBag(table, features=["a", "b"])
        self.hidden, self.head = nn.Linear(24, 512), nn.Linear(512, 1)

    def forward(self, batch: Any) -> Tensor:
        inputs = torch.cat([self.ids(batch).flatten(1), batch["x"]], 1)
        logits: Tensor = self.head(self.hidden(inputs).relu())
        return logits.squeeze(1)


def batches() -> list[dict[str, Tensor]]:
    """Four of 256 examples."""
    generator = torch.Generator().manual_seed(3)
    data = []
    for _ in range(4):
        a, b = (torch.randint(0, high, (256,), generator=generator) for high in (50, 9))
        x = torch.randn(256, 8, generator=generator)
        data.append({"a": a, "b": b, "x": x, "label": (a % 2).float()})
    return data


def trainer_of(cluster: Cluster, *, use: bool, kind: type[nn.Module] = Clicks) -> tr.Trainer:
    torch.manual_seed(2)
    model = kind()
    if use:
        tr.nn.use_onednn(model)
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), 1e-2),
        strategy=tr.Strategy("sync"),
        loss=nn.functional.binary_cross_entropy_with_logits,
        cluster=cluster,
        progress=False,
    )


def trained(*, use: bool) -> tuple[Tensor, float]:
    """The first dense weights after three epochs, and the loss then."""
    with embedded() as cluster:
        trainer = trainer_of(cluster, use=use)
        trainer.fit(batches(), epochs=3)
        return trainer.model.hidden.weight.detach(), trainer.evaluate(batches())["loss"]


def test_a_model_trains_as_with_torchs_products() -> None:
    weights, loss = trained(use=False)
    others, other_loss = trained(use=True)
    assert other_loss == pytest.approx(loss, rel=1e-3)
    torch.testing.assert_close(others, weights, rtol=1e-2, atol=1e-3)


def test_a_predictor_gives_the_bits_of_the_trainer(
    shapes: list[torch.Size], tmp_path: Path
) -> None:
    with embedded() as cluster:
        trainer = trainer_of(cluster, use=True)
        example = batches()[0]
        trainer.fit(batches())
        export_model(trainer, tmp_path / "base", batch=example)
        before = trainer.predict([example])["output"]
        trainer.fit(batches())
        export_model(trainer, tmp_path / "delta", batch=example, follows=tmp_path / "base")
        after = trainer.predict([example])["output"]
    predictor = Predictor(tmp_path / "base", use_onednn=True)
    shapes.clear()
    assert torch.equal(predictor.predict(example).outputs["output"], before)
    predictor.apply(tmp_path / "delta")
    assert torch.equal(predictor.predict(example).outputs["output"], after)
    assert shapes == [(256, 24)] * 2, "the head's product is small"


class InFloat32(Clicks):
    """Under autocast it computes as without."""

    def forward(self, batch: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(batch)


def test_a_predictor_computes_blocks_with_another_autocast_too(
    shapes: list[torch.Size], tmp_path: Path
) -> None:
    """torch.export makes a program of its own of each."""
    with embedded() as cluster:
        trainer = trainer_of(cluster, use=True, kind=InFloat32)
        trainer.fit(batches())
        example = batches()[0]
        export_model(trainer, tmp_path / "base", batch=example)
        before = trainer.predict([example])["output"]
    predictor = Predictor(tmp_path / "base", use_onednn=True)
    shapes.clear()
    assert torch.equal(predictor.predict(example).outputs["output"], before)
    assert shapes == [(256, 24)]


def test_a_predictor_without_a_product_for_onednn_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with embedded() as cluster:
        trainer = trainer_of(cluster, use=False)
        trainer.fit(batches())
        rows = trainer.model.ids
        export_model(trainer, tmp_path / "rows", batch=batches()[0], model=rows)
    with pytest.raises(BadRequest, match=r"expected a model with layers torch.nn.Linear"):
        Predictor(tmp_path / "rows", use_onednn=True)
    argv = ["predict", "-m", str(tmp_path / "rows"), "--format", "csv", "--input", "a.csv"]
    assert cli.main([*argv, "--output", "scores.tsv", "--use_onednn"]) == 2
    assert "expected a model with layers torch.nn.Linear" in capsys.readouterr().err
