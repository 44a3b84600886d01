"""Keys of strings.

key = XXH64(value in UTF-8, seed = XXH64(name of the feature in UTF-8, seed = 0)), as int64 with the
same bits. XXH64 is specified at https://github.com/Cyan4973/xxHash; the definition never changes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trireme import _core
from trireme.errors import DataError


def string_keys(
    feature: str, values: Sequence[str | None] | NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The key of each string, and whether there is one.

    Args:
        feature: name of the feature: equal strings of two features have different keys.
        values: N strings; None, NaN and "" are missing.

    Returns:
        (N,) int64 keys, anything where missing; (N,) bool, False where missing.

    Raises:
        DataError: a value is not a string.
    """
    try:
        strings = pa.array(values, type=pa.large_string(), from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(f"string_keys: expected strings as {feature!r}: {error}") from error
    return arrow_string_keys(feature, strings)


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
