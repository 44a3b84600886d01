"""The path of a push, from `optimizer.step()` to the rows, is short and as ARCHITECTURE.md has it.

The path are the functions of src/trireme on the stack when the message of the push is sent, then
those on the server's stack when the core updates the rows, without what they call beside that.
"""

import re
import sys
from pathlib import Path

import pytest
import torch
import zmq
from torch import nn

import trireme as tr
from tests.jobs import Job
from tests.repo import tree
from trireme import _core
from trireme.job.cluster import Cluster
from trireme.job.default import set_default

SOURCES = tree.ROOT / "src" / "trireme"
FUNCTIONS_MAX, FILES_MAX = 30, 12


def stack() -> list[str]:
    """The running functions of ours in this thread, as `file: function`, outermost first."""
    functions = []
    frame = sys._getframe(1)
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if path.is_relative_to(SOURCES) and not name.endswith(">"):
            name = name.replace(".<locals>.", ".")
            functions.append(f"{path.relative_to(SOURCES)}: {name}")
        frame = frame.f_back
    return functions[::-1]


def trace(mode: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The path of the last step of a worker of one server, over a real socket."""
    sent, updated = list[str](), list[str]()
    send, update = zmq.Socket.send_multipart, _core.Table.update

    def traced_send(self: zmq.Socket[bytes], parts: list[bytes], *args: object, **kw: object):
        if b"ps.push" in bytes(parts[0]):
            sent[:] = stack()
        return send(self, parts, *args, **kw)

    def traced_update(self: _core.Table, *args: object, **kw: object) -> None:
        updated[:] = stack()
        update(self, *args, **kw)

    monkeypatch.setattr(zmq.Socket, "send_multipart", traced_send)
    monkeypatch.setattr(_core.Table, "update", traced_update)
    with Job(1) as job:
        job.run(1, lambda cluster: train(cluster, mode))
    return sent + updated


def train(cluster: Cluster, mode: str) -> None:
    table = tr.Table("ids", dim=4, optimizer=tr.optim.SGD(lr=0.1))
    model = nn.Sequential(tr.nn.EmbeddingBag(table, features=["id"]), nn.Flatten(), nn.Linear(4, 1))
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = tr.DistributedOptimizer(dense, model, strategy=tr.Strategy(mode), cluster=cluster)
    set_default(cluster)
    for _ in range(2):
        optimizer.zero_grad()
        model({"id": torch.tensor([1, 2, 3])}).sum().backward()
        optimizer.step()


def written(mode: str) -> list[str]:
    """The path of this mode as ARCHITECTURE.md has it."""
    text = (tree.ROOT / "ARCHITECTURE.md").read_text()
    block = re.search(rf"^A push in {mode}:\n\n```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert block is not None, f"no path for {mode}"
    path = []
    for line in block[1].splitlines():
        file, _, functions = line.partition(":")
        path += [f"{file}: {function.strip()}" for function in functions.split(",")]
    return path


@pytest.mark.skipif(sys.version_info < (3, 11), reason="names of functions in frames")
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_path_of_a_push(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = trace(mode, monkeypatch)
    assert path == written(mode)
    assert len(path) <= FUNCTIONS_MAX
    files = [step.partition(":")[0] for step in path]
    assert len(set(files)) <= FILES_MAX
    packages = [file.partition("/")[0] for file in files]
    entered = [
        package
        for before, package in zip(["", *packages], packages, strict=False)
        if package != before
    ]
    assert len(entered) == len(set(entered)), f"returns to a package: {entered}"
