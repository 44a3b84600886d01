"""Files with the outputs of a model for each example: one per worker, complete or absent."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
from torch import Tensor, nn

from trireme.data.batch import Batch, Column, Strings
from trireme.data.schema import Content, Schema
from trireme.errors import BadRequest, TriremeError, check_known, class_of_code, writing
from trireme.job.cluster import Cluster
from trireme.storage.atomic_file import PendingFile
from trireme.train.loop.reporting import check_names
from trireme.train.loop.scoring import ExampleIds, Scored

PARAMS = "params"


@dataclass(frozen=True, kw_only=True)
class Dump:
    """What to write of each example, and where.

    Worker n writes part-0000n with the examples of its stream in order: where streams are pieces of
    the data, the parts one after the other are in the order of the data. A line is

        ins_id TAB content TAB name:len:v0:v1:... TAB ...

    with a field for each name, numbers in the fewest digits that read back as the same number.
    Content is empty where the data has none; tabs and line ends in strings are backslash escapes.

    path: a local folder or an fsspec location; made if absent.
    fields: outputs of the model ("output", if it returns one tensor) or columns of the batch.
    params: parameters or buffers of the model; worker 0 writes them into the file `params` at the
        end, a line `name:len:v0:v1:...` each.
    storage_options: of the fsspec location.
    """

    path: str | Path
    fields: Sequence[str] = ()
    params: Sequence[str] = ()
    storage_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_names("Dump", fields=self.fields, params=self.params)
        if not self.fields and not self.params:
            raise BadRequest("Dump: expected the names of fields or of parameters, found none")


class DumpFile:
    """The part of one worker, renamed to its name when the parts of all workers are complete."""

    def __init__(self, dump: Dump, dataset: object, model: nn.Module, worker: int) -> None:
        """Raises BadRequest: the data has no InsId column, the model lacks a parameter, the folder
        holds another dump or cannot be written.
        """
        from trireme.train import dump_text  # loads pyarrow.compute: a seventh of a second

        self._text = dump_text
        self._dump = dump
        self._ids = ExampleIds(dataset)
        schema = getattr(dataset, "schema", None)
        fields = schema.fields if isinstance(schema, Schema) else (Content(),)
        self._content = next((f.name for f in fields if isinstance(f, Content)), None)
        self._values = _values_of(model, dump.params)
        if self._ids.column is None:
            raise BadRequest(
                f"Dump: expected an InsId field in the schema, to name each line, found {schema};"
                " where the text has an id in front of each example, fleet's dataset.init and"
                " a YAML's runner take parse_ins_id=True, other schemas tr.data.InsId() as the"
                " first field"
            )
        self._fs, self._folder = fsspec.core.url_to_fs(
            str(dump.path), **dict(dump.storage_options or {})
        )
        self._what = f"Dump: cannot write part-{worker:05d} in {dump.path}"
        self._has_params = worker == 0 and bool(dump.params)
        self._parts: list[PendingFile] = []
        with writing(self._what):
            self._fs.makedirs(self._folder, exist_ok=True)
            self._fs.invalidate_cache()
            exists = self._fs.exists(self._folder)  # an object store has no empty folders
            paths = self._fs.ls(self._folder, detail=False) if exists else []
            names = [Path(path).name for path in paths]
            if old := sorted(n for n in names if n.startswith("part-") or n == PARAMS):
                raise BadRequest(
                    f"Dump: expected a folder without an earlier dump, found {old[0]} in"
                    f" {dump.path}; remove it or choose another"
                )
            self._examples = self._part(f"part-{worker:05d}")

    def observe(self, model: nn.Module, scored: Scored) -> None:
        """Write the lines of a batch. Raises BadRequest, ResourceExhausted: the disk is full."""
        del model
        batch = scored.batch
        columns = [self._text.field(name, _find(name, scored)) for name in self._dump.fields]
        content = pa.array([""] * batch.num_examples, pa.string())
        column = None if self._content is None else batch.get(self._content)
        if isinstance(column, Strings):
            content = self._text.texts(column)
        text = self._text.lines(self._ids_of(batch), content, *columns)
        with writing(self._what):
            self._examples.write(text)

    def _ids_of(self, batch: Batch) -> Any:
        column = batch.get(str(self._ids.column))
        if isinstance(column, Strings):
            return self._text.texts(column)
        ids = self._ids.of(batch)
        if ids is None:
            raise BadRequest(
                f"Dump: expected a column {self._ids.column!r} of strings or integers in the"
                f" batch, to name each line, found {', '.join(batch.keys())}"
            )
        return pa.array(ids, pa.string())

    def close(self) -> None:
        """Write the rest, under a temporary name. Raises what observe() raises."""
        with writing(self._what):
            if self._has_params:
                params = self._part(PARAMS)
                for name, values in self._values.items():
                    line = self._text.field(name, values.detach().reshape(1, -1))
                    params.write(self._text.lines(line))
            for part in self._parts:
                part.finish()

    def publish(self) -> None:
        """Give the files their names."""
        with writing(self._what):
            for part in self._parts:
                part.publish()

    def discard(self) -> None:
        """Remove the files, after an error."""
        for part in self._parts:
            part.discard()

    def _part(self, name: str) -> PendingFile:
        part = PendingFile(self._fs, self._folder, name)
        self._parts.append(part)
        return part


@contextmanager
def dumping(
    dump: Dump | None, dataset: object, model: nn.Module, cluster: Cluster
) -> Iterator[DumpFile | None]:
    """A file to write to in the block; it gets its name when all workers have reached the end.

    Every worker calls it. If one fails, the others raise its error, and no part remains.
    """
    if dump is None:
        yield None
        return
    file: DumpFile | None = None
    try:
        with _together(cluster, "begin of dump"):
            file = DumpFile(dump, dataset, model, cluster.worker)
        yield file
        with _together(cluster, "end of dump"):
            file.close()
        with _together(cluster, "names of dump"):
            file.publish()
    except BaseException:
        if file is not None:
            file.discard()
        raise


@contextmanager
def _together(cluster: Cluster, purpose: str) -> Iterator[None]:
    """All workers run the block, then meet. Raises the error of this worker, else of another."""
    error: TriremeError | None = None
    try:
        yield
    except TriremeError as raised:
        error = raised
    body = {} if error is None else {"code": error.code, "message": str(error)}
    with cluster.client.script.section(purpose):
        replies = cluster.client.coordinator.gather(body, [], purpose=purpose, patient=True)
    if error is not None:
        raise error
    for worker, (reply, _) in enumerate(replies):
        if reply:
            raise class_of_code(reply["code"])(f"{purpose}: worker {worker}: {reply['message']}")


def _values_of(model: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    check_known("Dump", "params to name parameters or buffers of the model", named, names)
    return {name: named[name] for name in names}


def _find(name: str, scored: Scored) -> Column:
    for columns in (scored.outputs, scored.batch):
        if name in columns:
            return columns[name]
    raise BadRequest(
        f"Dump: expected fields to name outputs {', '.join(scored.outputs)} or columns"
        f" {', '.join(scored.batch.keys())}, found {name!r}"
    )
