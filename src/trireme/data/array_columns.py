"""The columns of a DataFrame, an Arrow table or arrays, read as tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from trireme.data.arrow_columns import bags_of_arrow, is_text, value_type, why_not
from trireme.data.batch import Bags, Batch, Ragged, Strings
from trireme.data.batch import Column as BatchColumn
from trireme.data.schema import Content, Dense, Field, InsId, Number, Schema, Sparse, Weight
from trireme.data.user_columns import arrow_of, as_column, column_of, columns_of, is_bags
from trireme.errors import BadRequest, DataError
from trireme.rows.feature_keys import arrow_string_keys, text_keys

log = logging.getLogger("trireme.data")

LIST_MARK, _STRINGS_PER_MARK = "|", 10
"""So many marks in the strings of a column, or more, are taken for lists in one string."""
NUM_SEARCHED = 10_000
"""How many strings of a column are searched for marks."""


class ArrayColumns:
    """The columns of N examples, by the kinds of their fields.

    Args:
        are_strings: features whose values are known to be strings, or not.

    Raises:
        DataError: a column is missing, of another length, or holds a value of another kind.
    """

    def __init__(
        self, schema: Schema, columns: Mapping[str, Any], are_strings: Mapping[str, bool | None]
    ) -> None:
        missing = [name for name in schema.names if name not in columns]
        if missing:
            raise DataError(
                f"ArrayDataset: expected columns {', '.join(schema.names)}; missing: "
                f"{', '.join(missing)}"
            )
        columns = {name: _checked(name, columns[name]) for name in schema.names}
        self.num_examples = _num_values(columns[schema.names[0]])
        for name in schema.names:
            if _num_values(columns[name]) != self.num_examples:
                raise DataError(
                    f"ArrayDataset: expected {self.num_examples} values in {name!r}, as in "
                    f"{schema.names[0]!r}, found {_num_values(columns[name])}"
                )
        self._hashed = {name: value for name, value in are_strings.items() if value is not None}
        self._numbers: dict[str, Tensor] = {}
        keys_F, sizes_F = [], []
        self._bag_names: tuple[str, ...] = ()
        self._strings: dict[str, RaggedColumns] = {}
        self._weighted: dict[str, RaggedColumns] = {}
        for field in schema.fields:
            if isinstance(field, (InsId, Content)):
                self._strings[field.name] = _texts(field.name, columns[field.name])
            elif isinstance(field, Number):
                self._numbers[field.name] = _finite(field.name, columns[field.name])
            elif isinstance(field, Sparse):
                keys, sizes_N, is_string = _bags(field, columns[field.name])
                if is_string is not None:
                    self._hashed[field.name] = is_string
                weights = _weights(field.name, columns[field.name])
                if weights is not None:
                    self._weighted[field.name] = RaggedColumns(keys, sizes_N[None], weights)
                    continue
                self._bag_names += (field.name,)
                keys_F.append(keys)
                sizes_F.append(sizes_N)
            else:
                dim = field.dim if isinstance(field, Dense) else None
                numbers = _numbers(field.name, columns[field.name], dim)
                if isinstance(field, Weight):
                    _require(field.name, "weights >= 0", numbers, numbers >= 0)
                self._numbers[field.name] = torch.from_numpy(numbers)
        self._bags = RaggedColumns(torch.cat(keys_F), torch.stack(sizes_F)) if keys_F else None

    def parts(self, rows_B: Tensor) -> Iterator[Tensor]:
        """All values of some examples, as tensors."""
        yield from (numbers[rows_B] for numbers in self._numbers.values())
        bags = [*self._strings.values(), *self._weighted.values()]
        for column in [*bags, *([self._bags] if self._bags else [])]:
            yield from (part for part in column.take(rows_B) if part is not None)

    def batch(self, rows_B: Tensor) -> Batch:
        columns: dict[str, BatchColumn] = {
            name: column[rows_B] for name, column in self._numbers.items()
        }
        columns |= {name: Strings(*texts.take(rows_B)[:2]) for name, texts in self._strings.items()}
        columns |= {name: bags.take(rows_B) for name, bags in self._weighted.items()}
        bags = None if self._bags is None else Bags(self._bag_names, *self._bags.take(rows_B))
        return Batch(columns, bags, hashed=self._hashed)


class RaggedColumns:
    """Bags of F features of N examples: bag f*N + n belongs to feature f of example n.

    values: of all bags, concatenated. sizes_FN: number of values of each bag. weights: of values.
    """

    def __init__(self, values: Tensor, sizes_FN: Tensor, weights: Tensor | None = None) -> None:
        self._values, self._sizes_FN, self._weights = values, sizes_FN, weights
        self._begins_FN = sizes_FN.flatten().cumsum(0).view_as(sizes_FN) - sizes_FN

    def take(self, rows_B: Tensor) -> Ragged:
        """The bags of some examples, feature-major."""
        sizes, begins = (part[:, rows_B].flatten() for part in (self._sizes_FN, self._begins_FN))
        offsets = torch.zeros(len(sizes) + 1, dtype=torch.int64)
        torch.cumsum(sizes, 0, out=offsets[1:])
        total = int(offsets[-1])
        indices = torch.repeat_interleave(begins - offsets[:-1], sizes, output_size=total)
        indices += torch.arange(total)
        weights = None if self._weights is None else self._weights[indices]
        return Ragged(self._values[indices], offsets, weights)


def described(
    columns: Mapping[str, Any],
) -> tuple[Schema, dict[str, Any], dict[str, bool | None]]:
    """A field for each column, by its kind; the columns as `column_of` reads them; and which of
    them are strings. Raises DataError: one is no column.
    """
    made = {name: column_of(name, values) for name, values in columns.items()}
    for name, (column, _) in made.items():
        _expect_dense(name, column)
    read = {name: column for name, (column, _) in made.items()}
    are_strings = {name: is_string for name, (_, is_string) in made.items()}
    return Schema(_field(name, column) for name, column in read.items()), read, are_strings


def named_columns(source: Any) -> Mapping[str, Any]:
    columns = columns_of(source)
    if columns is None:
        raise BadRequest(
            "ArrayDataset: expected a DataFrame, an Arrow table, or a mapping of names to columns,"
            f" found {type(source).__name__}"
        )
    return columns


def _field(name: str, column: Any) -> Field:
    """The field of a column of its own kind. Raises DataError: it is no column."""
    if isinstance(column, Strings) and name == InsId().name:
        return InsId()
    if isinstance(column, (Strings, Ragged)):
        return Sparse(name)
    if not isinstance(column, Tensor) or column.dim() == 0:
        raise DataError(
            f"ArrayDataset: expected a value per example in {name!r}, found {type(column).__name__}"
        )
    if column.is_floating_point() and column.dim() == 2:
        return Dense(name, column.shape[1])
    return Number(name)


def _expect_dense(name: str, column: Any) -> None:
    """Raises DataError: a tensor that is no array of real numbers."""
    if not isinstance(column, Tensor):
        return
    if column.is_nested:
        what = "a nested tensor"
    elif column.layout is not torch.strided:
        what = str(column.layout)
    elif column.is_meta:
        what = "one on meta, without values"
    elif column.is_complex() or column.is_quantized:
        what = str(column.dtype)
    else:
        return
    raise DataError(
        f"ArrayDataset: expected a dense tensor of real numbers in {name!r}, found {what}"
    )


def _checked(name: str, column: Any) -> Any:
    """A column, of bags as Ragged. Raises DataError: it is none, or a tensor without numbers."""
    if is_bags(column):
        column = as_column(name, column)
    _expect_dense(name, column)
    is_scalar = isinstance(column, (str, bytes, Mapping)) or not hasattr(column, "__len__")
    if is_scalar or getattr(column, "ndim", 1) == 0:
        raise DataError(
            f"ArrayDataset: expected a value per example in {name!r}, found"
            f" {type(column).__name__}, which is no column"
        )
    return column


def _num_values(column: Any) -> int:
    return len(column.offsets) - 1 if isinstance(column, (Ragged, Strings)) else len(column)


def _finite(name: str, column: Any) -> Tensor:
    """The numbers of a Number."""
    made = as_column(name, column)
    if not isinstance(made, Tensor):
        raise _no_numbers(name, made)
    numbers = made.detach().cpu()
    if numbers.is_floating_point():
        kind, numbers = getattr(column, "dtype", numbers.dtype), numbers.to(torch.float32)
        is_missing = torch.nonzero(torch.isnan(numbers)).flatten().tolist()
        if is_missing and numbers.dim() == 1:
            raise DataError(
                f"ArrayDataset: expected finite numbers in {name!r} of {kind}, found nan in row"
                f" {is_missing[0]}: fill missing numbers and labels (fillna) or drop their rows;"
                " if these are ids, astype('Int64') of pandas keeps them whole, and some missing"
            )
        _require(name, "finite numbers", numbers.numpy(), torch.isfinite(numbers).numpy())
    return numbers


def _no_numbers(name: str, column: Any) -> DataError:
    kind = "strings" if isinstance(column, Strings) else type(column).__name__
    return DataError(f"ArrayDataset: expected numbers in {name!r}, found {kind}")


def _array(name: str, column: Any) -> NDArray[Any]:
    """Numbers as an array. Raises DataError: they are of another kind."""
    array = None
    if isinstance(column, Tensor):
        array = _array_of(column)
    elif not isinstance(column, (Ragged, Strings)):
        array = _plain_array(column)
        if array is None:
            column = as_column(name, column)
            array = column.numpy() if isinstance(column, Tensor) else None
    if array is None:
        raise _no_numbers(name, column)
    return array


def _array_of(tensor: Tensor) -> NDArray[Any]:
    if tensor.dtype == torch.bfloat16:  # which NumPy does not know
        tensor = tensor.to(torch.float32)
    return tensor.detach().cpu().numpy()


def _plain_array(column: Any) -> NDArray[Any] | None:
    """The numbers as NumPy reads them; None: it does not."""
    if isinstance(column, np.ma.MaskedArray):
        return None
    if isinstance(column, pa.ChunkedArray) and pa.types.is_dictionary(column.type):
        column = column.combine_chunks()  # in parts, Arrow takes null for the last category
    try:
        array = np.asarray(column)
    except ValueError:  # lists of several lengths
        return None
    return array if array.dtype.kind in "fiub" else None


def _numbers(name: str, column: Any, dim: int | None) -> NDArray[np.float32]:
    """(N,) float32 without a dim, else (N, dim)."""
    array = _array(name, column)
    if dim == 1 and array.ndim == 1:
        array = array[:, None]
    shape = (len(array),) if dim is None else (len(array), dim)
    if array.shape != shape:
        raise DataError(f"ArrayDataset: expected {name!r} of shape {shape}, found {array.shape}")
    with np.errstate(over="ignore"):  # checked below
        numbers = np.array(array, dtype=np.float32)
    _require(name, "finite float32 numbers", array, np.isfinite(numbers))
    return numbers


def _texts(name: str, column: Any) -> RaggedColumns:
    strings = column
    if not isinstance(column, Strings):
        plain = column.to_pylist() if hasattr(column, "to_pylist") else column  # of Arrow
        texts: Sequence[Any] = [] if isinstance(plain, Ragged) else list(plain)
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                raise DataError(
                    f"ArrayDataset: expected strings in {name!r}, found {text!r} in row {row}"
                )
        strings = Strings.encode(texts)
    data = strings.data[int(strings.offsets[0]) : int(strings.offsets[-1])]
    return RaggedColumns(data, strings.offsets.diff()[None])


def _bags(field: Sparse, column: Any) -> tuple[Tensor, Tensor, bool | None]:
    """int64 keys of N bags, concatenated, (N,) int64 the size of each, and whether the values are
    strings; None: bags of which nobody knows, or no values.
    """
    name = field.name
    if not isinstance(column, (Tensor, Ragged, Strings)) and not _holds_numbers(column):
        array = arrow_of(name, column)  # NumPy would round integers among others
        kind = value_type(array.type)
        if why_not(field, array.type) is None:
            bags = bags_of_arrow(field, array)
            keys, sizes_N = map(torch.from_numpy, (bags.values.copy(), np.diff(bags.offsets)))
            if is_text(array.type):
                _hint_at_lists(name, as_column(name, array[:NUM_SEARCHED]))
            is_unknown = pa.types.is_null(kind) or array.null_count == len(array)
            return keys, sizes_N, None if is_unknown else field.hashed or is_text(kind)
        if pa.types.is_floating(array.type):
            column = array.to_numpy(zero_copy_only=False)
        elif field.hashed:
            raise _not_hashed(name, array.type)
        else:
            column = as_column(name, array)
    if isinstance(column, Ragged):
        if field.hashed:
            raise _not_hashed(name, "Ragged, which holds keys")
        return *_ragged(name, column), None
    if isinstance(column, Strings):
        keys_N, present_N = text_keys(name, column.data.numpy(), column.offsets.numpy())
        _hint_at_lists(name, column)
    else:
        keys_N, present_N = _keys(field, column)
    sizes_N = torch.from_numpy(present_N.astype(np.int64))
    are_strings = field.hashed or isinstance(column, Strings)
    return torch.from_numpy(keys_N[present_N]), sizes_N, are_strings


def _hint_at_lists(name: str, column: Any) -> None:
    """Log that strings look like lists in one string, as MovieLens' genres "Comedy|Drama" are: once
    for each name, not for each dataset.
    """
    if name in _hinted or not isinstance(column, Strings):
        return
    if (example := list_in_a_string(column)) is not None:
        _hinted.add(name)
        log.warning(
            "ArrayDataset: column %r: a string such as %r is one id; if it is a list, split it, as"
            " frame[%r].str.split(%r) of pandas does",
            *(name, example, name, LIST_MARK),
        )


_hinted = set[str]()  # names of columns


def list_in_a_string(column: Strings) -> str | None:
    """A string that looks like a list, as MovieLens' "Comedy|Drama", if there are many of them."""
    begin, end = int(column.offsets[0]), int(column.offsets[-1])  # of a slice: its part of the data
    marks = begin + torch.nonzero(column.data[begin:end] == ord(LIST_MARK)).flatten()
    if len(marks) * _STRINGS_PER_MARK < max(len(column.offsets) - 1, 1):
        return None
    row = int(torch.searchsorted(column.offsets, marks[0], right=True)) - 1
    [example] = Strings(column.data, column.offsets[row : row + 2]).decode()
    return example


