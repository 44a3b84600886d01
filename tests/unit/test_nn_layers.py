"""Pooling, CVM and data_norm: values and gradients against their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.test_nn import D, attached_rows, random_batch
from trireme.errors import BadRequest
from trireme.nn import CVM, DataNorm, Embedding, EmbeddingBag, sequence_pad, sequence_pool
from trireme.table import Table


def pooled(rows: torch.Tensor, offsets: torch.Tensor, mode: str) -> torch.Tensor:
    """The plain definition, bag by bag."""
    out = []
    for begin, end in zip(offsets[:-1] - offsets[0], offsets[1:] - offsets[0], strict=True):
        bag = rows[begin:end]
        n = max(len(bag), 1)
        out.append(bag.sum(0) / {"sum": 1, "mean": n, "sqrt": n**0.5}[mode])
    return torch.stack(out)


@pytest.mark.parametrize("mode", ["sum", "mean", "sqrt"])
def test_sequence_pool_adds_the_rows_of_each_bag(mode: str) -> None:
    torch.manual_seed(0)
    offsets = torch.tensor([4, 4, 7, 8, 8, 14])
    rows = torch.randn(10, D, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(sequence_pool(rows, offsets, mode), pooled(rows, offsets, mode))
    assert torch.autograd.gradcheck(lambda rows: sequence_pool(rows, offsets, mode), rows)
    assert sequence_pool(torch.empty(0, D), torch.zeros(1, dtype=torch.int64)).shape == (0, D)


@pytest.mark.parametrize("padding_key", [None, 3])
@pytest.mark.parametrize("mode", ["sum", "mean", "sqrt"])
def test_embedding_bag_is_embedding_and_pool_in_one(mode: str, padding_key: int | None) -> None:
    batch = random_batch(1, names=("a",))
    table = Table("t", dim=D)
    one = EmbeddingBag(table, features="a", mode=mode, padding_key=padding_key)
    two = Embedding(table, features="a", padding_key=padding_key)
    torch.manual_seed(0)
    grad = torch.randn(40, D)
    actual = []
    for module in (one, two):
        leaf = attached_rows(module, batch)
        out = module(batch)
        if module is one:
            out = out[:, 0]
        else:
            ids, offsets = batch["a"].values, batch["a"].offsets
            if padding_key is not None:  # which does not count in a bag's size
                assert out[ids == padding_key].eq(0).all()
                kept = torch.nn.functional.pad((ids != padding_key).cumsum(0), (1, 0))
                out, offsets = out[ids != padding_key], kept[offsets]
            out = sequence_pool(out, offsets, mode)
        out.backward(grad)
        actual.append((out, leaf.grad))
    torch.testing.assert_close(*actual)


@pytest.mark.parametrize(
    ("rows", "offsets", "mode", "message"),
    [
        ((3, 2), [0, 3], "average", "one of sum, mean, sqrt, found 'average'"),
        ((3,), [0, 3], "sum", r"found \(3,\) and torch.int64 \(2,\)"),
        ((3, 2), [0, 2], "sum", "over 3 rows that do not decrease, found 2 rows"),
        ((3, 2), [0, 4, 3], "sum", "found 3 rows and a smallest step of -1"),
        ((3, 2), [], "sum", r"\(B \+ 1,\), found \(3, 2\) and torch.int64 \(0,\)"),
    ],
)
def test_values_that_cannot_be_pooled_are_refused(
    rows: tuple[int, ...], offsets: list[int], mode: str, message: str
) -> None:
    with pytest.raises(BadRequest, match=f"sequence_pool: .*{message}"):
        sequence_pool(torch.zeros(rows), torch.tensor(offsets, dtype=torch.int64), mode)


@pytest.mark.parametrize("side", ["right", "left"])
def test_sequence_pad_gives_the_last_rows_of_each_bag(side: str) -> None:
    offsets = torch.tensor([4, 4, 7, 8, 8, 14])
    rows = torch.randn(10, D, dtype=torch.float64, requires_grad=True)
    padded, is_there = sequence_pad(rows, offsets, 4, padding_side=side)
    assert padded.shape == (5, 4, D)
    for bag, (begin, end) in enumerate(zip(offsets - 4, offsets[1:] - 4, strict=False)):
        assert padded[bag][is_there[bag]].equal(rows[max(begin, end - 4) : end])
        assert not padded[bag][~is_there[bag]].any()
        size = min(int(end - begin), 4)
        places = range(size) if side == "right" else range(4 - size, 4)
        assert is_there[bag].nonzero().flatten().tolist() == list(places)
    assert torch.autograd.gradcheck(
        lambda r: sequence_pad(r, offsets, 4, padding_side=side)[0], rows
    )
    nothing = sequence_pad(torch.empty(0, D), torch.zeros(1, dtype=torch.int64), 4)
    assert nothing[0].shape == (0, 4, D)
    with pytest.raises(
        BadRequest, match=r"sequence_pad: expected length as an integer >= 1, found 0"
    ):
        sequence_pad(rows, offsets, 0)
    with pytest.raises(BadRequest, match="sequence_pad: expected offsets over 10 rows"):
        sequence_pad(rows, offsets[2:], 4)


# ---- CVM ----


@pytest.mark.parametrize("shape", [(6, 5), (6, 3, 5), (6, 2)])
def test_cvm_takes_logarithms_of_the_counts_and_gives_counts_as_their_gradient(
    shape: tuple[int, ...],
) -> None:
    torch.manual_seed(1)
    values = torch.rand(shape, dtype=torch.float64).mul(9).requires_grad_()
    show_click = torch.randint(0, 9, (6, 2))
    show, click, rest = values[..., 0], values[..., 1], values[..., 2:]
    expected = {
        True: torch.cat(
            [torch.stack([(show + 1).log(), ((click + 1) / (show + 1)).log()], -1), rest], -1
        ),
        False: rest,
    }
    for use_cvm, formula in expected.items():
        out = CVM(use_cvm)(values, show_click)
        torch.testing.assert_close(out, formula)
        grad = torch.randn(out.shape, dtype=torch.float64)
        [actual] = torch.autograd.grad(out, values, grad)
        counts = show_click.double().view(6, *[1] * (len(shape) - 2), 2)
        torch.testing.assert_close(actual[..., :2], counts.expand(*shape[:-1], 2))
        torch.testing.assert_close(actual[..., 2:], grad[..., 2:] if use_cvm else grad)
        [alone] = torch.autograd.grad(CVM(use_cvm)(values), values, grad)
        assert not alone[..., :2].any()
        torch.testing.assert_close(alone[..., 2:], actual[..., 2:])


@pytest.mark.parametrize(
    ("values", "counts"), [((3, 1), (3, 2)), ((3, 4), (2, 2)), ((3, 4), (3,)), ((4,), (4, 2))]
)
def test_cvm_refuses_shapes_that_do_not_fit(
    values: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    with pytest.raises(BadRequest, match=r"CVM: expected values of shape \(B, D\) or .* found"):
        CVM()(torch.zeros(values), torch.zeros(counts))


# ---- data_norm ----


def test_data_norm_follows_its_formulas_over_many_batches() -> None:
    rng = np.random.default_rng(2)
    module = DataNorm(3, decay=0.99, size=10.0, total=2.0, square_total=30.0)
    size, total, square = np.full(3, 10.0), np.full(3, 2.0), np.full(3, 30.0)
    for _ in range(20):
        x = rng.normal([1, -5, 100], [1, 3, 0.1], (rng.integers(0, 40), 3))
        mean, scale = total / size, np.sqrt(size / square)
        tensor = torch.from_numpy(x).requires_grad_()
        out = module(tensor)
        np.testing.assert_allclose(out.detach(), (x - mean) * scale, rtol=1e-12, atol=1e-12)
        out.sum().backward()
        np.testing.assert_allclose(tensor.grad, np.broadcast_to(scale, x.shape))
        size = size * 0.99 + len(x)
        total = total * 0.99 + x.sum(0)
        square = square * 0.99 + ((x - mean) ** 2).sum(0) + len(x) * 1e-5
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module.eval()(torch.randn(5, 3))
    for name, expected in (("size", size), ("total", total), ("square_total", square)):
        np.testing.assert_allclose(module.state_dict()[name], expected, rtol=1e-12)
        assert torch.equal(module.state_dict()[name], before[name]), "evaluation adds nothing"
    assert module(torch.randn(5, 3)).dtype == torch.float32


def test_data_norm_begins_as_paddles_does() -> None:
    x = torch.tensor([[3.0, -1.0]])
    module = DataNorm(2)
    assert torch.equal(module(x), x), "mean 0 and scale 1"
    assert module.size.tolist() == [1e4 * 0.999999 + 1] * 2
    assert module.total.tolist() == [3.0, -1.0]
    assert module.square_total[0].item() == pytest.approx(1e4 * 0.999999 + 9 + 1e-5)
    with pytest.raises(BadRequest, match=r"expected \(B, 2\), found \(2,\)"):
        module(x[0])
    for options in ({"num_features": 0}, {"num_features": 1, "decay": 0}):
        with pytest.raises(BadRequest, match="DataNorm: expected"):
            DataNorm(**options)  # type: ignore[arg-type]


class _Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.cvm = DataNorm(3), CVM()

    def forward(self, x: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.norm(x).sum() + self.cvm(v, v[:, :2]).sum() + sequence_pool(v, offsets).sum()


def test_the_layers_can_be_exported() -> None:
    model = _Layers().eval()
    arguments = torch.randn(4, 3), torch.rand(4, 5), torch.tensor([0, 1, 1, 4])
    exported = torch.export.export(model, arguments)
    torch.testing.assert_close(exported.module()(*arguments), model(*arguments))
