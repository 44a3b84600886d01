"""Shows and clicks of a batch's examples, and the numbers of its features in rows."""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme.data.batch import Batch
from trireme.errors import BadRequest
from trireme.policy import ScorePolicy
from trireme.table import Table


def read_shows(
    batch: Batch, table: Table, num_examples: int
) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """(B, 2): show and click of each example, from the columns that the table's policy names.

    None if it names none: then each occurrence of a key is one show and no click.

    Raises:
        BadRequest: a column is missing, or not B finite numbers >= 0; the message names it.
    """
    assert isinstance(table.policy, ScorePolicy)
    names = table.policy.show_click
    if names is None:
        return None
    examples = np.empty((num_examples, 2), np.float32)
    for column, name in enumerate((names.show, names.click)):
        examples[:, column] = _numbers(batch, name, table, num_examples)
    return examples


def _numbers(batch: Batch, name: str, table: Table, num_examples: int) -> Any:
    what = f"Planner.plan of table {table.name!r}: expected column {name!r} of its ShowClick"
    if name not in batch:
        raise BadRequest(f"{what} in the batch, found {', '.join(batch.keys())}")
    column = batch[name]
    if not isinstance(column, Tensor) or column.numel() != num_examples:
        form = tuple(column.shape) if isinstance(column, Tensor) else type(column).__name__
        raise BadRequest(f"{what} as a number for each of {num_examples} examples, found {form}")
    numbers = column.detach().reshape(-1).to(torch.float32).numpy()
    is_wrong = ~((numbers >= 0) & (numbers < np.inf))
    if is_wrong.any():
        raise BadRequest(f"{what} with finite numbers >= 0, found {numbers[is_wrong][0]}")
    return numbers


def feature_numbers(
    table: Table, features: tuple[str, ...]
) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """(F,) the number of each feature in rows: from `Table.feature_numbers`; else its name, if that
    is a number, as slots of Fleet; else its place among the features.
    """
    numbers = _named_numbers(features)
    if table.feature_numbers:
        known = table.feature_numbers
        named = zip(features, numbers.tolist(), strict=True)
        numbers = np.array([known.get(name, number) for name, number in named], np.uint32)
    return numbers


@lru_cache
def _named_numbers(features: tuple[str, ...]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    names = enumerate(features)
    return np.array([int(f) if _is_number(f) else i for i, f in names], np.uint32)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 10
