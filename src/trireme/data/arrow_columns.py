"""Arrow's arrays as columns of examples: numbers, bags of keys, strings.

Shapes: n rows, N keys, n1 = n + 1.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from trireme.data.batch import Bags, Batch, Strings
from trireme.data.schema import Content, Dense, Field, InsId, Label, Schema, Sparse
from trireme.errors import DataError
from trireme.rows.feature_keys import arrow_string_keys


class RaggedArray(NamedTuple):
    """Part i is values[offsets[i]:offsets[i + 1]]: the keys of a bag, or the bytes of a string."""

    values: NDArray[Any]
    offsets: NDArray[np.int64]  # (n1,)

    def cut(self, begin: int, end: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The values of parts [begin, end), and the size of each."""
        offsets = self.offsets[begin : end + 1]
        return self.values[offsets[0] : offsets[-1]], np.diff(offsets)


class BrokenRow(NamedTuple):
    row: int
    what: str


@dataclass(frozen=True)
class ConvertedRows:
    """Converted rows.

    numbers: name -> (n,) or (n, dim) float32.
    ragged: name -> bags of keys, or strings.
    hashed: sparse feature -> whether its values are strings; absent: a column without values.
    row_numbers: (n,) of each row in its file.
    """

    numbers: dict[str, NDArray[np.float32]]
    ragged: dict[str, RaggedArray]
    hashed: dict[str, bool]
    row_numbers: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.row_numbers)


def why_not(field: Field, kind: pa.DataType) -> str | None:
    """What a field expects of its column; None: the column's type fits."""
    if isinstance(field, Sparse):
        inner = value_type(kind)
        is_right = pa.types.is_integer(inner) or is_text(inner)
        return None if is_right else "integers or strings, or lists of them"
    if isinstance(field, (InsId, Content)):
        inner = kind.value_type if isinstance(kind, pa.DictionaryType) else kind
        return None if is_text(inner) or pa.types.is_integer(inner) else "strings or integers"
    if isinstance(field, Dense) and field.dim > 1:
        is_right = without_list(kind) != kind and _is_number(without_list(kind))
        return None if is_right else f"lists of {field.dim} numbers"
    return None if _is_number(kind) else "numbers"


def convert(
    schema: Schema, batch: pa.RecordBatch, first_row: int
) -> tuple[ConvertedRows, NDArray[np.bool_], BrokenRow | None]:
    """Convert a batch of Arrow whose columns fit the schema.

    Returns:
        The rows; (n,) whether a row is broken; the first broken row and what is wrong with it.
    """
    numbers: dict[str, NDArray[np.float32]] = {}
    ragged: dict[str, RaggedArray] = {}
    hashed: dict[str, bool] = {}
    broken_n = np.zeros(batch.num_rows, np.bool_)
    first: BrokenRow | None = None
    for field in schema.fields:
        array = batch.column(field.name)
        if isinstance(field, Sparse):
            ragged[field.name] = bags_of_arrow(field, array)
            if field.hashed or not pa.types.is_null(value_type(array.type)):
                hashed[field.name] = field.hashed or is_text(value_type(array.type))
        elif isinstance(field, (InsId, Content)):
            ragged[field.name] = strings_of_arrow(array)
        else:
            numbers[field.name], wrong_n, expected = _numbers(field, array)
            broken_n |= wrong_n
            if wrong_n.any() and (first is None or int(wrong_n.argmax()) < first.row):
                row = int(wrong_n.argmax())
                value = array[row].as_py()
                first = BrokenRow(row, f"column {field.name!r}: expected {expected}, found {value}")
    row_numbers = np.arange(first_row, first_row + batch.num_rows)
    return ConvertedRows(numbers, ragged, hashed, row_numbers), broken_n, first


def join_rows(schema: Schema, parts: Sequence[tuple[ConvertedRows, int, int]]) -> Batch:
    """One batch of the rows [begin, end) of each part."""
    columns: dict[str, Any] = {}
    values, lengths = [], []
    for field in schema.fields:
        name = field.name
        if not isinstance(field, (Sparse, InsId, Content)):
            cut = [rows.numbers[name][begin:end] for rows, begin, end in parts]
            columns[name] = torch.from_numpy(np.concatenate(cut))
            continue
        cuts = [rows.ragged[name].cut(begin, end) for rows, begin, end in parts]
        if isinstance(field, Sparse):
            values += [values_N for values_N, _ in cuts]
            lengths += [lengths_n for _, lengths_n in cuts]
        else:
            data, sizes = zip(*cuts, strict=True)
            columns[name] = Strings(torch.from_numpy(np.concatenate(data)), _offsets(sizes))
    if not schema.sparse:
        return Batch(columns)
    keys = torch.from_numpy(np.concatenate(values))
    bags = Bags(schema.sparse, keys, _offsets(lengths))
    return Batch(columns, bags, hashed=_kinds(rows for rows, _, _ in parts))


