"""The manifest, manifest.json: everything about a checkpoint except its rows and blocks.

docs/format/checkpoint.md specifies it. A folder without a manifest is no checkpoint. Reading one
checks its checksum and every value, so it need not be trusted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from trireme.checkpoint.format.json_object import JsonObject
from trireme.checkpoint.format.save_modes import SAVE_MODES
from trireme.errors import BadRequest, Corruption, reading
from trireme.protocol.block_spec import BlockSpec
from trireme.protocol.job_limits import STREAMS_MAX
from trireme.protocol.routing import NUM_BUCKETS
from trireme.protocol.wire import POSITION_MAX
from trireme.storage.storage import Storage
from trireme.table import TableSchema

FORMAT = 3
MANIFEST = "manifest.json"
MANIFEST_BYTES_MAX = 1 << 30
MATCH = 'Trainer.load(PATH, dense="match") begins a new run with what has the same name and shape'
MEMORY_PER_BYTE = 32
"""Most bytes of memory that Python needs for a byte of JSON, such as one of "[],[],[]"."""

_BYTES_MAX = 1 << 50
_NUMBER_MAX = (1 << 63) - 1
_VERSION_MAX = (1 << 32) - 1
_HEAD = re.compile(rb'\{"format": (\d{1,9}), "xxh3_128": "([0-9a-f]{32})", "manifest":\n')
_TAIL = b"\n}\n"
# What TableSchema and BlockSpec raise for invalid values.
_INVALID = (BadRequest, ArithmeticError, AttributeError, TypeError)


class FileEntry(NamedTuple):
    path: str
    num_bytes: int
    xxh3_128: str

    @staticmethod
    def read(fields: JsonObject) -> FileEntry:
        return FileEntry(
            fields.path("path"),
            fields.whole("bytes", 0, _BYTES_MAX),
            fields.hexadecimal("xxh3_128"),
        )


@dataclass(frozen=True)
class RowFiles:
    """The two files of buckets low..high of a table: one with rows, one with a line per bucket."""

    low: int
    high: int
    num_rows: int
    num_removed: int
    rows: FileEntry
    buckets: FileEntry

    @staticmethod
    def read(fields: JsonObject) -> RowFiles:
        low = fields.whole("low", 0, NUM_BUCKETS - 1)
        return RowFiles(
            low,
            fields.whole("high", low, NUM_BUCKETS - 1),
            fields.whole("num_rows", 0, _NUMBER_MAX),
            fields.whole("num_removed", 0, _NUMBER_MAX),
            FileEntry.read(fields.object("rows")),
            FileEntry.read(fields.object("buckets")),
        )


@dataclass(frozen=True)
class TableFiles:
    """The schema and the row files of a table."""

    schema: TableSchema
    files: tuple[RowFiles, ...]

    @property
    def num_rows(self) -> int:
        return sum(files.num_rows for files in self.files)

    @staticmethod
    def read(fields: JsonObject, name: str) -> TableFiles:
        schema = fields.object("schema")
        try:
            known = TableSchema.from_wire(fields.any("schema"))
        except _INVALID as error:
            raise Corruption(f"{schema.where}: {error}") from error
        if known.name != name:
            raise schema.wrong(f"the name {name!r}", known.name, "name")
        return TableFiles(known, tuple(map(RowFiles.read, fields.objects("pieces"))))

    def check_buckets(self, where: str) -> None:
        """Every bucket must be in exactly one pair of files."""
        expected = 0
        for files in sorted(self.files, key=lambda files: files.low):
            if files.low != expected:
                raise Corruption(
                    f"{where}: expected bucket {expected} of table {self.schema.name!r} next,"
                    f" found buckets {files.low}..{files.high}"
                )
            expected = files.high + 1
        if expected != NUM_BUCKETS:
            raise Corruption(
                f"{where}: expected {NUM_BUCKETS} buckets of table {self.schema.name!r},"
                f" found {expected}"
            )


@dataclass(frozen=True)
class SavedBlock:
    """A dense block, and the last sequence that it holds of each stream."""

    spec: BlockSpec
    marks: Mapping[int, int]


@dataclass(frozen=True)
class BlockFile:
    """A file of dense blocks with their optimizer's state."""

    file: FileEntry
    blocks: tuple[SavedBlock, ...]

    @staticmethod
    def read(fields: JsonObject) -> BlockFile:
        distinct = [marks.pairs("applied", _NUMBER_MAX) for marks in fields.objects("marks")]
        blocks = []
        for block in fields.objects("blocks"):
            try:
                spec = BlockSpec.from_wire(block.any("spec"))
            except _INVALID as error:
                raise Corruption(f"{block.where}.spec: {error}") from error
            number = block.whole("marks", 0, len(distinct) - 1)
            blocks.append(SavedBlock(spec, distinct[number]))
        return BlockFile(FileEntry.read(fields.object("file")), tuple(blocks))


