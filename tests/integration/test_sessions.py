"""Interactive interpreters as workers: their job outlives them, until `close()`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import Template, clean_environment

JOB = """
import sys
import torch
import trireme as tr

cluster = tr.init(servers=sys.argv[1], role="worker", index=0, num=1)
table = tr.Table("t", dim=2, optimizer=tr.optim.SGD(lr=0.5))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = tr.nn.EmbeddingBag(table, features=["a"])

    def forward(self, batch):
        return self.emb(batch).flatten(1).sum(1)

model = Model()
trainer = tr.Trainer(model, None, loss=torch.nn.functional.mse_loss, label="y")
data = {"a": list(range(64)), "y": [0.5] * 64}

def train():
    print("result", trainer.fit(data)["loss"])
"""


def session(folder: Path, address: str, *cells: str) -> str:
    """What an interpreter prints whose user enters these lines and leaves with Ctrl-D."""
    env = clean_environment() | {"TRIREME_TIMEOUT_S": "60"}
    env["PYTHONPATH"] = os.pathsep.join([str(folder), env["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-i", "-c", "import sys", address],
        input="".join(f"{line}\n" for line in ["from job import *", *cells]),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=True,
    )
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"result (\S+)", output)]


@pytest.mark.parametrize("last", ["train()", "1 / 0"])
def test_a_session_that_is_started_again_goes_on_and_close_ends_the_job(
    last: str, tmp_path: Path, programs: Template
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    serve = ["-m", "trireme", "server", "--listen", "127.0.0.1:0"]
    with programs.start("server", serve, {"TRIREME_TIMEOUT_S": "60"}) as server:
        address = server.wait_line(r"^listening on (\S+)")[1]
        output = session(tmp_path, address, "train()", "train()", last)
        assert "the session leaves the job of worker 0 at its servers" in output, output
        before = losses(output)
        output = session(tmp_path, address, *["train()"] * 4, "cluster.close()")
        assert "worker 0 was restarted" in output, output
        assert losses(output)[-1] < min(before), output
        assert server.finish() == 0
        assert "all workers have said goodbye" in server.output
