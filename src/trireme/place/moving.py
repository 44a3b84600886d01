"""What a byte that crosses a boundary costs the process at either end, beside the network."""

from __future__ import annotations

import time

import numpy as np

from trireme.rpc import Reply, Request, RpcClient, Server

MESSAGE_BYTES = 1 << 20  # about those of a batch
WARM_UPS = 10
MEASURE_S = 1.0
_TIMEOUT_S = 60.0


def seconds_per_byte() -> float:
    """Of one end, for a byte sent or received: measured by calls between two threads of this
    process, over loopback. Each end also copies what it receives, as into the weights of a model.
    """
    payload = np.zeros(MESSAGE_BYTES, np.uint8)

    def echo(request: Request) -> Reply:
        return Reply({}, [request.arrays[0].copy()])

    with (
        Server("127.0.0.1:0", {"echo": echo}, name="place") as server,
        RpcClient(name="place") as client,
    ):

        def call() -> None:
            reply = client.call(server.endpoint, "echo", {}, [payload], timeout_s=_TIMEOUT_S)
            payload[:] = reply.arrays[0]

        for _ in range(WARM_UPS):
            call()
        started, cpu_before, num_calls = time.perf_counter(), time.process_time(), 0
        while (elapsed_s := time.perf_counter() - started) < MEASURE_S:
            call()
            num_calls += 1
        cores = max(1.0, (time.process_time() - cpu_before) / elapsed_s)  # that both ends kept busy
    return elapsed_s * cores / 2 / (2 * MESSAGE_BYTES * num_calls)
