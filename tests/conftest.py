"""Samples the tests that are marked as `sampled` (tests/long.py), and keeps those marked as `gpu`
for `make gpu`.
"""

from __future__ import annotations

import functools
import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from random import Random

import pytest

from tests.long import IS_LONG, SAMPLE_SEED, draw


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sampled(keep): `make test` runs so many of the cases")
    config.addinivalue_line("markers", "gpu: needs a CUDA device; `make gpu` runs these alone")


def pytest_report_header() -> str:
    if IS_LONG:
        return "sampled tests: all cases"
    return f"sampled tests: seed {SAMPLE_SEED}; repeat with TRIREME_TEST_SEED={SAMPLE_SEED}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("markexpr") != "gpu":
        on_gpu = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if item not in on_gpu]
        _sample(config, items)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what is imported and collected, none of which is garbage, to no collector of cycles."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := no_gpu()):
        pytest.skip(reason)


@functools.cache
def no_gpu() -> str:
    """Why tests of a GPU cannot run here; "" if they can."""
    import torch

    if torch.cuda.is_available():
        return ""
    return f"no CUDA device: torch {torch.__version__} sees none"


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what no sample contains. A case that the command line names alone always runs."""
    if IS_LONG:
        return
    groups: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled"):
            groups[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for name, group in groups.items():
        keep = group[0].get_closest_marker("sampled").kwargs["keep"]
        random = Random(f"{SAMPLE_SEED} {name}")
        chosen = draw(
            [set(map(identity, item.callspec.params.items())) for item in group], keep, random
        )
        left_out |= {item for index, item in enumerate(group) if index not in chosen}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def identity(parameter: tuple[str, object]) -> tuple[str, int]:
    """A value that need not be hashable: cases of one product hold the same object."""
    name, value = parameter
    return name, id(value)


@pytest.fixture(autouse=True, scope="session")
def _no_variables_of_tests() -> None:
    """Remove TRIREME_TEST_*: trireme refuses variables that it does not know."""
    for name in [name for name in os.environ if name.startswith("TRIREME_TEST_")]:
        del os.environ[name]
