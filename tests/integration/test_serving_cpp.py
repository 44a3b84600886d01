"""examples/serving_cpp reads an export in C++, with the numbers that Python finds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import trireme as tr
from tests.repo import tree
from trireme.cluster import embedded
from trireme.inference import Predictor

NUM_KEYS, DIM = 5000, 5


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving")
    for command in (
        ["cmake", "-S", tree.ROOT / "examples/serving_cpp", "-B", folder],
        ["cmake", "--build", folder],
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=100)
    return folder / "pooled"


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_cpp_finds_the_numbers_that_python_finds(dtype: str, program: Path, tmp_path: Path) -> None:
    table = tr.Table("t", dim=DIM, optimizer=tr.optim.SGD(lr=0.5), absent="zeros")
    model = tr.nn.EmbeddingBag(table, features=["a"])
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**64, NUM_KEYS, dtype=np.uint64)
    wishes = torch.from_numpy(rng.normal(size=(NUM_KEYS, 1, DIM)).astype(np.float32))
    with embedded(threads=2) as cluster:
        trainer = tr.Trainer(
            model,
            None,
            loss=lambda rows, _: (rows * wishes).sum(),
            label=None,
            progress=False,
            cluster=cluster,
        )
        ids = {"a": torch.from_numpy(keys.view(np.int64))}
        trainer.fit([ids])
        trainer.save_inference_model(tmp_path / "export", batch=ids, dtype=dtype)
    known = keys[rng.integers(0, NUM_KEYS, 300)].tolist()
    bags = [[*known[i : i + i % 4], 5, 2**64 - 1] for i in range(len(known))]
    text = "\n".join(" ".join(map(str, bag)) for bag in bags) + "\n"
    done = subprocess.run(
        [program, *sorted((tmp_path / "export/tables/0").iterdir())],
        input=text,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found = np.array([line.split() for line in done.stdout.splitlines()], np.float32)
    expected = Predictor(tmp_path / "export").predict({"a": bags}).outputs["output"]
    np.testing.assert_allclose(found, expected[:, 0].numpy(), rtol=0, atol=1e-6)
    assert done.stderr == f"keys without a row: {2 * len(bags)}\n"
