"""Keys of strings.

key = XXH64(value in UTF-8, seed = XXH64(name of the feature in UTF-8, seed = 0)), as int64 with the
same bits. XXH64 is specified at https://github.com/Cyan4973/xxHash; the definition never changes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trireme.data.arrow_columns import is_text, value_type, without_list
from trireme.data.user_columns import arrow_of
from trireme.errors import DataError
from trireme.rows.feature_keys import arrow_string_keys


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
    strings = arrow_of(feature, values)
    if not is_text(value_type(strings.type)) or strings.type != without_list(strings.type):
        raise DataError(
            f"string_keys: expected strings as {feature!r}, found {strings.type}; docs/data.md has"
            " keys of lists"
        )
    if isinstance(strings, pa.DictionaryArray):
        strings = strings.dictionary_decode()
    return arrow_string_keys(feature, strings)
