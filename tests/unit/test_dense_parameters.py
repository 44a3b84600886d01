"""Dense parameters of a worker: cut into blocks, divided among servers, and installed again."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from trireme.errors import BadRequest
from trireme.job.embedded import embedded
from trireme.protocol.routing import BucketMap
from trireme.worker.dense_parameters import DenseParameters

SIZES = {"top.weight": (40, 5), "top.bias": (40,), "scale": (), "wide": (3, 100)}


def parameters_and_map(num_servers: int) -> tuple[DenseParameters, BucketMap]:
    torch.manual_seed(7)
    parameters = {name: (nn.Parameter(torch.randn(size)), 0) for name, size in SIZES.items()}
    dense = DenseParameters(parameters, 64)
    servers = tuple(f"server:{i}" for i in range(num_servers))
    return dense, BucketMap.even(servers).with_blocks([spec.id for spec in dense.specs])


def expected(dense: DenseParameters, block_ids: list[str], tensors: dict[str, torch.Tensor]):
    pieces = [
        tensors[spec.param].reshape(-1)[spec.start : spec.start + spec.size]
        for spec in dense.specs_of(block_ids)
    ]
    return torch.cat(pieces).numpy()


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_every_server_gets_the_gradients_of_its_blocks_in_their_order(num_servers: int) -> None:
    dense, bucket_map = parameters_and_map(num_servers)
    for _ in range(2):  # of two steps
        tensors = {name: torch.randn(size) for name, size in SIZES.items()}
        flat = dense.flat_gradients({**tensors, "top.bias": None})
        tensors["top.bias"].zero_()
        for server in range(num_servers):
            block_ids = list(bucket_map.blocks_of(server))
            assert list(dense.blocks_of(bucket_map, server)) == block_ids
            part = dense.of_blocks(flat, bucket_map.blocks_of(server))
            np.testing.assert_array_equal(part, expected(dense, block_ids, tensors))
            params = [spec.param for spec in dense.specs_of(block_ids)]
            assert dense.parameters_of(block_ids) == list(dict.fromkeys(params))


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_weights_are_installed_wherever_the_parameters_lie(num_servers: int) -> None:
    dense, bucket_map = parameters_and_map(num_servers)
    seen = {name: p.data for name, p in dense.parameters.items()}
    for round_number in range(3):
        if (
            round_number == 1
        ):  # as a user's own load_state_dict(assign=True), or another dtype and back
            for parameter in dense.parameters.values():
                parameter.data = torch.zeros(parameter.shape)
        tensors = {name: torch.randn(size) for name, size in SIZES.items()}
        for server in range(num_servers):
            block_ids = bucket_map.blocks_of(server)
            values = expected(dense, list(block_ids), tensors)
            values.flags.writeable = False
            dense.install(block_ids, values)
        for name, parameter in dense.parameters.items():
            assert torch.equal(parameter, tensors[name]), name
        if round_number == 0:
            before = {name: p.clone() for name, p in seen.items()}
    assert all(torch.equal(seen[name], before[name]) for name in seen)


def test_weights_of_another_size_are_refused() -> None:
    dense, bucket_map = parameters_and_map(1)
    block_ids = bucket_map.blocks_of(0)
    with pytest.raises(BadRequest, match="expected 541 elements, found 540"):
        dense.install(block_ids, np.zeros(540, np.float32))


def test_values_are_a_copy() -> None:
    dense, bucket_map = parameters_and_map(1)
    values = dense.values(bucket_map.blocks_of(0))
    before = values.copy()
    for parameter in dense.parameters.values():
        parameter.data.zero_()
    np.testing.assert_array_equal(values, before)


@pytest.mark.parametrize("mode", ["sync", "async", "bounded", "geo", "hybrid"])
def test_weights_that_a_script_sets_too_late_are_named(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The servers have others by then, which come with the next step."""
    options = {"bounded": {"staleness": 2}, "geo": {"k": 2}}.get(mode, {})
    batch = {"a": torch.tensor([1, 2, 3])}
    with embedded(threads=1) as cluster:
        rows = tr.nn.EmbeddingBag(tr.Table("emb", dim=2, optimizer=tr.optim.SGD(lr=0.1)), ["a"])
        model = nn.ModuleList([rows, nn.Linear(2, 1)])
        optimizer = tr.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.1),
            model,
            strategy=tr.Strategy(mode, **options),
            cluster=cluster,
        )

        def step() -> None:
            optimizer.zero_grad()
            model[1](rows(batch).flatten(1)).sum().backward()
            optimizer.step(examples=3)

        for _ in range(3):
            step()
        optimizer.refresh()
        weights = copy.deepcopy(model[1].state_dict())
        nn.init.ones_(model[1].weight)  # as an evaluation with averaged weights does
        model[1].load_state_dict(weights)
        if mode != "geo":  # where the worker has trained them since they came
            step()
            optimizer.refresh()
        assert "are lost" not in caplog.text
        nn.init.ones_(model[1].weight)
        for _ in range(3):
            step()
        optimizer.refresh()
    names = re.findall(r"weights of (\S+) were set in this process, and are lost", caplog.text)
    assert names == ([] if mode == "hybrid" else ["1.weight"])  # hybrid trains them here
