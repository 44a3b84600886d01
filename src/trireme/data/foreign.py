"""Batches of other libraries as Batch: mappings, DataFrames, TorchRec's KeyedJaggedTensor.

TorchRec is not imported: an object with its methods is a KeyedJaggedTensor. Its layout is that of
`Bags`, feature-major, so its tensors are used without a copy.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trireme.data.batch import Bags, Batch, Ragged
from trireme.data.user_columns import column_of, columns_of
from trireme.errors import BadRequest

_KEYED_JAGGED = ("keys", "values", "lengths", "offsets", "weights_or_none")


def as_batch(source: Any) -> Batch:
    """Convert what a loader yields to a batch.

    Args:
        source: a Batch, which is returned unchanged; a mapping of names to tensors, or to what
            `as_column` makes columns of (arrays, lists, strings, lists of ids), or a dataclass of
            these; a DataFrame or Arrow table; a KeyedJaggedTensor, by itself or as a value: its
            keys are the names of features.

    Raises:
        BadRequest: anything else; a repeated name; a KeyedJaggedTensor whose features differ in
            their number of examples. DataError: a column of another kind; named.
    """
    if isinstance(source, Batch):
        return source
    if _is_keyed_jagged(source):
        return Batch({}, _bags(source))
    if dataclasses.is_dataclass(source) and not isinstance(source, type):
        source = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    if (named := columns_of(source)) is None:
        raise BadRequest(
            "batch: expected a Batch, a mapping or dataclass of names to tensors, a DataFrame, or a"
            f" KeyedJaggedTensor, found {type(source).__name__}{_hint(source)}"
        )
    columns: dict[str, Any] = {}
    hashed = {}
    parts = []
    for name, value in named.items():
        if _is_keyed_jagged(value):
            parts.append(_bags(value))
        else:
            columns[name], are_strings = column_of(name, value)
            if isinstance(columns[name], Ragged) and are_strings is not None:
                hashed[name] = are_strings
    bags = _joined(parts) if parts else None
    twice = set(columns) & set(bags.names if bags is not None else ())
    if twice:
        raise BadRequest(f"batch: expected distinct names, found twice: {', '.join(sorted(twice))}")
    return Batch(columns, bags, hashed=hashed)


def _is_keyed_jagged(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in _KEYED_JAGGED)


def _bags(jagged: Any) -> Bags:
    names = tuple(jagged.keys())
    values, offsets, weights = jagged.values(), jagged.offsets(), jagged.weights_or_none()
    varies = getattr(jagged, "variable_stride_per_key", lambda: False)
    if not names or (offsets.numel() - 1) % len(names) or (callable(varies) and varies()):
        raise BadRequest(
            f"KeyedJaggedTensor: expected the same number of examples of every feature, found "
            f"{offsets.numel() - 1} bags of the features {', '.join(names)}"
        )
    if weights is not None:
        weights = weights.to(torch.float32)
    return Bags(names, values.to(torch.int64), offsets.to(torch.int64), weights)


def _joined(parts: Sequence[Bags]) -> Bags:
    """The features of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    names = tuple(name for part in parts for name in part.names)
    sizes = {part.num_examples for part in parts}
    if len(sizes) > 1 or len(set(names)) < len(names):
        raise BadRequest(
            "batch: expected KeyedJaggedTensors of the same examples and of different features, "
            f"found {', '.join(map(str, sorted(sizes)))} examples of {', '.join(names)}"
        )
    own = [Ragged(p.values, p.offsets, p.weights).cut(0, len(p.offsets) - 1) for p in parts]
    offsets = [torch.zeros(1, dtype=torch.int64)]
    for part in own:
        offsets.append(part.offsets[1:] + offsets[-1][-1])
    weights = None
    if any(part.weights is not None for part in parts):
        weights = torch.cat(
            [torch.ones(len(one.values)) if one.weights is None else one.weights for one in own]
        )
    return Bags(names, torch.cat([one.values for one in own]), torch.cat(offsets), weights)


def _hint(source: Any) -> str:
    is_records = isinstance(source, (list, tuple)) and source and isinstance(source[0], Mapping)
    return "; of examples one by one pandas.DataFrame(examples) makes columns" if is_records else ""
