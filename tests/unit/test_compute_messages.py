"""Messages to compute workers whose fields are of other kinds than they should be."""

from __future__ import annotations

from typing import Any

import pytest

from trireme.errors import BadRequest
from trireme.train.compute.compute_messages import host_tensors
from trireme.train.compute.stage_messages import stage_host_tensors

WRONG: tuple[Any, ...] = ([["name", "strings", [[], 0]]], [["name", "strings", [{}, 0]]], [[[]]])


@pytest.mark.parametrize("columns", WRONG)
def test_columns_whose_tensors_are_no_numbers_are_refused(columns: list[Any]) -> None:
    body = {"columns": columns, "random": 0}
    with pytest.raises(BadRequest, match="expected a "):
        host_tensors(body)
    with pytest.raises(BadRequest, match="expected a "):
        stage_host_tensors({"random": 0, "batch": None, "labels": body})


@pytest.mark.parametrize("batch", [[], 3, "batch", True])
@pytest.mark.parametrize("name", ["batch", "labels"])
def test_a_batch_that_is_no_map_is_refused(name: str, batch: Any) -> None:
    with pytest.raises(BadRequest, match=f"expected field '{name}' of type dict"):
        stage_host_tensors({"random": 0, name: batch})
