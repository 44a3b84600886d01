"""The schema of files, from the options of a command: a format, and fields as text.

ins_id,label,dense:I:13,sparse:C1,hashed:C2       kind, name, dim
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from trireme.data import arrow, criteo, csv, libsvm, multislot
from trireme.data.schema import Content, Dense, Field, InsId, Label, Schema, Show, Sparse, Weight
from trireme.errors import BadRequest
from trireme.inference.export_manifest import ExportManifest

Columns = dict[str, list[str]]
_PLAIN: dict[str, Callable[[str], Field]] = {
    "label": Label,
    "weight": Weight,
    "show": Show,
    "ins_id": InsId,
    "content": Content,
    "sparse": Sparse,
    "hashed": lambda name: Sparse(name, hashed=True),
}


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """The options that describe files.

    format: criteo, csv, libsvm, multislot or parquet: Parquet or Arrow IPC files, by their endings.
    fields: as text, see above; None: those that the model reads, if the format has names.
    ins_id: the column with the names of examples, if `fields` is None.
    delimiter, list_separator: of csv. has_header: whether the first line of csv has names.
    """

    format: str
    fields: str | None = None
    ins_id: str | None = None
    delimiter: str = ","
    list_separator: str | None = None
    has_header: bool = True


def schema_of(options: FileOptions, manifest: ExportManifest) -> Schema:
    """The schema of the files. Raises BadRequest: fields are missing or not in the format, or
    options are of another one.
    """
    _check_csv_alone(options)
    if options.format in ("criteo", "libsvm"):
        if options.fields is not None or options.ins_id is not None:
            raise BadRequest(
                f"predict: expected no --fields and no --ins_id with --format {options.format},"
                " which fixes the columns"
            )
        return criteo() if options.format == "criteo" else libsvm()
    fields, columns = _fields(options, manifest)
    if columns and options.format != "csv":
        raise BadRequest(
            f"predict: expected the dim of a dense field with --format {options.format}, found"
            f" columns of {', '.join(columns)}"
        )
    if options.format == "parquet":
        return arrow(fields)
    if options.format == "multislot":
        return multislot(fields)
    return csv(
        fields,
        delimiter=options.delimiter,
        header=options.has_header,
        list_separator=options.list_separator,
        columns=columns,
    )


def _check_csv_alone(options: FileOptions) -> None:
    if options.format == "csv":
        return
    uses = {
        f"--delimiter {options.delimiter!r}": options.delimiter != ",",
        f"--list_separator {options.list_separator!r}": options.list_separator is not None,
        "--no_header": not options.has_header,
    }
    if of_csv := [option for option, is_used in uses.items() if is_used]:
        raise BadRequest(
            f"predict: expected {', '.join(of_csv)} with --format csv, found --format"
            f" {options.format}, which has its own layout"
        )


def _fields(options: FileOptions, manifest: ExportManifest) -> tuple[list[Field], Columns]:
    if options.fields is not None:
        if options.ins_id is not None:
            raise BadRequest("predict: expected --ins_id among --fields, found it beside them")
        fields, columns = parse_fields(options.fields)
        return [_as_read(field, manifest) for field in fields], columns
    if options.format == "multislot" or not options.has_header:
        raise BadRequest(
            "predict: expected --fields, in the order of the files, which have no names"
        )
    read = list(_read_by(manifest))
    if options.ins_id in [field.name for field in read]:
        raise BadRequest(
            f"predict: expected --ins_id with a column that the model does not read, found"
            f" {options.ins_id!r}; give the files a copy of it under another name"
        )
    front: list[Field] = [] if options.ins_id is None else [InsId(options.ins_id)]
    return [*front, *read], {}


def parse_fields(text: str) -> tuple[list[Field], Columns]:
    """Fields `kind`, `kind:name`, `dense:name:dim` or `dense:name:column+column`, separated by
    commas; and the columns of dense fields that name them.

    Raises:
        BadRequest: an unknown kind, or a missing name.
    """
    columns: Columns = {}
    return [_field(part.strip(), columns) for part in text.split(",")], columns


def _field(text: str, columns: Columns) -> Field:
    kind, *rest = text.split(":")
    if kind == "dense" and len(rest) == 2 and not rest[1].isdecimal():
        columns[rest[0]] = rest[1].split("+")
        return Dense(rest[0], len(columns[rest[0]]))
    if kind == "dense" and len(rest) in (1, 2):
        return Dense(rest[0], *map(int, rest[1:]))
    if kind in _PLAIN and len(rest) == 1:
        return _PLAIN[kind](rest[0])
    if kind in ("label", "weight", "show", "ins_id", "content") and not rest:
        return _PLAIN[kind](kind)
    raise BadRequest(
        f"predict: expected --fields of the kinds {', '.join(_PLAIN)}, as kind:name, or"
        f" dense:name:dim or dense:name:column+column, found {text!r}"
    )


def _as_read(field: Field, manifest: ExportManifest) -> Field:
    """A field of one number per example in the form that the model reads: (B,) or (B, 1)."""
    if not isinstance(field, Label) and not (isinstance(field, Dense) and field.dim == 1):
        return field
    read = {one.name: len(one.shape) for one in manifest.inputs if one.role == "column"}
    forms: dict[int, type[Label | Dense]] = {1: Label, 2: Dense}
    return forms.get(read.get(field.name, 0), type(field))(field.name)


def _read_by(manifest: ExportManifest) -> Iterable[Field]:
    """The fields that the model reads. A column of one number per example is read as a Label."""
    names = dict.fromkeys(name for lookup in manifest.lookups for name in lookup.features)
    yield from (Sparse(name, hashed=name in manifest.texts) for name in names)
    for one in manifest.inputs:
        if one.role != "column" or one.name in names:
            continue
        yield Label(one.name) if len(one.shape) == 1 else Dense(one.name, one.shape[1] or 1)