def _not_hashed(name: str, kind: object) -> DataError:
    return DataError(
        f"ArrayDataset: expected strings or integers in {name!r}, as the schema has hashed=True,"
        f" found {kind}"
    )


def _holds_numbers(column: Any) -> bool:
    """Whether NumPy has the numbers as they are, none of them masked: an array, a Series."""
    kind = getattr(column, "dtype", None)
    is_plain = isinstance(kind, np.dtype) and kind.kind in "fiub"
    return is_plain and not isinstance(column, np.ma.MaskedArray)


def _ragged(name: str, column: Ragged) -> tuple[Tensor, Tensor]:
    values, offsets = column.values, column.offsets
    sizes = offsets.diff()
    is_right = _are_integers(values) and _are_integers(offsets)
    if not is_right or (sizes < 0).any() or not 0 <= offsets[0] <= offsets[-1] <= len(values):
        raise DataError(
            f"ArrayDataset: expected {name!r} as integers, with offsets that rise from 0 to"
            f" {len(values)}, found {column}"
        )
    whole = values[int(offsets[0]) : int(offsets[-1])].to(torch.int64)
    return whole, sizes.to(torch.int64)


def _weights(name: str, column: Any) -> Tensor | None:
    """(N,) float32, of bags whose values have weights."""
    if not isinstance(column, Ragged) or column.weights is None:
        return None
    weights = column.weights.detach().to(torch.float32)
    if weights.shape != column.values.shape:
        raise DataError(
            f"ArrayDataset: expected {len(column.values)} weights of the values of {name!r}, found"
            f" {tuple(weights.shape)}"
        )
    _require(name, "finite weights", weights.numpy(), torch.isfinite(weights).numpy())
    return weights[int(column.offsets[0]) : int(column.offsets[-1])]


