"""A worker process loads no code of servers and of the coordinator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import Job

WORKER = """
import sys
import torch
import trireme as tr

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = tr.nn.EmbeddingBag(tr.Table("t", dim=4), features="a")
        self.top = torch.nn.Linear(4, 1)

    def forward(self, batch):
        return self.top(self.rows(batch).flatten(1)).squeeze(1)

servers, folder, mode = sys.argv[1:]
with tr.init(role="worker", servers=servers, index=0, num=1):
    model = Model()
    trainer = tr.Trainer(
        model,
        torch.optim.SGD(model.top.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        strategy=tr.Strategy(mode, k=2 if mode == "geo" else None),
        progress=False,
    )
    batches = [{"a": torch.tensor([1, 2, 3]), "label": torch.ones(3)}] * 2
    trainer.fit(batches, checkpoints=tr.Checkpoints(folder, every_steps=1))
    trainer.resume(folder)
    trainer.evaluate(batches)
print("loaded", *(name for name in sys.modules if name.startswith("trireme.")))
"""


def is_of_another_role(module: str) -> bool:
    _, *parts = module.split(".")
    return parts[0] in ("server", "coordinator") or "server_side" in parts


@pytest.mark.parametrize("mode", ["geo", "hybrid"])
def test_a_worker_loads_no_module_of_another_role(tmp_path: Path, mode: str) -> None:
    with Job(1) as job:
        done = subprocess.run(
            [sys.executable, "-c", WORKER, job.endpoints[0], str(tmp_path / "saved"), mode],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    [*_, last] = done.stdout.splitlines()
    loaded = last.split()
    assert loaded[0] == "loaded"
    assert "trireme.worker.client" in loaded
    wrong = [name for name in loaded[1:] if is_of_another_role(name)]
    assert not wrong, wrong
