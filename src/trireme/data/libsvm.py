"""libsvm's text: a label, then index:value pairs, separated by blanks.

A line is an example: a number, then any number of pairs, with spaces or tabs between and around
them; a # begins a comment. The indices are the keys of one sparse feature: integers up to 2^64 - 1,
or from -2^63, in any order; the values are their weights. With hashed=True an index is any
characters up to the last colon of the pair, and the key is its hash (see trireme.data.strings).

Numbers and line ends: see trireme.data.text_parser. "qid:1" is broken: groups of examples for
ranking are not supported. The parser is in C++: core/feed/libsvm.h.
"""

from dataclasses import dataclass

from trireme import _core
from trireme.data.schema import Label, Schema, Sparse
from trireme.data.text_parser import TextFormat, core_fields
from trireme.errors import BadRequest


@dataclass(frozen=True, kw_only=True)
class LibsvmText(TextFormat):
    """Converts libsvm's text to columns; see `libsvm`."""

    def check(self, schema: Schema) -> None:
        """A label and one sparse feature."""
        if [type(field) for field in schema.fields] != [Label, Sparse]:
            raise BadRequest(
                f"libsvm: expected one Label and one Sparse, found {list(schema.fields)}"
            )

    def core_parser(self, schema: Schema, batch_size: int, skip_broken: bool) -> _core.LibsvmParser:
        return _core.LibsvmParser(core_fields(schema)[1], batch_size, skip_broken)


def libsvm(*, label: str = "label", feature: str = "features", hashed: bool = False) -> Schema:
    """The schema of libsvm's text: a label, and a feature whose bags have weights.

    Args:
        label: name of the label's column.
        feature: name of the feature of all pairs.
        hashed: indices are strings, whose hashes are the keys.

    Raises:
        BadRequest: as Schema.
    """
    return Schema([Label(label), Sparse(feature, hashed)], format=LibsvmText())