def _are_integers(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _keys(field: Sparse, column: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """(N,) int64 keys of a tensor or array of numbers, and (N,) bool whether there is one."""
    array = _array_of(column) if isinstance(column, Tensor) else np.asarray(column)
    if array.ndim != 1:
        raise DataError(
            f"ArrayDataset: expected one value per example in {field.name!r}, found {array.shape}"
        )
    if field.hashed and array.dtype.kind == "b":
        raise _not_hashed(field.name, array.dtype)
    present_N = np.ones(len(array), np.bool_)
    if array.dtype.kind == "f":
        # Below this limit floats of a type are exact integers.
        types = torch if isinstance(column, Tensor) else np
        limit = 2 / float(types.finfo(column.dtype).eps)
        present_N = ~np.isnan(array)
        with np.errstate(invalid="ignore"):
            whole_N = np.where(present_N, array, 0).astype(np.int64)
        right = ~present_N | ((whole_N == array) & (np.abs(array) < limit))
        _require(field.name, "integers or strings", array, right)
        array = whole_N
    if field.hashed:
        texts = pa.array(array).cast(pa.large_string())
        return arrow_string_keys(field.name, texts)[0], present_N
    return array.astype(np.int64), present_N


def _require(name: str, expected: str, array: NDArray[Any], right: NDArray[np.bool_]) -> None:
    if not right.all():
        place = tuple(int(i) for i in np.argwhere(~right)[0])
        raise DataError(
            f"ArrayDataset: expected {expected} in {name!r} of {array.dtype}, found {array[place]}"
            f" at {place}"
        )