@dataclass(frozen=True)
class CheckpointManifest:
    """The content of a checkpoint's manifest.

    mode: see save_modes.py. version: number of saves of this run and of the runs that it continues.
    since: a delta has all changes since this version; None in other modes.
    chain: id -> version. Of a delta: the checkpoints that it may be loaded on top of. Of a full or
        batch one: those that the next delta may follow besides this one.
    time: data time in seconds of the newest push when saving began, 0 if the data has none.
    saved_at: ISO 8601, by the clock of the worker that saved.
    num_servers: servers that wrote it; any number of servers may read it.
    optimizer: class name of the blocks' optimizer; None if there are no blocks.
    streams: stream -> (last sequence that all rows and blocks have, position after it).
    extra, tensors: the caller's JSON values and named tensors.
    """

    id: str
    mode: str
    version: int
    since: int | None
    chain: Mapping[str, int]
    time: int
    saved_at: str
    num_servers: int
    tables: Mapping[str, TableFiles]
    optimizer: str | None
    blocks: tuple[BlockFile, ...]
    streams: Mapping[int, tuple[int, tuple[int, ...]]]
    extra: Mapping[str, Any]
    tensors: FileEntry | None

    def files(self) -> Iterator[FileEntry]:
        """Every file of the checkpoint except the manifest."""
        for table in self.tables.values():
            for files in table.files:
                yield files.rows
                yield files.buckets
        for blocks in self.blocks:
            yield blocks.file
        if self.tensors is not None:
            yield self.tensors

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.files())

    @staticmethod
    def from_json(value: Any, where: str) -> CheckpointManifest:
        fields = JsonObject(value, where)
        mode = fields.text("mode")
        if mode not in SAVE_MODES:
            raise fields.wrong(f"one of {', '.join(SAVE_MODES)}", mode, "mode")
        tables = {
            name: TableFiles.read(table, name) for name, table in fields.object("tables").items()
        }
        for table in tables.values():
            table.check_buckets(where)
        since = fields.optional("since", lambda name: fields.whole(name, 0, _VERSION_MAX))
        if (since is None) == (mode == "delta"):
            raise fields.wrong("a version in a delta and null in others", since, "since")
        chain = fields.object("chain")
        manifest = CheckpointManifest(
            id=fields.hexadecimal("id"),
            mode=mode,
            version=fields.whole("version", 1, _VERSION_MAX),
            since=since,
            chain={id: chain.whole(id, 0, _VERSION_MAX) for id in chain.values},
            time=fields.whole("time", 0, _VERSION_MAX),
            saved_at=fields.text("saved_at", 64),
            num_servers=fields.whole("num_servers", 1, 1 << 16),
            tables=tables,
            optimizer=fields.optional("optimizer", fields.text),
            blocks=tuple(map(BlockFile.read, fields.objects("blocks"))),
            streams=_read_streams(fields),
            extra=fields.object("extra").values,
            tensors=fields.optional("tensors", lambda name: FileEntry.read(fields.object(name))),
        )
        _check_distinct(manifest, where)
        return manifest


