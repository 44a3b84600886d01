"""MultiSlot text, as Fleet's data generators print it.

A line has one slot for each field of the schema, in order, separated by one space; one more may
end the line. A slot is a count and that many values, separated by one space:

- Label, Weight, Show: `1` and a number. Weight and Show are not negative.
- Dense: the dim and as many numbers.
- Sparse: a count and as many keys: integers up to 2^64 - 1, or from -2^63 as two's complement. The
  count 0 makes an empty bag. With hashed=True: words, whose hashes are the keys (see
  trireme.data.strings).
- InsId and Content, which come first and in this order: `1` and a word.

A word is any bytes but spaces. Numbers and line ends: see trireme.data.text_parser. The parser is
in C++: core/feed/multislot.h.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trireme import _core
from trireme.data.schema import Content, Field, InsId, Schema
from trireme.data.text_parser import TextFormat, core_fields
from trireme.errors import BadRequest


@dataclass(frozen=True, kw_only=True)
class MultiSlotText(TextFormat):
    """Converts MultiSlot text to columns; see `multislot`."""

    drop_zeros: bool = False
    pad_empty: bool = False

    def check(self, schema: Schema) -> None:
        """InsId and Content come first, in this order."""
        kinds = [type(field) for field in schema.fields]
        first = [kind for kind in (InsId, Content) if kind in kinds]
        if kinds[: len(first)] != first or any(kind in kinds[len(first) :] for kind in first):
            raise BadRequest(
                "multislot: expected at most one InsId and one Content, first and in this order, "
                f"found {list(schema.fields)}"
            )

    def core_parser(self, schema: Schema, batch_size: int, skip_broken: bool) -> Any:
        options = (self.drop_zeros, self.pad_empty, skip_broken)
        return _core.MultiSlotParser(core_fields(schema), batch_size, *options)


def multislot(
    fields: Iterable[Field], *, drop_zeros: bool = False, pad_empty: bool = False
) -> Schema:
    """The schema of MultiSlot text with one slot per field, in this order.

    Args:
        fields: in the order of the slots; InsId and Content, if any, come first.
        drop_zeros: leave out keys 0 of features that are not hashed, as Fleet does in memory. Else
            0 is an ordinary key.
        pad_empty: give an empty bag the key 0, as Fleet does. Else it stays empty.

    Raises:
        BadRequest: as Schema; or InsId or Content are not first.
    """
    return Schema(fields, format=MultiSlotText(drop_zeros=drop_zeros, pad_empty=pad_empty))
