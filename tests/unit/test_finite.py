"""What check_finite_step names, wherever numbers are checked: by the core, or by torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trireme.errors import NotFinite
from trireme.table import RowClassId
from trireme.train.finite import check_finite_step
from trireme.worker.gradients import TableGradient

LARGE = (1 << 20) + 1  # more than the core checks
SHAPES: dict[str, Any] = {
    "small": lambda: torch.ones(3, 4),
    "large": lambda: torch.ones(LARGE),
    "transposed": lambda: torch.ones(4, 3).t(),
    "double": lambda: torch.ones(5, dtype=torch.float64),
    "half": lambda: torch.ones(5, dtype=torch.bfloat16),
}


def rows(gradients: Tensor) -> dict[RowClassId, TableGradient]:
    keys = np.arange(100, 100 + len(gradients), dtype=np.uint64)
    return {RowClassId("t", 0): TableGradient(keys, gradients, {}, {})}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", SHAPES)
def test_a_parameter_that_is_not_finite_is_named(name: str, bad: float) -> None:
    dense = {kind: make() for kind, make in SHAPES.items()} | {"none": None}
    check_finite_step("gradients", rows(torch.ones(2, 3)), dense)
    values = dense[name]
    values[(-1,) * values.dim()] = bad
    place = [size - 1 for size in values.shape]
    with pytest.raises(NotFinite) as error:
        check_finite_step("gradients", {}, dense)
    assert f"found {bad} for parameter {name} at {place};" in str(error.value)


@pytest.mark.parametrize("num_rows", [5, LARGE])
def test_a_row_that_is_not_finite_is_named(num_rows: int) -> None:
    gradients = torch.ones(num_rows, 1)
    gradients[3] = float("nan")
    with pytest.raises(NotFinite, match="for key 103 of table 't'"):
        check_finite_step("gradients", rows(gradients), {"w": torch.ones(LARGE)})


def test_finite_numbers_whose_sum_is_not_are_finite() -> None:
    huge = torch.full((LARGE,), 3e38)
    check_finite_step("gradients", rows(huge[:, None]), {"w": huge, "v": torch.ones(2)})
