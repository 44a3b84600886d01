"""The notebooks of examples/notebooks, run by a kernel as a user runs them."""

from __future__ import annotations

import asyncio
import re
import warnings
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.repo import tree

FOLDER = tree.ROOT / "examples" / "notebooks"


def run(name: str, folder: Path, *, times: int = 1) -> list[str]:
    """The texts that the notebook printed, one of each time that all its cells ran."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    cells = notebook.cells
    # The same cells again, in the same kernel.
    notebook.cells = [nbformat.from_dict(dict(cell)) for _ in range(times) for cell in cells]
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    client = NotebookClient(
        notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the kernel's client, not of ours
        asyncio.run(client.async_execute())
    texts = [printed(cell) for cell in notebook.cells if cell.cell_type == "code"]
    count = len(texts) // times
    return ["".join(texts[count * n : count * (n + 1)]) for n in range(times)]


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output["text"] for output in cell.outputs if output.get("name") == "stdout")


def test_notebooks_are_stored_without_outputs() -> None:
    names = {path.stem for path in FOLDER.glob("*.ipynb")}
    assert names == {"ratings", "seeds", "serving"}
    for name in names:
        for cell in nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells:
            assert cell.cell_type != "code" or (not cell.outputs and cell.execution_count is None)


@pytest.mark.timeout(300)
def test_ratings_run_twice_begin_anew_and_find_true_neighbours(tmp_path: Path) -> None:
    first, second = run("ratings", tmp_path, times=2)
    before, after = figures(r"AUC (\S+) before training, (\S+) after", first)
    assert before < 0.55 < 0.8 < after
    assert figures(r"AUC (\S+) before training, (\S+) after", second) == (before, after)
    near, all_movies = figures(r"likeness (\S+), that of all movies (\S+)", first)
    assert near > all_movies + 0.3


@pytest.mark.timeout(300)
def test_a_sweep_over_seeds_repeats_each(tmp_path: Path) -> None:
    (text,) = run("seeds", tmp_path)
    mean, deviation = figures(r"AUC (\S+), standard deviation (\S+)", text)
    assert mean > 0.75
    assert deviation > 0


@pytest.mark.timeout(300)
def test_a_served_model_ranks_movies_for_a_user(tmp_path: Path) -> None:
    (text,) = run("serving", tmp_path)
    ranked = [float(share) for share in re.findall(r"^movie \d+: (\S+)$", text, re.MULTILINE)]
    assert len(ranked) == 5
    assert ranked == sorted(ranked, reverse=True)
    assert ranked[0] > 0.7


def figures(pattern: str, text: str) -> tuple[float, float]:
    match = re.search(pattern, text)
    assert match is not None, text
    return float(match[1].rstrip(",.")), float(match[2].rstrip(",."))
