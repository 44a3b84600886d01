"""What a byte that crosses a boundary costs the process at either end, beside the network."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from trireme.rpc import Reply, Request, RpcClient, Server
from trireme.train.compute.tensors import pack, unpack

TENSORS, TENSOR_BYTES = 16, 1 << 16
"""Of a message: about those of a batch and of the weights of a stage."""
WARM_UPS = 10
MEASURE_S = 1.0
_TIMEOUT_S = 60.0


def seconds_per_byte() -> float:
    """Of one end, for a byte sent or received: measured by calls between two threads of this
    process, over loopback. Each end also copies what it receives, as into the weights of a model,
    and what it sends, as outputs and gradients of a model are new tensors.
    """
    ours, answered = _tensors(), _tensors()

    def echo(request: Request) -> Reply:
        _copy(unpack(request.body["tensors"], request.arrays), answered)
        specs, arrays = pack([tensor.clone() for tensor in answered])
        return Reply({"tensors": specs}, arrays)

    with (
        Server("127.0.0.1:0", {"echo": echo}, name="place") as server,
        RpcClient(name="place") as client,
    ):

        def call() -> None:
            specs, arrays = pack([tensor.clone() for tensor in ours])
            body = {"tensors": specs}
            reply = client.call(server.endpoint, "echo", body, arrays, timeout_s=_TIMEOUT_S)
            _copy(unpack(reply.body["tensors"], reply.arrays), ours)

        for _ in range(WARM_UPS):
            call()
        started, cpu_before, num_calls = time.perf_counter(), time.process_time(), 0
        while (elapsed_s := time.perf_counter() - started) < MEASURE_S:
            call()
            num_calls += 1
        cores = max(1.0, (time.process_time() - cpu_before) / elapsed_s)  # that both ends kept busy
    return elapsed_s * cores / 2 / (2 * TENSORS * TENSOR_BYTES * num_calls)


def _tensors() -> list[Tensor]:
    return [torch.zeros(TENSOR_BYTES, dtype=torch.uint8) for _ in range(TENSORS)]


def _copy(received: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for target, tensor in zip(targets, received, strict=True):
        target.copy_(tensor)
