"""The embedding modules and layers under torch.autocast, beside torch's own, and who refuses it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.test_nn import D, attached_rows, random_batch
from trireme import accelerator
from trireme.data import Batch
from trireme.errors import BadRequest
from trireme.nn import CVM, DataNorm, Embedding, EmbeddingBag, sequence_pool
from trireme.table import Table
from trireme.train.loop.scoring import Scorer

HALF = torch.bfloat16


def in_half() -> torch.autocast:
    return torch.autocast("cpu", HALF)


@pytest.mark.parametrize("mode", ["sum", "mean", None])
def test_rows_and_their_gradients_are_those_of_torchs_embedding(mode: str | None) -> None:
    """float32, as torch's are; what follows makes 16 bits of them, once."""
    batch, table = random_batch(1, names=("a",)), Table("t", dim=D)
    own: Any = Embedding(table, "a") if mode is None else EmbeddingBag(table, "a", mode=mode)
    leaf = attached_rows(own, batch)
    [lookup] = batch.lookups.values()
    ids, offsets = lookup.index.long(), batch["a"].offsets
    torch.manual_seed(0)
    top = nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, 1))
    with in_half():
        rows = own(batch)
        out = top(rows)
    assert (rows.dtype, out.dtype) == (torch.float32, HALF)
    out.float().square().sum().backward()
    plain = leaf.detach().clone().requires_grad_()
    weights = [parameter.grad for parameter in top.parameters()]
    top.zero_grad()
    with in_half():
        if mode is None:
            expected = nn.functional.embedding(ids, plain)
        else:
            bags = nn.functional.embedding_bag(
                ids, plain, offsets, mode=mode, include_last_offset=True
            )
            expected = bags[:, None]
        expected_out = top(expected)
    expected_out.float().square().sum().backward()
    torch.testing.assert_close(rows, expected)
    torch.testing.assert_close(out, expected_out)
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.float32
    torch.testing.assert_close(leaf.grad, plain.grad, rtol=2e-2, atol=1e-3)
    for actual, parameter in zip(weights, top.parameters(), strict=True):
        assert actual is not None
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, parameter.grad, rtol=2e-2, atol=1e-2)


def pool(values: Tensor) -> Tensor:
    return sequence_pool(values, torch.tensor([0, 1, 300, 300, 600]), "mean")


@pytest.mark.parametrize("layer", [pool, DataNorm(4), CVM(), CVM(use_cvm=False)])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_layers_keep_the_type_and_add_up_in_float32(layer: Any, dtype: torch.dtype) -> None:
    """Rounded once: sums of 300 rows of 16 bits would be far off."""
    values = torch.rand(600, 4).add(1).to(dtype).requires_grad_()
    other = copy.deepcopy(layer)  # DataNorm learns from what it has seen
    with in_half():
        out = layer(values)
    assert out.dtype == dtype
    expected = other(values.detach().float())
    if isinstance(layer, DataNorm):
        for buffer, other_buffer in zip(layer.buffers(), other.buffers(), strict=True):
            assert torch.equal(buffer, other_buffer)
    tolerance = 2**-7 if dtype == HALF else 1e-4
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    out.float().sum().backward()
    assert values.grad is not None
    assert values.grad.dtype == dtype


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(4, 1)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        out = self.top(batch["x"]).squeeze(1)
        return {"y": out, "number": torch.arange(len(out))}


def test_a_scorer_gives_float32_whatever_forward_computes_in() -> None:
    seen = []

    def loss(outputs: dict[str, Tensor], batch: Batch) -> Tensor:
        seen.append((outputs["y"].dtype, accelerator.is_in_autocast()))
        return outputs["y"].mean()

    model = Two()
    batch = Batch({"x": torch.randn(8, 4)})
    scored = Scorer(loss, None, HALF)(model, batch)
    assert seen == [(torch.float32, False)]
    assert (scored.outputs["y"].dtype, scored.outputs["number"].dtype) == (
        torch.float32,
        torch.int64,
    )
    assert torch.equal(scored.outputs["y"], scored.outputs["y"].to(HALF).float()), "computed in it"
    assert scored.loss is not None
    assert scored.loss.dtype == torch.float32
    with in_half():
        plain = model(batch)["y"].float()
    assert torch.equal(scored.outputs["y"], plain)
    full = Scorer(loss, None)(model, batch)
    assert not torch.equal(full.outputs["y"], plain)


def test_a_device_without_autocast_is_refused() -> None:
    with pytest.raises(BadRequest, match="torch has it for, found meta"):
        Scorer(None, None, HALF)(Two().to("meta"), Batch({}))
