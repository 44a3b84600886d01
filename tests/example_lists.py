"""A plain model of a dataset: a list of examples, with conversions to and from batches."""

from __future__ import annotations

from itertools import accumulate, chain, pairwise
from random import Random
from typing import Any, TypeAlias

import torch

from trireme.data import (
    Bags,
    Batch,
    Content,
    Dense,
    InsId,
    Label,
    Ragged,
    Schema,
    Show,
    Sparse,
    Strings,
    Weight,
)

Example: TypeAlias = dict[str, Any]
"""By field: a float, a tuple of floats, a string, or a tuple of (key, weight or None)."""


def random_schema(random: Random) -> Schema:
    """At least one field of some kinds, in any order."""
    fields = [
        *random.sample([Label(), Weight(), Show(), InsId(), Content()], random.randint(0, 5)),
        *(Dense(f"d{i}", random.randint(1, 4)) for i in range(random.randint(0, 2))),
        *(Sparse(f"s{i}") for i in range(random.randint(0, 5))),
    ] or [Label()]
    random.shuffle(fields)
    return Schema(fields)


def random_examples(
    random: Random, schema: Schema, num: int, *, has_weights: bool
) -> list[Example]:
    return [
        {field.name: _random_value(random, field, has_weights) for field in schema.fields}
        for _ in range(num)
    ]


def _random_value(random: Random, field: Any, has_weights: bool) -> Any:
    if isinstance(field, Sparse):
        size = random.choice([0, 1, 1, 1, 2, random.randint(0, 300)])
        return tuple(
            (
                random.getrandbits(64) - (1 << 63),
                float(random.randint(0, 9)) if has_weights else None,
            )
            for _ in range(size)
        )
    if isinstance(field, (InsId, Content)):
        return random.choice(
            ["", "a", f"line-{random.randint(0, 20)}", "\u00e4" * random.randint(0, 30)]
        )
    if isinstance(field, Dense):
        return tuple(float(random.randint(-9, 9)) for _ in range(field.dim))
    return float(random.randint(0, 9))


def batch_of(schema: Schema, examples: list[Example]) -> Batch:
    """Whether values have weights, their first one says."""
    columns: dict[str, Any] = {}
    for field in schema.fields:
        values = [example[field.name] for example in examples]
        if isinstance(field, (InsId, Content)):
            encoded = [value.encode() for value in values]
            data = torch.tensor(list(b"".join(encoded)), dtype=torch.uint8)
            columns[field.name] = Strings(data, _offsets(encoded))
        elif isinstance(field, Dense):
            columns[field.name] = torch.tensor(values).reshape(len(values), field.dim)
        elif not isinstance(field, Sparse):
            columns[field.name] = torch.tensor(values, dtype=torch.float32)
    if not schema.sparse:
        return Batch(columns)
    bags = [example[name] for name in schema.sparse for example in examples]
    pairs = list(chain(*bags))
    weights = None
    if pairs and pairs[0][1] is not None:
        weights = torch.tensor([weight for _, weight in pairs], dtype=torch.float32)
    keys = torch.tensor([key for key, _ in pairs], dtype=torch.int64)
    return Batch(columns, Bags(schema.sparse, keys, _offsets(bags), weights))


def _offsets(parts: list[Any]) -> torch.Tensor:
    return torch.tensor(list(accumulate(map(len, parts), initial=0)), dtype=torch.int64)


def examples_of(schema: Schema, batch: Batch) -> list[Example]:
    columns = {field.name: _values(batch[field.name]) for field in schema.fields}
    return [
        {name: values[i] for name, values in columns.items()} for i in range(batch.num_examples)
    ]


def _values(column: Any) -> list[Any]:
    if isinstance(column, Strings):
        return column.decode()
    if isinstance(column, Ragged):
        keys = column.values.tolist()
        weights = [None] * len(keys) if column.weights is None else column.weights.tolist()
        ends = column.offsets.tolist()
        pairs = list(zip(keys, weights, strict=True))
        return [tuple(pairs[begin:end]) for begin, end in pairwise(ends)]
    return [tuple(value) if isinstance(value, list) else value for value in column.tolist()]
