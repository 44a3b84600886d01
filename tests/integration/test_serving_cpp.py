"""examples/serving_cpp reads an export in C++ and gets the same numbers as Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import trireme as tr
from tests.repo import tree
from trireme.inference import Predictor
from trireme.inference.export import export_model
from trireme.job.embedded import embedded

NUM_KEYS, DIM = 5000, 5


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving")
    strict = "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON"
    for command in (
        ["cmake", "-S", tree.ROOT / "examples/serving_cpp", "-B", folder, strict],
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
        export_model(trainer, tmp_path / "export", batch=ids, dtype=dtype)
    known = keys[rng.integers(0, NUM_KEYS, 300)].tolist()
    bags = [[*known[i : i + i % 4], 5, 2**64 - 1] for i in range(len(known))]
    actual, errors = pooled(program, tmp_path / "export/tables/0", bags)
    expected = Predictor(tmp_path / "export").predict({"a": bags}).outputs["output"]
    np.testing.assert_allclose(actual, expected[:, 0].numpy(), rtol=0, atol=1e-6)
    assert errors == f"keys without a row: {2 * len(bags)}\n"


def test_cpp_reads_each_dim_of_a_table(program: Path, tmp_path: Path) -> None:
    """Rows of each dim are a table part of their own; ids are salted."""
    dims = {"a": 3, "b": 5}
    table = tr.Table("t", dims=dims, salt=True, absent="zeros", optimizer=tr.optim.SGD(lr=0.5))
    model = tr.nn.EmbeddingBag(table, features=list(dims))
    ids = np.arange(50)
    with embedded(threads=2) as cluster:
        options = {"label": None, "progress": False, "cluster": cluster}
        trainer = tr.Trainer(model, None, loss=lambda out, _: (out * out.cos()).sum(), **options)
        for feature, dim in dims.items():
            rows = np.random.default_rng(dim).normal(size=(50, dim)).astype(np.float32)
            tr.interchange.import_arrays(
                trainer, "t", {"key": tr.nn.keys_of(feature, ids), "weights": rows}
            )
        batch = dict.fromkeys(dims, torch.from_numpy(ids))
        export_model(trainer, tmp_path / "export", batch=batch)
    bags = [[i, i + 1] for i in range(0, 48, 2)]
    expected = Predictor(tmp_path / "export").predict(dict.fromkeys(dims, bags)).outputs["output"]
    for number, feature in enumerate(dims):
        keys = [tr.nn.keys_of(feature, bag).tolist() for bag in bags]
        actual, _ = pooled(program, tmp_path / f"export/tables/{number}", keys)
        columns = expected.split((3, 5), 1)[number]
        np.testing.assert_allclose(actual, columns.numpy(), rtol=0, atol=1e-6)


def pooled(program: Path, folder: Path, bags: list[list[int]]) -> tuple[np.ndarray, str]:
    """The sums of the bags' rows, and what the program says besides."""
    done = subprocess.run(
        [program, *sorted(folder.iterdir())],
        input="\n".join(" ".join(map(str, bag)) for bag in bags) + "\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return np.array([line.split() for line in done.stdout.splitlines()], np.float32), done.stderr
