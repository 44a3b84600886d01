"""The commands and the Python of docs/interchange.md run, from top to bottom."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.test_docs_data import STRICT
from tests.programs import Template
from tests.repo import tree
from trireme.commands import cli

FLEET = tree.ROOT / "tests/golden/fleet_checkpoint/SparseAccessor-adagrad-adam/saved"
MODEL = """
import torch
from torch import nn
import trireme as tr


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        rows = tr.Table(
            "embedding",
            dim=5,
            optimizer=tr.optim.FleetAdagrad(lr=0.05),
            initializer=tr.initializer.TailUniform(-1e-2, 1e-2),
            absent="zeros",
            policy=tr.policy.SparseAccessor(embedx_threshold=3),
        )
        self.rows = tr.nn.EmbeddingBag(rows, features=["C0", "C1", "C2", "C3"])
        self.mlp = nn.Sequential(
            nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 1)
        )

    def forward(self, batch):
        return self.mlp(self.rows(batch).flatten(1)).squeeze(1)


def create(config):
    model = Net()
    return tr.Recipe(
        model=model,
        loss=nn.functional.binary_cross_entropy_with_logits,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        schema=tr.data.multislot([tr.data.Label("click"), *map(tr.data.Sparse, "abcd")]),
        label="click",
    )
"""


def test_every_command_and_snippet_runs(
    tmp_path: Path,
    programs: Template,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    page = (tree.ROOT / "docs/interchange.md").read_text()
    blocks = re.findall(r"```(sh|python)\n(.*?)```", page, re.DOTALL)
    assert 2 * len(blocks) == page.count("```")
    shutil.copytree(FLEET, tmp_path / "fleet_model")
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "config.yaml").write_text("runner:\n  sync_mode: async\n")
    vectors = np.ones((2, 5), np.float32)
    pq.write_table(pa.table({"id": [1, 2], "vector": list(vectors)}), tmp_path / "vectors.parquet")
    commands = [line for kind, text in blocks if kind == "sh" for line in text.splitlines()]
    snippets = "\n".join(text for kind, text in blocks if kind == "python")
    monkeypatch.chdir(tmp_path)
    for line in commands:
        assert cli.main(line.split()[1:]) == 0
    pq.write_table(pa.table({"key": [1, 2], "weights": list(vectors)}), tmp_path / "new.parquet")
    command = "convert new.parquet model/new --to checkpoint -m config.yaml"
    assert cli.main(command.split()) == 0
    assert "the dense part is new: new.parquet has none" in caplog.text
    (tmp_path / "snippets.py").write_text(f"{STRICT}\n{snippets}")
    programs.run(tmp_path, ["snippets.py"])
    again = sorted(path.name for path in (tmp_path / "fleet_again").glob("*/*"))
    assert again == ["part-000", "part-000-00000", "part-000-00001"]