def _kinds(parts: Iterable[ConvertedRows]) -> dict[str, bool]:
    """Raises DataError: strings of one file and integers of another, which have other keys."""
    kinds: dict[str, bool] = {}
    for rows in parts:
        for name, are_strings in rows.hashed.items():
            if kinds.setdefault(name, are_strings) != are_strings:
                raise DataError(
                    f"column {name!r}: expected strings or integers in all files, found both:"
                    " the same value in the other form has another key"
                )
    return kinds


def _offsets(lengths: Sequence[NDArray[np.int64]]) -> torch.Tensor:
    offsets = np.zeros(sum(map(len, lengths)) + 1, np.int64)
    np.cumsum(np.concatenate(lengths), out=offsets[1:])
    return torch.from_numpy(offsets)


def _numbers(field: Field, array: pa.Array) -> tuple[NDArray[np.float32], NDArray[np.bool_], str]:
    """(n,) or (n, dim) float32; (n,) whether each row is broken; what was expected."""
    if isinstance(field, Dense) and field.dim > 1:
        return _vectors(array, field.dim)
    numbers, wrong_n = _floats(array)
    expected = "a finite float32 number"
    if not isinstance(field, (Label, Dense)):
        expected += " that is not negative"
        wrong_n |= numbers < 0
    return (numbers[:, None] if isinstance(field, Dense) else numbers), wrong_n, expected


def _vectors(array: pa.Array, dim: int) -> tuple[NDArray[np.float32], NDArray[np.bool_], str]:
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    wrong_n = lengths != dim
    values, wrong_values = _floats(array.flatten())
    row_of_value = np.repeat(np.arange(len(array)), lengths)
    wrong_n[row_of_value[wrong_values]] = True
    numbers = np.zeros((len(array), dim), np.float32)
    right = ~wrong_n
    numbers[right] = values[right[row_of_value]].reshape(-1, dim)
    return numbers, wrong_n, f"{dim} finite float32 numbers"


def _floats(array: pa.Array) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """The numbers, and where they are missing or not finite."""
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    elif pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    numbers = array.fill_null(0).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):  # checked below
        floats = numbers.astype(np.float32)
    return floats, _nulls(array) | ~np.isfinite(floats)


def bags_of_arrow(field: Sparse, array: pa.Array) -> RaggedArray:
    """A bag per row; null and empty strings have no key."""
    bounds = np.arange(len(array) + 1)
    if without_list(array.type) != array.type:
        lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        bounds = np.zeros(len(array) + 1, np.int64)
        np.cumsum(lengths, out=bounds[1:])
        array = array.flatten()
    keys, present = _keys(field, array)
    if present.all():
        return RaggedArray(keys, bounds)
    before = np.zeros(len(keys) + 1, np.int64)
    np.cumsum(present, out=before[1:])
    return RaggedArray(keys[present], before[bounds])


def _keys(field: Sparse, array: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """A key per value, and whether there is one."""
    if isinstance(array, pa.DictionaryArray) and len(array.dictionary) > len(array):
        array = array.dictionary_decode()  # or each part of a file would hash all of it
    if isinstance(array, pa.DictionaryArray):
        keys, present = _keys(field, array.dictionary)
        is_null = _nulls(array)
        if len(keys) == 0:
            return np.zeros(len(array), np.int64), ~is_null
        index = array.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return keys[index], present[index] & ~is_null
    if is_text(array.type):
        return arrow_string_keys(field.name, array)
    if field.hashed:
        return arrow_string_keys(field.name, array.cast(pa.large_string()))
    keys = array.fill_null(0).to_numpy(zero_copy_only=False)
    return keys.astype(np.int64), ~_nulls(array)


def strings_of_arrow(array: pa.Array) -> RaggedArray:
    """The bytes of each string; null is empty."""
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    if pa.types.is_integer(array.type):
        array = array.cast(pa.large_string())
    array = array.cast(pa.large_binary()).fill_null(b"")
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    return RaggedArray(np.frombuffer(data or b"", np.uint8), bounds)


def _nulls(array: pa.Array) -> NDArray[np.bool_]:
    nulls: NDArray[np.bool_] = array.is_null().to_numpy(zero_copy_only=False)
    return nulls


def without_list(kind: pa.DataType) -> pa.DataType:
    is_list = (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
    return kind.value_type if is_list else kind


def value_type(kind: pa.DataType) -> pa.DataType:
    """Of lists and dictionaries that of their values."""
    inner = without_list(kind)
    return inner.value_type if pa.types.is_dictionary(inner) else inner


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    inner = kind.value_type if types.is_dictionary(kind) else kind
    kinds = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
    return any(is_kind(inner) for is_kind in kinds)


def is_text(kind: pa.DataType) -> bool:
    """Strings, bytes, or null, the type of a column without values."""
    types = pa.types
    return any(
        is_kind(kind)
        for is_kind in (
            types.is_string,
            types.is_large_string,
            types.is_string_view,
            types.is_binary,
            types.is_large_binary,
            types.is_fixed_size_binary,
            types.is_null,
        )
    )
