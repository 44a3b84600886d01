"""The custom operators: every kernel, under torch.compile and under torch.export."""

import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.long import sampled
from tests.tables import T_ROWS
from trireme import _core
from trireme.data import Bags, Batch
from trireme.nn import EmbeddingBag, Lookup, Planner, gather_rows, op
from trireme.nn.lookup import gather
from trireme.table import Table

B, F, D = 12, 3, 9
NAMES = ("a", "b", "c")


def random_batch(seed, *, num_examples=B, is_ragged=True):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.ones(F * num_examples, dtype=torch.int64)
    if is_ragged:
        sizes = torch.randint(0, 4, sizes.shape, generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    values = torch.randint(0, 50, (int(offsets[-1]),), generator=generator)
    weights = torch.randn(len(values), generator=generator) if is_ragged else None
    dense = torch.randn(num_examples, 4, generator=generator)
    return Batch({"dense": dense}, Bags(NAMES, values, offsets, weights))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = EmbeddingBag(Table("t", dim=D), features=NAMES, padding_key=0)
        self.mlp = nn.Sequential(nn.Linear(F * D + 4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch):
        return self.mlp(torch.cat([self.emb(batch).flatten(1), batch["dense"]], 1)).squeeze(1)


def attach(model, batch, *, train):
    plan = Planner(model, pool=_core.Pool(1)).plan(batch)
    rows = torch.randn(len(plan.tables[0].keys), D, generator=torch.Generator().manual_seed(7))
    return plan.attach(batch, {T_ROWS: rows}, train=train)[T_ROWS]


def random_lookup(*, is_ragged, is_weighted, seed=0):
    batch = random_batch(seed, is_ragged=is_ragged)
    attach(Model(), batch, train=True)
    [lookup] = batch.lookups.values()
    weights = torch.randn(len(lookup.index)) if is_weighted else torch.empty(0)
    return lookup._replace(weights=weights)


POOL = _core.Pool(2)
KINDS = [(False, False), (False, True), (True, False), (True, True)]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("is_ragged", "is_weighted"), KINDS)
def test_the_operators_keep_torchs_contract(is_ragged, is_weighted):
    lookup = random_lookup(is_ragged=is_ragged, is_weighted=is_weighted)
    torch.library.opcheck(torch.ops.trireme.gather_rows.default, (*lookup, B, F))
    args = (torch.randn(B, F, D), lookup.order, lookup.starts, lookup.bags, lookup.weights)
    torch.library.opcheck(torch.ops.trireme.scatter_rows.default, (*args, len(lookup.rows)))


@pytest.mark.parametrize(("is_ragged", "is_weighted"), KINDS)
def test_torchs_kernels_equal_the_cores(is_ragged, is_weighted):
    lookup = random_lookup(is_ragged=is_ragged, is_weighted=is_weighted)
    actual = op._gather_torch(lookup, B, F, POOL)
    assert torch.equal(actual, gather(lookup, B, F, POOL))
    assert actual.is_contiguous()
    args = (lookup.order, lookup.starts, lookup.bags, lookup.weights, len(lookup.rows), POOL)
    grad = torch.randn(B, F, D)
    assert torch.equal(op._scatter_torch(grad, *args), op._scatter_core(grad, *args))


def test_gradients_of_any_layout_are_read_right():
    lookup = random_lookup(is_ragged=True, is_weighted=False)
    args = (lookup.order, lookup.starts, lookup.bags, lookup.weights, len(lookup.rows), POOL)
    grad = torch.randn(B, F, D)
    expected = op._scatter_core(grad, *args)
    wide = torch.randn(B, F * D + 6)
    wide[:, 2:-4] = grad.flatten(1)
    slice_of_wide = wide[:, 2:-4].view(B, F, D)
    assert op._readable(slice_of_wide).data_ptr() == slice_of_wide.data_ptr()
    for layout in (slice_of_wide, grad.transpose(0, 2).contiguous().transpose(0, 2)):
        assert torch.equal(op._scatter_core(layout, *args), expected)
    ones = torch.ones(1, 1, 1).expand(B, F, D)
    assert torch.equal(op._scatter_core(ones, *args), op._scatter_core(ones.contiguous(), *args))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.timeout(300)  # the C++ compiler may wait for its turn
@sampled(keep=2)
@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_planned_model_compiles_to_one_graph(is_ragged, backend):
    torch._dynamo.reset()
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for seed in range(3):  # batches differ in their number of ids and of keys
        batch = random_batch(seed, is_ragged=is_ragged)
        leaf = attach(model, batch, train=True)
        model.zero_grad()
        expected = model(batch)
        expected.sum().backward()
        expected_grads = [leaf.grad, *(p.grad.clone() for p in model.parameters())]
        leaf.grad = None
        model.zero_grad()
        actual = compiled(batch)
        actual.sum().backward()
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(
            [leaf.grad, *(p.grad for p in model.parameters())], expected_grads
        )
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(batch), model(batch))


@pytest.mark.parametrize("is_ragged", [False, True])
def test_a_planned_model_is_exported_and_serves_other_batches(is_ragged):
    model = Model().eval()
    batch = random_batch(0, is_ragged=is_ragged)
    attach(model, batch, train=False)
    shapes = torch.export.ShapesCollection()
    for tensor in torch.utils._pytree.tree_leaves(batch):
        if tensor is not None and tensor.numel() > 0:
            shapes[tensor] = [Dim.AUTO] + [Dim.STATIC] * (tensor.dim() - 1)
    exported = torch.export.export(model, (batch,), dynamic_shapes=shapes)
    assert any("trireme.gather_rows" in str(node.target) for node in exported.graph.nodes)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for seed, num_examples in ((1, B), (2, 5 * B)):
        batch = random_batch(seed, num_examples=num_examples, is_ragged=is_ragged)
        attach(model, batch, train=False)
        torch.testing.assert_close(loaded(batch), model(batch))


def test_the_output_is_ready_for_the_mlp_without_a_copy():
    lookup = random_lookup(is_ragged=False, is_weighted=False)
    out = gather_rows(lookup, B, F)
    assert out.flatten(1).data_ptr() == out.data_ptr()
    assert np.prod(out.shape) == B * F * D
    assert isinstance(lookup, Lookup)
