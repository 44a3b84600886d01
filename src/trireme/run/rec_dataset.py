"""Reader types DataLoader and RecDataset: batches of the examples of a Python class."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from trireme.config import Config
from trireme.data import Bags, Batch, Dense, Schema, Sparse
from trireme.data.foreign import as_batch
from trireme.data.schema import Content, Field, InsId
from trireme.errors import BadRequest, DataError

log = logging.getLogger("trireme")


class ReaderConfig(Mapping[str, Any]):
    """The configuration as PaddleRec's readers expect it: a dictionary of dotted keys, which says
    None for a key that it does not have, with config_abs_dir and yaml_path.

    others: values in place of the configuration's.
    """

    def __init__(self, config: Config, others: Mapping[str, Any] | None = None) -> None:
        assert config.path is not None
        self._config = config
        places = {"config_abs_dir": str(config.path.parent), "yaml_path": str(config.path)}
        self._own: dict[str, Any] = {**places, **(others or {})}

    def __getitem__(self, key: str) -> Any:
        if key in self._own:
            return self._own[key]
        if key not in self._config:
            raise KeyError(key)
        return self._config.get(key, None)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._config.section(""), **self._own})

    def __len__(self) -> int:
        return len(list(iter(self)))


class ExampleDataset:
    """Batches of the examples of an iterable, or of a map-style dataset in its order. Workers share
    the files, or, if there are fewer, take the batches of all of them in turn.

    An example is a list or tuple of arrays in the order of the schema: the keys of a sparse
    feature, the numbers of a dense one, one number of a label. In place of an array there may be a
    list of arrays, also of several shapes, whose numbers are joined. Anything else is a batch
    already, as loaders may yield it: see as_batch; or an array, of a dense field alone.

    Args:
        examples: makes a new iterable of files for every pass, or a Dataset of torch whose examples
            have numbers.
        files: that have the examples.
        name: of the source of the examples, for messages.
        own_files: the examples are this worker's own; it takes all of them.
        files_are_one: examples are made of several files: workers share batches and not files.

    Raises:
        BadRequest: a schema with strings.
    """

    def __init__(
        self,
        examples: Callable[[list[str]], Any],
        files: Sequence[str] = (),
        *,
        schema: Schema,
        batch_size: int,
        name: str,
        own_files: bool = False,
        files_are_one: bool = False,
    ) -> None:
        for field in schema.fields:
            if isinstance(field, InsId | Content):
                raise BadRequest(f"{name}: expected fields of numbers, found {field}")
        self._examples, self._files, self.schema = examples, list(files), schema
        self._batch_size, self._name, self._own_files = batch_size, name, own_files
        self._files_are_one = files_are_one

    def __iter__(self) -> Iterator[Batch]:
        return self.stream(0, 1)

    def stream(
        self, index: int, num_streams: int, *, start: tuple[int, ...] | None = None, epoch: int = 0
    ) -> Iterator[Batch]:
        """The batches of every num_streams-th file from `index` on, or, of fewer files, every
        num_streams-th batch; after `start`, which is reached by replay.
        """
        skip = start[0] + 1 if start else 0
        files, first, step = self._files, index, num_streams
        if self._own_files or (len(files) >= num_streams and not self._files_are_one):
            files, first, step = files if self._own_files else files[index::num_streams], 0, 1
        elif index == 0 and files and not self._files_are_one:
            log.warning(
                "%s: each of %d workers reads all files, of which there are %d, and takes one batch"
                " of %d; with as many files as workers they share the reading, too",
                self._name, num_streams, len(files), num_streams,
            )  # fmt: skip
        for number, make in enumerate(self._batches(files)):
            if number % step == first and number >= skip:
                batch = make()
                batch.stream, batch.position = index, (number,)
                yield batch

    def _batches(self, files: list[str]) -> Iterator[Callable[[], Batch]]:
        """Functions that make the batches."""
        examples = enumerate(_in_order(self._examples(files)))
        while group := list(itertools.islice(examples, 1)):
            if not isinstance(group[0][1], list | tuple):
                yield functools.partial(self._own_batch, group[0][1])
                continue
            group += itertools.islice(examples, self._batch_size - 1)
            yield functools.partial(self._batch, group)

    def _own_batch(self, source: Any) -> Batch:
        """What the reader yields as a batch."""
        field = self.schema.fields[0]
        is_array = isinstance(source, np.ndarray | torch.Tensor)
        if not is_array or len(self.schema.fields) > 1 or not isinstance(field, Dense):
            return as_batch(source)
        numbers = torch.as_tensor(source, dtype=torch.float32)
        if numbers.dim() != 2 or numbers.shape[1] != field.dim:
            raise DataError(
                f"{self._name}: expected a batch as an array (B, {field.dim}), for {field}, found"
                f" shape {tuple(numbers.shape)}"
            )
        return Batch({field.name: numbers})

    def _batch(self, group: list[tuple[int, Any]]) -> Batch:
        columns: dict[str, Any] = {}
        values: list[Any] = []
        for place, field in enumerate(self.schema.fields):
            arrays = [self._array(number, example, place, field) for number, example in group]
            if isinstance(field, Sparse):
                values += arrays
                continue
            column = torch.from_numpy(np.stack(arrays))
            columns[field.name] = column if isinstance(field, Dense) else column[:, 0]
        if not values:
            return Batch(columns)
        ends = np.cumsum([0, *(len(array) for array in values)])
        keys = torch.from_numpy(np.concatenate(values))
        return Batch(columns, Bags(self.schema.sparse, keys, torch.from_numpy(ends)))

    def _array(self, number: int, example: Any, place: int, field: Field) -> Any:
        """One field of one example, as in the batch."""
        where = f"{self._name}: example {number + 1}"
        num_fields = len(self.schema.fields)
        if not isinstance(example, list | tuple) or len(example) != num_fields:
            is_list = isinstance(example, list | tuple)
            value = f"{len(example)} of them" if is_list else repr(example)
            raise DataError(
                f"{where}: expected {num_fields} arrays, for {self.schema}, found {value}"
            )
        array = _flat(example[place])
        if isinstance(field, Sparse):
            if array.dtype.kind not in "iu" and not _are_whole(array):
                raise DataError(f"{where}: expected integer keys as {field}, found {array.dtype}")
            return array.view(np.int64) if array.dtype == np.uint64 else array.astype(np.int64)
        size = field.dim if isinstance(field, Dense) else 1
        is_right = array.size == size and array.dtype.kind in "iufb"
        with np.errstate(over="ignore"):  # an overflow is reported below
            numbers = array.astype(np.float32) if is_right else array
        if not is_right or not np.isfinite(numbers).all():
            raise DataError(
                f"{where}: expected {size} finite float32 numbers as {field}, found {array!r}"
            )
        return numbers


def _flat(value: Any) -> Any:
    """The numbers of an array, or of a list of arrays of any shapes, in their order."""
    try:
        return np.asarray(value).reshape(-1)
    except ValueError:  # the shapes differ
        return np.concatenate([_flat(one) for one in value])


def _in_order(examples: Any) -> Iterable[Any]:
    """The items of an iterable; or of a map-style dataset, which has `len` of them, and need not
    raise IndexError behind the last one.
    """
    if hasattr(examples, "__iter__"):
        return cast(Iterable[Any], examples)
    return (examples[i] for i in range(len(examples)))


def _are_whole(array: Any) -> bool:
    """Whether floats are integers, and of a size at which their type has them all; or there are
    none: [] has no integer type. Masks of PaddleRec's readers, which no model reads, have -1e9.
    """
    if not array.size:
        return True
    if array.dtype.kind != "f" or not np.isfinite(array).all():
        return False
    exact = 2 ** (np.finfo(array.dtype).nmant + 1)
    return bool((array == np.rint(array)).all() and float(array.max()) <= exact)