def _read_streams(fields: JsonObject) -> dict[int, tuple[int, tuple[int, ...]]]:
    streams: dict[int, tuple[int, tuple[int, ...]]] = {}
    for entry in fields.list("streams"):
        if not isinstance(entry, list) or len(entry) != 3:
            raise fields.wrong("[stream, sequence, position]", entry, "streams")
        values = JsonObject(
            dict(zip(("stream", "sequence", "position"), entry, strict=True)),
            f"{fields.where}.streams",
        )
        stream = values.whole("stream", 0, STREAMS_MAX - 1)
        if stream in streams:
            raise fields.wrong("distinct streams", stream, "streams")
        sequence = values.whole("sequence", 0, _NUMBER_MAX)
        position = values.wholes("position", -_NUMBER_MAX - 1, _NUMBER_MAX, POSITION_MAX)
        streams[stream] = (sequence, position)
    return streams


def _check_distinct(manifest: CheckpointManifest, where: str) -> None:
    """No file and no block may occur twice."""
    paths = [MANIFEST, *(entry.path for entry in manifest.files())]
    ids = [block.spec.id for file in manifest.blocks for block in file.blocks]
    for what, names in (("files", paths), ("blocks", ids)):
        name, count = next(iter(Counter(names).most_common(1)), ("", 0))
        if count > 1:
            raise Corruption(f"{where}: expected distinct {what}, found {name} twice")


def write_manifest(storage: Storage, manifest: Mapping[str, Any]) -> None:
    """Write the JSON of a manifest, after all files that it names: a folder with a manifest is
    complete. Raises BadRequest or OSError: one is there already, or cannot be written. Requires:
    CheckpointManifest.from_json accepts it.
    """
    body = json.dumps(manifest, ensure_ascii=True, allow_nan=False).encode()
    digest = xxhash.xxh3_128(body).hexdigest()
    head = f'{{"format": {FORMAT}, "xxh3_128": "{digest}", "manifest":\n'.encode()
    storage.put_new(MANIFEST, head + body + _TAIL)


def manifest_size(storage: Storage) -> int:
    """Bytes of a manifest. Raises BadRequest: there is none. Corruption: it is too large."""
    where, size = f"{storage.name}/{MANIFEST}", storage.size(MANIFEST)
    if size is None:
        below = sorted(path.parent.name for path in Path(storage.name).glob(f"*/{MANIFEST}"))
        hint = f"; folders in it that have one: {', '.join(below[:9])}" if below else ""
        raise BadRequest(
            f"checkpoint: expected {where}, found none: not a complete checkpoint{hint}"
        )
    if size > MANIFEST_BYTES_MAX:
        raise Corruption(f"{where}: expected at most {MANIFEST_BYTES_MAX} bytes, found {size}")
    return size


def read_manifest(storage: Storage) -> CheckpointManifest:
    """Read the manifest of a checkpoint. Raises BadRequest: there is none, or that of an export.
    Corruption: it is damaged, or of another format.
    """
    where, size = f"{storage.name}/{MANIFEST}", manifest_size(storage)
    with reading(where), storage.open(MANIFEST) as file:
        data = file.read(size)
    return CheckpointManifest.from_json(_checked_body(data, where), where)


def _checked_body(data: bytes, where: str) -> Any:
    head = _HEAD.match(data)
    if head is None:
        value = _parsed(data, where)
        number = value.get("format") if isinstance(value, dict) else None
        if isinstance(value, dict) and "export" in value:
            raise BadRequest(
                f"checkpoint: expected {where} of a checkpoint, found that of an export for"
                " inference, which a Predictor takes"
            )
        if type(number) is int and number != FORMAT:  # older formats have no first line
            raise _other_format(number, where)
        raise Corruption(f"{where}: expected a first line with format and checksum, found none")
    if int(head[1]) != FORMAT:
        raise _other_format(int(head[1]), where)
    body = data[head.end() : -len(_TAIL)]
    digest = xxhash.xxh3_128(body).hexdigest()
    if digest != head[2].decode() or not data.endswith(_TAIL):
        raise Corruption(f"{where}: expected XXH3 {head[2].decode()}, found {digest}")
    return _parsed(body, where)


def _other_format(number: int, where: str) -> Corruption:
    which = "an older" if number < FORMAT else "a newer"
    return Corruption(
        f"{where}: expected format {FORMAT}, found {number}: written by {which} version of Trireme"
    )


def _parsed(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Corruption(f"{where}: expected JSON, found {error}") from error
