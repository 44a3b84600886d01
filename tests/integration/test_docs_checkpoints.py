"""The Python of docs/checkpoints.md runs, from top to bottom."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.test_checkpoint import batches
from tests.integration.test_pages import blocks
from tests.s3_server import s3_server
from trireme.job.embedded import embedded


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = tr.Table("ads", dim=3, optimizer=tr.optim.Adam(lr=0.05))
        self.rows = tr.nn.EmbeddingBag(table, features=["user", "b"])
        self.head = nn.Linear(6, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.rows(batch).flatten(1))
        return logits.squeeze(1)


def of_users(batches: list[Any]) -> list[Any]:
    return [{**batch, "user": batch["a"]} for batch in batches]


def test_the_page_of_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with s3_server() as s3, embedded(threads=1) as cluster:
        model = Net()
        trainer = tr.Trainer(
            model,
            torch.optim.Adam(model.parameters()),
            loss=nn.functional.binary_cross_entropy_with_logits,
            progress=False,
            cluster=cluster,
        )
        known: dict[str, Any] = {"tr": tr, "trainer": trainer, "s3": s3, "print": lambda _: None}
        known |= {"train": of_users(batches(3)), "test": of_users(batches(1, 7))}
        actual = blocks("checkpoints.md")
        assert len(actual) >= 6
        assert {language for language, _ in actual} == {"python"}
        (tmp_path / "page.py").write_text("\n".join(body for _, body in actual))
        after = runpy.run_path("page.py", known)
    assert after["kept"] == []  # the model has no other tables
    assert (tmp_path / "saved" / "day1.noon" / "manifest.json").exists()
