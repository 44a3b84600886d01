"""The way of a push, from `optimizer.step()` to the rows in the core, is short and goes one way."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import zmq
from torch import nn

import trireme as tr
from tests.jobs import Job
from trireme import _core
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.train.loop.pusher import Pusher

FUNCTIONS_MAX, FILES_MAX = 30, 12

Path = list[tuple[str, str]]
"""(module, function) of ours, the outermost first."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = tr.nn.EmbeddingBag(tr.Table("t", dim=4), features="a")
        self.top = nn.Linear(4, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.top(self.rows(batch).flatten(1)).squeeze(1)


class Recorder:
    """Notes the calls of ours that lead to a function, wherever that is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def record(self, owner: Any, name: str, counts: Callable[..., bool] = lambda *_: True) -> Path:
        """counts: whether a call with these arguments does. The path is filled later, once."""
        path: Path = []
        function = getattr(owner, name)

        def recording(*arguments: Any, **options: Any) -> Any:
            if not path and counts(*arguments):
                path.extend(callers())
            return function(*arguments, **options)

        self._monkeypatch.setattr(owner, name, recording)
        return path


def callers() -> Path:
    frame: FrameType | None = sys._getframe(2)
    path: Path = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("trireme."):
            path.append((module, frame.f_code.co_qualname))
        frame = frame.f_back
    return path[::-1]


def is_push(socket: Any, parts: list[Any], *_: Any) -> bool:
    return any(b"ps.push" in bytes(part) for part in parts)


def train(cluster: Cluster) -> None:
    model = Model()
    optimizer = tr.DistributedOptimizer(
        torch.optim.SGD(model.top.parameters(), lr=0.1), model, cluster=cluster
    )
    batches = [{"a": torch.tensor([1, 2, 3])}] * 2
    for batch in tr.prefetch(batches, model, cluster=cluster):
        model(batch).sum().backward()
        optimizer.step(examples=3)


def check(*paths: Path) -> None:
    """The paths are one behind the other: in the training thread, behind it, in the server."""
    assert all(paths)
    whole = list(dict.fromkeys(itertools.chain(*paths)))
    files = {module for module, _ in whole}
    shown = "\n".join(f"{module} {function}" for module, function in whole)
    assert len(whole) <= FUNCTIONS_MAX, shown
    assert len(files) <= FILES_MAX, shown
    packages = [package for package, _ in itertools.groupby(m.split(".")[1] for m, _ in whole)]
    assert len(packages) == len(set(packages)), f"{packages}\n{shown}"


def test_a_push_to_a_server_process_goes_straight(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    submitted = recorder.record(Pusher, "submit")
    sent = recorder.record(zmq.Socket, "send_multipart", is_push)
    applied = recorder.record(_core.Table, "update")
    with Job(1) as job, job.join(0, 1) as cluster:
        train(cluster)
    check(submitted, sent, applied)


def test_a_push_to_tables_in_the_process_goes_straight(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    submitted, applied = recorder.record(Pusher, "submit"), recorder.record(_core.Table, "update")
    with embedded(threads=1) as cluster:
        train(cluster)
    check(submitted, applied)
