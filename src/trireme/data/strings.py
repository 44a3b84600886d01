"""Keys of strings.

key = XXH64(value in UTF-8, seed = XXH64(name of the feature in UTF-8, seed = 0)), as int64 with the
same bits. XXH64 is specified at https://github.com/Cyan4973/xxHash; the definition never changes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

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
    try:
        strings = pa.array(values, type=pa.large_string(), from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(f"string_keys: expected strings as {feature!r}: {error}") from error
    return arrow_string_keys(feature, strings)
