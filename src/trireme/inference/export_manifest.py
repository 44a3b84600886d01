"""The manifest of an export; docs/format/export.md specifies it.

manifest.json             everything else: tables, what the model reads, files with checksums
tables/N/LO-HI.rows       frozen rows of table number N in buckets LO..HI
dense.pt2                 the dense part of the model, by torch.export; in a base
dense.safetensors         its parameters and buffers by name; in a delta
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trireme.errors import BadRequest, Corruption, is_file, reading

FORMAT = 1
KIND = "inference"
MANIFEST = "manifest.json"
PROGRAM = "dense.pt2"
WEIGHTS = "dense.safetensors"
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ExportFile:
    """A file of the export: its path in the folder, its length and SHA-256."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ExportedTable:
    """A table: its keys, the values of absent keys, and its files. Each dim of a table with several
    dims is an ExportedTable: name and dim together are distinct.

    dim: weights of a row. statistics: numbers before the weights: show and click at the time of the
        export if the model reads them, else none.
    dtype: of stored rows: float32, float16 or int8 (with a scale per row).
    initializer, seed: of initial weights, see TableSchema. initial_weights: how many weights of a
        key without a row are initial ones; the others are zeros. initial_dtype: float32, bfloat16
        or float16, to which they are rounded.
    salt: whether each feature has a key space of its own.
    rows, removed: keys with a row; keys that a delta removes.
    max_error, rms_error: of stored weights against trained ones.
    """

    name: str
    dim: int
    statistics: int
    dtype: str
    initializer: tuple[str, float, float]
    seed: int
    initial_weights: int
    initial_dtype: str
    salt: bool
    rows: int
    removed: int
    max_error: float
    rms_error: float
    files: tuple[ExportFile, ...]


@dataclass(frozen=True, slots=True)
class ModuleLookup:
    """What an embedding module looks up: features of a table, and how their rows are summed.

    table, dim: of the ExportedTable.
    mode: "sum", "mean" or "sqrt" of a bag, or "none": each id for itself.
    """

    name: str
    table: str
    dim: int
    features: tuple[str, ...]
    mode: str
    padding_key: int | None


@dataclass(frozen=True, slots=True)
class ProgramInput:
    """A tensor that the program of the dense part takes.

    role: "lookup": the result of the lookup `name`; "column": the column `name` of the batch;
        "values", "offsets" or "weights" of the ragged column `name`.
    shape: sizes; None where it depends on the batch.
    """

    role: str
    name: str
    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class ExportManifest:
    """The description of one export.

    id: of this export, unique.
    follows: of a delta: the id of the export before it, a base or another delta; None for a base.
    version: of the training state. since: that of the export before it; 0 for a base.
    weights: shapes of the parameters and buffers of the dense part, by name.
    max_error, rms_error: of the outputs for the example batch against those of the trained model.
    texts: features whose values are strings; their keys are hashes. integers: those whose values
    are integers. A feature of which nobody knows is in neither.
    """

    id: str
    follows: str | None
    version: int
    since: int
    tables: tuple[ExportedTable, ...]
    lookups: tuple[ModuleLookup, ...]
    inputs: tuple[ProgramInput, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, tuple[int, ...]]
    max_error: float
    rms_error: float
    dense: ExportFile
    texts: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()

    @property
    def columns(self) -> dict[str, str]:
        """What a batch must have, by name: "strings", "integers" or "ids", of which nobody knows,
        of the features; dtype and shape of the others, B for the examples.
        """
        kinds = dict.fromkeys(self.texts, "strings") | dict.fromkeys(self.integers, "integers")
        columns = {f: kinds.get(f, "ids") for one in self.lookups for f in one.features}
        for one in self.inputs:
            if one.role != "lookup":
                sizes = ", ".join("B" if size is None else str(size) for size in one.shape)
                columns.setdefault(one.name, f"{one.dtype} ({sizes})")
        return columns

    @property
    def is_delta(self) -> bool:
        return self.follows is not None

    def to_json(self) -> str:
        body = json.loads(json.dumps(asdict(self), allow_nan=False))
        head = {"kind": KIND, "format": FORMAT, "sha256": _digest(body)}
        return json.dumps({**head, "export": body}, indent=1)


def is_export(folder: Path) -> bool:
    """Whether the folder has the manifest of an export, not a damaged or another one."""
    path = folder / MANIFEST
    if not is_file(path):
        return False
    with reading(path), path.open("rb") as file:
        return b'"kind": "' + KIND.encode() + b'"' in file.read(READ_BYTES)


