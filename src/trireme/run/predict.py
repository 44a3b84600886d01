"""`trireme predict`: the outputs of an exported model for files of examples."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from trireme.data import ArrayDataset, QueueDataset, csv
from trireme.data.array_columns import LIST_MARK, NUM_SEARCHED, list_in_a_string
from trireme.data.batch import Batch, Strings
from trireme.data.schema import Content, Dense, InsId, Schema, Sparse
from trireme.data.sources import filesystem
from trireme.errors import BadRequest, writing
from trireme.inference import Predictor
from trireme.progress import Display, display
from trireme.run.file_schema import FileOptions, schema_of
from trireme.storage.atomic_file import PendingFile
from trireme.train.dump_text import lines, numbers, texts

log = logging.getLogger("trireme")


@dataclass(frozen=True)
class Summary:
    """The counts of a run. A Parquet file has them as metadata: trireme.examples and so on.

    keys: sum over the batches of their distinct keys. missing: those without a row.
    version: of the exported training state.
    """

    examples: int
    keys: int
    missing: int
    version: int


def predict(
    folder: Path,
    inputs: Sequence[str],
    output: str,
    options: FileOptions,
    *,
    batch_size: int = 4096,
    threads: int = 0,
    use_onednn: bool = False,
) -> Summary:
    """Write the outputs for every example of the files, in order.

    Args:
        folder: of the export.
        output: a new file: Parquet if it ends in .parquet, else text. A line has the ins_id of the
            example, if there is one, and each output, separated by tabs; several numbers of an
            output are separated by commas.

    Raises:
        BadRequest: no export, wrong options, or a file that cannot be written. DataError: wrong
            data. Corruption: a damaged export.
    """
    predictor = Predictor(folder, threads=threads, use_onednn=use_onednn)
    schema = schema_of(options, predictor.manifest)
    dataset = QueueDataset(list(inputs), schema=schema, batch_size=batch_size, own_files=True)
    _hint_at_lists(inputs, options, schema)
    ids = next((field.name for field in schema.fields if isinstance(field, InsId)), None)
    examples = keys = missing = 0
    with display("predict") as shown, iter(dataset) as stream, _written(output) as file:
        for batch in stream:
            prediction = predictor.predict(batch)
            file.write(batch, ids, _by_example(prediction.outputs, batch.num_examples))
            examples += batch.num_examples
            keys += prediction.num_keys
            missing += prediction.num_missing
            shown.num_examples = examples
            if shown.is_due():
                _show(shown, stream.fraction_read(), keys, missing)
        if not examples and output.endswith(".parquet"):  # which has columns without rows, too
            batch = _no_examples(schema)
            file.write(batch, ids, _by_example(predictor.predict(batch).outputs, 0))
        _show(shown, 1.0, keys, missing)
        summary = Summary(examples, keys, missing, predictor.version)
        file.finish(summary)
        shown.say(
            f"{examples:,} examples to {output}; of {keys:,} keys looked up, {missing:,} had no row"
        )
    return summary


def _hint_at_lists(inputs: Sequence[str], options: FileOptions, schema: Schema) -> None:
    """Log that strings of csv look like lists, which training may have had, in one string."""
    names = [field.name for field in schema.fields if isinstance(field, Sparse) and field.hashed]
    if options.format != "csv" or options.list_separator is not None or not options.has_header:
        return
    for name in names:
        strings = csv([Content(name)], delimiter=options.delimiter)
        dataset = QueueDataset(
            list(inputs), schema=strings, batch_size=NUM_SEARCHED, own_files=True
        )
        with iter(dataset) as stream:
            batch = next(stream, None)
        if batch is None or (example := list_in_a_string(_column(batch, name))) is None:
            continue
        log.warning(
            "predict: column %r: a string such as %r is one id; if it is a list, --list_separator"
            " %r splits it",
            *(name, example, LIST_MARK),
        )


def _show(shown: Display, fraction: float, keys: int, missing: int) -> None:
    shown.show(fraction, {"missing_keys": missing / max(keys, 1)})


def _by_example(outputs: Mapping[str, Tensor], num_examples: int) -> dict[str, Tensor]:
    """The outputs as (B, V) each."""
    for name, output in outputs.items():
        if output.dim() == 0 or len(output) != num_examples:
            raise BadRequest(
                f"predict: expected output {name!r} with {num_examples} rows, one per example,"
                f" found shape {tuple(output.shape)}"
            )
    return {
        name: output.reshape(num_examples, math.prod(output.shape[1:]))
        for name, output in outputs.items()
    }


def _no_examples(schema: Schema) -> Batch:
    columns: dict[str, Any] = {
        field.name: np.zeros((0, field.dim)) if isinstance(field, Dense) else []
        for field in schema.fields
    }
    dataset = ArrayDataset(columns, schema=Schema(schema.fields))
    return next(iter(dataset.stream(0, 1).or_no_examples()))


@contextmanager
def _written(output: str) -> Iterator[_TextPredictions | _ParquetPredictions]:
    """A file that appears under its name when it is complete."""
    folder, _, name = output.rpartition("/")
    where, root = filesystem(folder or ".", {})
    with writing(f"predict: cannot write {output}"):
        if where.exists(output):
            raise BadRequest(f"predict: expected a new file, found {output} existing")
        where.makedirs(root, exist_ok=True)
        part = PendingFile(where, root, name)
        try:
            yield (_ParquetPredictions if name.endswith(".parquet") else _TextPredictions)(part)
            part.finish()
            part.publish()
        except BaseException:
            part.discard()
            raise


class _TextPredictions:
    def __init__(self, part: PendingFile) -> None:
        self._part = part

    def write(self, batch: Batch, ids: str | None, outputs: Mapping[str, Tensor]) -> None:
        names = [] if ids is None else [texts(_column(batch, ids))]
        self._part.write(lines(*names, *(numbers(output) for output in outputs.values())))

    def finish(self, summary: Summary) -> None:
        """Text has no place for the summary."""


class _ParquetPredictions:
    def __init__(self, part: PendingFile) -> None:
        self._part = part
        self._writer: Any = None

    def write(self, batch: Batch, ids: str | None, outputs: Mapping[str, Tensor]) -> None:
        columns = (
            {} if ids is None else {"ins_id": pa.array(_column(batch, ids).decode(), pa.string())}
        )
        columns |= {name: _arrow(output) for name, output in outputs.items()}
        table = pa.table(columns)
        if self._writer is None:
            self._writer = pq.ParquetWriter(_PartStream(self._part), table.schema)
        self._writer.write_table(table)

    def finish(self, summary: Summary) -> None:
        if self._writer is not None:
            figures = {f"trireme.{name}": str(value) for name, value in asdict(summary).items()}
            self._writer.add_key_value_metadata(figures)
            self._writer.close()


class _PartStream(io.RawIOBase):
    """A part as a Python file object."""

    def __init__(self, part: PendingFile) -> None:
        super().__init__()
        self._part = part

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._part.write(data)
        return len(data)


def _column(batch: Batch, ids: str) -> Strings:
    column = batch[ids]
    assert isinstance(column, Strings)  # the type of an InsId column
    return column


def _arrow(output: Tensor) -> Any:
    """A number per example, or a list of V."""
    flat = pa.array(output.reshape(-1).numpy())
    width = output.shape[1]
    return flat if width == 1 else pa.FixedSizeListArray.from_arrays(flat, width)
