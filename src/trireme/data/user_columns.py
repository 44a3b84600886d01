"""Columns as users have them: DataFrames, Arrow tables, NumPy arrays, lists; pandas and polars are
not imported.

Numbers become tensors: integers int64 (uint64 with the same bits), fractions float32. Strings stay
strings; modules that look them up hash them. Lists of ids or strings become bags, lists of
fractions (B, dim) float32. Times become seconds since 1970. Missing ids and strings are empty bags.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from trireme.data.arrow_columns import (
    bags_of_arrow,
    is_text,
    strings_of_arrow,
    value_type,
    without_list,
)
from trireme.data.batch import Ragged, Strings
from trireme.data.schema import Sparse
from trireme.errors import DataError
from trireme.rows.feature_keys import text_keys

Column: TypeAlias = Tensor | Ragged | Strings

_WRONG = (
    *(pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError),
    *(OverflowError, UnicodeEncodeError),
)


def columns_of(source: Any) -> Mapping[str, Any] | None:
    """The columns of a mapping, a DataFrame of pandas or polars, a table of Arrow, or a Dataset of
    Hugging Face; None: it is something else. Raises DataError: two columns share a name, there
    are several Datasets, or a LazyFrame, whose rows are not there yet.
    """
    if isinstance(source, type):
        return None
    if hasattr(source, "collect_schema") and not hasattr(source, "get_columns"):  # of polars
        raise DataError(
            f"columns: expected a DataFrame, found a {type(source).__name__}, whose rows have not"
            " been read; .collect() reads them"
        )
    if type(source).__module__.startswith("datasets.") and hasattr(source, "num_rows"):
        source = _arrow_of_dataset(source)
    if isinstance(source, Mapping):
        return source
    if isinstance(source, (pa.Table, pa.RecordBatch)):
        names, columns = source.column_names, source.columns
    elif hasattr(source, "get_columns") and hasattr(source, "to_arrow"):  # of polars
        names, columns = source.columns, source.get_columns()
    elif hasattr(source, "iloc") and hasattr(source, "columns"):  # of pandas
        names = [str(name) for name in source.columns]
        columns = [source.iloc[:, i] for i in range(len(names))]
    else:
        return None
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise DataError(f"columns: expected distinct names, found twice: {', '.join(twice)}")
    return dict(zip(names, columns, strict=True))


def _arrow_of_dataset(source: Any) -> Any:
    """The table of a Dataset of the library `datasets`: its memory-mapped columns, without a copy
    unless the rows were chosen or shuffled.
    """
    if isinstance(source, Mapping):
        names = ", ".join(map(str, source))
        raise DataError(
            f"columns: expected one Dataset, found those named {names}; choose one, as in"
            f" data[{next(iter(source), 'train')!r}]"
        )
    return source.with_format("arrow")[:]


def as_column(name: str, values: Any) -> Any:
    """The values of B examples as a tensor, Ragged or Strings.

    Args:
        values: a tensor, Ragged or Strings, which are returned unchanged; an array, a series, or a
            list with a value per example; or (values, offsets[, weights]) of arrays, which are
            bags. Anything else is returned as it is.

    Raises:
        DataError: values of a kind that a column cannot have, or of two kinds; names the column,
            the kind and the row.
    """
    return column_of(name, values)[0]


def column_of(name: str, values: Any) -> tuple[Any, bool | None]:
    """`as_column`, and whether its values are strings; None: bags of which nobody knows, or no
    values, such as missing ones alone, which Arrow takes for either kind.
    """
    if isinstance(values, Ragged):
        return values, None
    if isinstance(values, (Tensor, Strings)):
        return values, isinstance(values, Strings)
    if isinstance(values, np.ndarray) and values.ndim > 0 and _is_plain(values):
        return number_tensor(values), False
    if is_bags(values):
        ids, are_strings = column_of(name, values[0])
        if isinstance(ids, Strings):
            keys, is_there = text_keys(name, ids.data.numpy(), ids.offsets.numpy())
            if not is_there.all():
                at = int(is_there.argmin())
                raise DataError(f"column {name!r}: expected strings in bags, found none at {at}")
            ids = torch.from_numpy(keys)
        bags = Ragged(ids, *(as_column(name, part) for part in values[1:]))
        ends = bags.offsets[-1:]
        if isinstance(ends, Tensor) and (ends < len(ids)).any():
            raise DataError(
                f"column {name!r}: expected offsets that end at {len(ids)}, the number of values,"
                f" found {ends.tolist()}: append it, as EmbeddingBag(include_last_offset=True) of"
                " torch.nn has it"
            )
        return bags, are_strings or None
    is_column = hasattr(values, "__len__") and not isinstance(values, (str, bytes, Mapping))
    if not is_column or (isinstance(values, np.ndarray) and values.ndim == 0):
        return values, None
    array = arrow_of(name, values)
    kind = value_type(array.type)
    is_unknown = pa.types.is_null(kind) or array.null_count == len(array)
    return _of_arrow(name, array), None if is_unknown else is_text(kind)


def _is_plain(array: NDArray[Any]) -> bool:
    """Whether an array has numbers, and none of them is masked."""
    return array.dtype.kind in "biuf" and not isinstance(array, np.ma.MaskedArray)


def number_tensor(array: NDArray[Any]) -> Tensor:
    """int64, float32 or bool."""
    if array.dtype == np.uint64:
        array = array.view(np.int64)
    kind = {"i": np.int64, "u": np.int64, "f": np.float32, "b": np.bool_}[array.dtype.kind]
    with np.errstate(over="ignore"):  # an infinity, which whoever reads it refuses
        array = np.ascontiguousarray(array, dtype=kind)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def arrow_of(name: str, values: Any) -> pa.Array:
    """Raises DataError: values of two kinds, or of one that Arrow does not know."""
    if hasattr(values, "to_arrow"):  # a series of polars
        values = _of_polars(name, values)
    if isinstance(values, pa.ChunkedArray):
        values = _in_one_part(values)
    if isinstance(values, pa.Array):
        return values
    values = _as_arrow_reads_them(values)
    try:
        made = pa.array(values, from_pandas=True)
    except _WRONG as error:
        if any(isinstance(value, Tensor) for value in values):  # which Arrow does not know
            return arrow_of(name, [_plain(v) if isinstance(v, Tensor) else v for v in values])
        for kind in (pa.uint64(), pa.list_(pa.uint64())):  # keys of 2**63 and above
            try:
                return pa.array(_unsigned(values), type=kind, from_pandas=True)
            except (*_WRONG, TypeError):
                continue
        raise DataError(_described(name, values, error)) from error
    return _in_one_part(made) if isinstance(made, pa.ChunkedArray) else made


def _in_one_part(array: pa.ChunkedArray) -> pa.Array:
    try:
        return array.combine_chunks()
    except pa.ArrowInvalid:  # more bytes or values than 32-bit offsets reach
        return array.cast(_large(array.type)).combine_chunks()


def _large(kind: pa.DataType) -> pa.DataType:
    """The type with 64-bit offsets."""
    if pa.types.is_list(kind):
        return pa.large_list(_large(kind.value_type))
    return {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(kind, kind)


def _of_polars(name: str, series: Any) -> Any:
    if str(series.dtype) == "Object":  # Arrow would get the addresses of the objects
        return series.to_list()
    try:
        return series.to_arrow()
    except _WRONG as error:
        raise DataError(
            f"column {name!r}: expected a type that Arrow knows, found {series.dtype}: {error}"
        ) from error


def _as_arrow_reads_them(values: Any) -> Any:
    """Without what Arrow would read as something else: it ignores masks, and ends a string of NumPy
    at its first NUL.
    """
    if hasattr(values, "sparse"):  # a sparse series of pandas
        values = values.sparse.to_dense()
    if isinstance(values, np.ma.MaskedArray):
        values = values.tolist()  # masked ones are None
    elif isinstance(values, np.ndarray):
        values = values.tolist() if values.dtype.kind in "SU" else values
        values = list(values) if isinstance(values, np.ndarray) and values.ndim > 1 else values
    return values


def _plain(value: Tensor) -> Any:
    return value.detach().cpu().numpy() if value.dim() else value.item()


def _unsigned(values: Sequence[Any]) -> list[Any]:
    return [
        [_bits(key) for key in value]
        if isinstance(value, (list, tuple, np.ndarray))
        else _bits(value)
        for value in values
    ]


def _bits(key: Any) -> Any:
    """Those of a negative key as uint64 has them; others as they are, also those out of range.
    Raises TypeError: a number that is no integer, which Arrow would make one.
    """
    is_number = isinstance(key, numbers.Number) and key == key
    if is_number and (isinstance(key, bool) or not isinstance(key, numbers.Integral)):
        raise TypeError(key)
    if not is_number:
        return key
    key = int(key)
    return key % 2**64 if -(2**63) <= key < 0 else key


def _described(name: str, values: Sequence[Any], error: Exception) -> str:
    """What is wrong with the column: the first value of another kind than those before."""
    first: tuple[int, Any] | None = None
    for row, value in enumerate(values):
        try:
            if pa.array([value], from_pandas=True).null_count:
                continue
            pa.array([value] if first is None else [first[1], value])
        except _WRONG:
            kind = type(value).__name__
            parts = value if isinstance(value, (list, tuple)) else [value]
            wide = [n for n in parts if isinstance(n, int) and not -(2**63) <= n < 2**64]
            if wide:
                return (
                    f"column {name!r}: expected integers of 64 bits, -2**63 to 2**64 - 1, found"
                    f" {wide[0]} in row {row}"
                )
            if first is None:
                return (
                    f"column {name!r}: expected numbers, strings, times or lists of ids, found"
                    f" {value!r}, a {kind}, in row {row}"
                )
            return (
                f"column {name!r}: expected values of one kind, found {value!r}, a {kind}, in row"
                f" {row}, and {first[1]!r}, a {type(first[1]).__name__}, in row {first[0]}"
            )
        first = first or (row, value)
    return f"column {name!r}: {error}"


def _of_arrow(name: str, array: pa.Array) -> Column:
    if isinstance(array, pa.DictionaryArray):  # a categorical
        array = array.dictionary_decode()
    types, kind = pa.types, array.type
    if types.is_null(kind) and not len(array):  # no value says what they would be
        return torch.zeros(0)
    if is_text(kind):
        data, offsets = strings_of_arrow(array)
        begin, end = offsets[0], offsets[-1]  # a slice does not copy the strings around it
        return Strings(torch.from_numpy(data[begin:end].copy()), torch.from_numpy(offsets - begin))
    if types.is_timestamp(kind) or types.is_date(kind):
        array = array.cast(pa.timestamp("s", getattr(kind, "tz", None)), safe=False)
        array = array.cast(pa.int64())
    elif types.is_decimal(kind):
        array = array.cast(pa.float64())
    if types.is_integer(array.type):
        return _ids(name, array) if array.null_count else _numbers(array)
    if types.is_floating(array.type):
        return _numbers(array.fill_null(float("nan")))
    if types.is_boolean(kind) and not array.null_count:
        return _numbers(array)
    inner = without_list(kind)
    if types.is_dictionary(inner):
        array = array.cast(pa.large_list(inner.value_type))
        inner = inner.value_type
    if inner != kind and (types.is_integer(inner) or is_text(inner)):
        return _ids(name, array)
    if inner != kind and types.is_floating(inner):
        return _vectors(name, array)
    missing = f" with {array.null_count} missing values" if array.null_count else ""
    raise DataError(
        f"column {name!r}: expected numbers, strings, times, or lists of ids, of strings or of"
        f" numbers, found {kind}{missing}: convert the column, or leave it out"
    )


def _ids(name: str, array: pa.Array) -> Ragged:
    """Bags: of lists, or of one id or none."""
    bags = bags_of_arrow(Sparse(name), array)
    return Ragged(torch.from_numpy(bags.values.copy()), torch.from_numpy(bags.offsets.copy()))


def _numbers(array: pa.Array) -> Tensor:
    return number_tensor(array.to_numpy(zero_copy_only=False))


def _vectors(name: str, array: pa.Array) -> Tensor:
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    dim = int(lengths[0]) if len(lengths) else 0
    if (lengths != dim).any():
        row = int(np.argmax(lengths != dim))
        raise DataError(
            f"column {name!r}: expected {dim} fractions in each list, as in row 0, found"
            f" {lengths[row]} in row {row}"
        )
    return _numbers(array.flatten().fill_null(float("nan"))).reshape(-1, dim)


def is_bags(values: Any) -> bool:
    """Whether values are arrays (values, offsets[, weights]), and no Ragged."""
    is_some = type(values) is tuple and len(values) in (2, 3)
    return is_some and all(isinstance(part, (Tensor, np.ndarray)) for part in values)