@contextmanager
def unchanged_export(folder: Path) -> Iterator[ExportManifest]:
    """The manifest of an export whose files are read in the block. Raises BadRequest: it has been
    removed or replaced meanwhile, so that they may be of two exports; one cannot be opened.
    """
    manifest, failure = read_manifest(folder), None
    try:
        yield manifest
    except (Corruption, OSError) as error:
        failure = error
    if read_manifest(folder).id != manifest.id:
        raise BadRequest(
            f"Predictor: expected the export {folder} to stay while it is read, found that it was"
            " replaced; read it again"
        ) from failure
    if isinstance(failure, OSError):
        reason = f"cannot read {failure.filename or folder}: {failure.strerror or failure}"
        raise BadRequest(f"Predictor: {reason}") from failure
    if failure is not None:
        raise failure


def read_manifest(folder: Path) -> ExportManifest:
    """Raises BadRequest: no export there, or a checkpoint. Corruption: a damaged manifest, or
    another format.
    """
    path = folder / MANIFEST
    try:
        with reading(path):
            body = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        text = f"Predictor: expected {path}, found none: not a complete export"
        raise BadRequest(text) from None
    except OSError as error:
        raise BadRequest(f"Predictor: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise Corruption(f"{path}: expected JSON, found {error}") from error
    if isinstance(body, dict) and "manifest" in body:
        raise BadRequest(
            f"Predictor: expected {path} of an export, found that of a checkpoint; export_model"
            " makes an export of what a Trainer has loaded"
        )
    head = {key: body.get(key) for key in ("kind", "format")} if isinstance(body, dict) else body
    if head != {"kind": KIND, "format": FORMAT}:
        raise Corruption(f"{path}: expected kind {KIND!r} of format {FORMAT}, found {head}")
    try:
        if (digest := _digest(body["export"])) != body["sha256"]:
            raise Corruption(f"{path}: expected SHA-256 {body['sha256']}, found {digest}")
        return _manifest(body["export"])
    except (KeyError, TypeError, ValueError) as error:
        raise Corruption(f"{path}: expected a complete manifest, found {error!r}") from error


def _digest(export: Any) -> str:
    """SHA-256 of the values as JSON with sorted keys and no blanks."""
    text = json.dumps(export, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _manifest(body: Mapping[str, Any]) -> ExportManifest:
    return ExportManifest(
        id=str(body["id"]),
        follows=None if body["follows"] is None else str(body["follows"]),
        version=int(body["version"]),
        since=int(body["since"]),
        tables=tuple(_table(part) for part in body["tables"]),
        lookups=tuple(
            ModuleLookup(**{**part, "features": tuple(part["features"])})
            for part in body["lookups"]
        ),
        inputs=tuple(
            ProgramInput(**{**part, "shape": tuple(part["shape"])}) for part in body["inputs"]
        ),
        outputs=tuple(str(name) for name in body["outputs"]),
        weights={str(name): tuple(map(int, shape)) for name, shape in body["weights"].items()},
        max_error=float(body["max_error"]),
        rms_error=float(body["rms_error"]),
        dense=ExportFile(**body["dense"]),
        texts=tuple(str(name) for name in body.get("texts", ())),  # older exports lack these
        integers=tuple(str(name) for name in body.get("integers", ())),
    )


def _table(part: Mapping[str, Any]) -> ExportedTable:
    kind, a, b = part["initializer"]
    files = tuple(ExportFile(**file) for file in part["files"])
    return ExportedTable(**{**part, "initializer": (str(kind), float(a), float(b)), "files": files})


def located(folder: Path, file: ExportFile, *, verify: bool) -> Path:
    """The path of a file of the manifest, after its length was checked, with `verify` also its
    checksum. Raises Corruption: missing or different; names the file.
    """
    path = folder / file.path
    if not path.resolve().is_relative_to(folder.resolve()):
        raise Corruption(f"{folder / MANIFEST}: expected files under it, found {file.path}")
    if not is_file(path):
        raise Corruption(f"{path}: expected a file of {file.bytes} bytes, found none")
    if (size := path.stat().st_size) != file.bytes:
        raise Corruption(f"{path}: expected {file.bytes} bytes, found {size}")
    if verify:
        digest = hashlib.sha256()
        with reading(path), path.open("rb") as content:
            while chunk := content.read(READ_BYTES):
                digest.update(chunk)
        expect_digest(path, file, digest.hexdigest())
    return path


def expect_digest(path: Path, file: ExportFile, digest: str) -> None:
    if digest != file.sha256:
        raise Corruption(f"{path}: expected SHA-256 {file.sha256}, found {digest}")
