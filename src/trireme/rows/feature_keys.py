"""The keys of a feature's values, in arrays of Arrow.

key of a string = XXH64(value in UTF-8, seed = XXH64(name of the feature in UTF-8, seed = 0)), see
trireme.data.strings; of a number the number itself. Salted tables map these once more.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trireme import _core
from trireme.errors import DataError


@dataclass(frozen=True)
class FeatureKeys:
    """is_salted: of a table with `salt`; else the ids of the feature are the keys. are_strings:
    what training took; None: nobody knows.
    """

    feature: str
    is_salted: bool
    are_strings: bool | None = None

    def of(self, values: pa.Array) -> NDArray[np.uint64]:
        """(n,) the key of each value, integers or strings. Raises DataError: other values, those of
        the other kind than in training, or one that is missing or empty.
        """
        kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
        if pa.types.is_integer(kind):
            numbers = values.cast(kind)
            is_there = ~numbers.is_null().to_numpy(zero_copy_only=False)
            wide = numbers.fill_null(0).to_numpy(zero_copy_only=False)
            keys = wide.astype(np.uint64 if wide.dtype.kind == "u" else np.int64).view(np.uint64)
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            signed, is_there = arrow_string_keys(self.feature, values.cast(kind))
            keys = signed.view(np.uint64)
        else:
            raise DataError(
                f"expected values of {self.feature!r} as integers or strings, found {values.type}"
            )
        if self.are_strings is not None and self.are_strings == pa.types.is_integer(kind):
            expected = "strings" if self.are_strings else "integers"
            raise DataError(
                f"expected values of {self.feature!r} as {expected}, as in training, found"
                f" {values.type}"
            )
        if not is_there.all():
            raise DataError(
                f"expected a value of {self.feature!r} in each row, found"
                f" {int((~is_there).sum())} rows without"
            )
        if not self.is_salted:
            return np.ascontiguousarray(keys)
        salted = np.empty(len(keys), np.uint64)
        offsets = np.array([0, len(keys)], np.int64)
        salts = np.array([salt_of(self.feature)], np.uint64)
        _core.salt(np.ascontiguousarray(keys), offsets, salts, salted, None)
        return salted


def salt_of(feature: str) -> int:
    """The salt of a feature's keys: a uint64 that depends only on its name.

    Permanent: rows of saved tables are found by it.
    """
    return int.from_bytes(hashlib.blake2b(feature.encode(), digest_size=8).digest(), "little")


def arrow_string_keys(
    feature: str, strings: pa.Array
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """string_keys of an array of strings or binary of any kind; null is missing."""
    strings = strings.cast(pa.large_binary())
    first, size = strings.offset, len(strings)
    _, offsets_buffer, bytes_buffer = strings.buffers()
    offsets = np.zeros(1, np.int64)
    if size:
        offsets = np.frombuffer(offsets_buffer, np.int64)[first : first + size + 1]
    keys, present = text_keys(feature, np.frombuffer(bytes_buffer or b"", np.uint8), offsets)
    return keys, present & ~strings.is_null().to_numpy(zero_copy_only=False)


def text_keys(
    feature: str, text: NDArray[np.uint8], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """string_keys of strings text[offsets[i]:offsets[i + 1]] in UTF-8; empty ones are missing."""
    keys = np.empty(len(offsets) - 1, np.uint64)
    _core.hash_strings(text, offsets, feature, keys)
    return keys.view(np.int64), np.diff(offsets) > 0
