"""A compute worker in the process of a test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trireme import _core, accelerator
from trireme.rpc import Limits, Server
from trireme.train.compute.kept_graphs import KeptGraphs
from trireme.train.compute.model_runner import ModelRunner
from trireme.train.compute.service import QUEUE_MAX, Service
from trireme.train.compute.stage_runner import StageRunner

Runner = ModelRunner | StageRunner


def stage_runner(stages: Any, scorer: Any) -> StageRunner:
    graphs = KeptGraphs(60.0)
    return StageRunner(stages, scorer, accelerator.HOST, _core.Pool(1), graphs)


@contextmanager
def computing(
    runner: Runner, *, limits: Limits | None = None, queue_max: int = QUEUE_MAX, observe: Any = None
) -> Iterator[tuple[str, Service]]:
    """Its address and its service, which computes within the block."""
    service = Service("heter 0", runner, accelerator.link_to(accelerator.HOST), queue_max=queue_max)
    thread = threading.Thread(target=service.run)
    with Server(
        "127.0.0.1:0",
        service.handlers(),
        name="heter 0",
        threads=1,
        limits=limits,
        observe=observe,
    ) as server:
        thread.start()
        try:
            yield server.endpoint, service
        finally:
            service.end("the test is over")
            thread.join(60)
