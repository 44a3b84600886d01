"""Every name that a page takes from the package exists."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import trireme as tr
from tests.repo import tree
from trireme import fleet
from trireme.inference import Predictor
from trireme.train.modes.geo.mode import Geo

ROOTS = {
    "trainer.optimizer.mode": Geo,
    "trainer.optimizer": tr.DistributedOptimizer,
    "trainer": tr.Trainer,
    "Trainer": tr.Trainer,
    "predictor": Predictor,
    "Predictor": Predictor,
    "fleet": fleet,
    "trireme": tr,
    "tr": tr,
}
"""The beginning of a dotted name, and what it is on every page. A longer one precedes."""
NAME = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, ROOTS))})((?:\.[A-Za-z_]\w*)*)")
OTHERS = {"trireme.keys", "trireme.missing"}
"""Metadata of a Parquet file that Trireme writes."""


def unknown_names(page: str) -> Iterator[str]:
    for match in NAME.finditer(page):
        if match[0] not in OTHERS and not exists(ROOTS[match[1]], match[2].split(".")[1:]):
            yield match[0]


def exists(root: object, path: list[str]) -> bool:
    value = root
    for part in path:
        if inspect.ismodule(value) and not hasattr(value, part):
            try:
                importlib.import_module(f"{value.__name__}.{part}")
            except ModuleNotFoundError:
                return False
        value = getattr(value, part, None)
    return value is not None


def pages() -> list[Path]:
    """All pages but the results of benchmarks, which name what there was when they were run."""
    results = tree.ROOT / "benchmarks/results"
    return [page for page in tree.files(".md") if results not in page.parents]


def test_every_name_on_a_page_exists() -> None:
    wrong = [
        f"{tree.name(page)}: {name}" for page in pages() for name in unknown_names(page.read_text())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "name",
    ["tr.Tabel", "tr.data.criteoo", "trireme.fleet.init_server_", "fleet.iniit", "trainer.fitt"],
)
def test_a_name_that_does_not_exist_is_found(name: str) -> None:
    page = f"Call `{name}()`, `Trainer.fit()`, `tr.data.criteo()`, `trireme.fleet.init()`."
    assert list(unknown_names(page)) == [name]
