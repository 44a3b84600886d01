"""The values of frozen rows, as exports for inference store them (docs/format/export.md)."""

import math

import numpy as np

from trireme.errors import BadRequest
from trireme.protocol.wire import Array

DTYPES = ("float32", "float16", "int8")
FLOAT16_MAX = 65504.0
INT8_MAX = 127.0


def encode(weights: Array, dtype: str, name: str) -> tuple[Array, Array]:
    """Encode rows of the table `name`; also returns the weights that a reader decodes.

    weights: (n, D) float32. dtype: float32; float16; or int8: the row's scale, max(|row|) / 127 as
    float32, followed by round(weight / scale).

    Returns:
        (n, bytes) uint8, and (n, D) float32.

    Raises:
        BadRequest: weights that are not finite, or too large for float16.
    """
    weights = np.ascontiguousarray(weights)
    largest = np.abs(weights).max(axis=1, initial=0.0, keepdims=True)
    limit = FLOAT16_MAX if dtype == "float16" else math.inf
    if not (largest <= limit).all() or np.isinf(largest).any():
        raise BadRequest(
            f"export of table {name!r}: expected finite weights, in float16 up to {FLOAT16_MAX:g},"
            f" found {largest.max()}"
        )
    if dtype == "float32":
        return weights.view(np.uint8), weights
    if dtype == "float16":
        halves = weights.astype(np.float16)
        return halves.view(np.uint8), halves.astype(np.float32)
    scale = (largest / np.float32(INT8_MAX)).astype(np.float32)
    codes = np.rint(weights / np.where(scale > 0, scale, 1)).clip(-INT8_MAX, INT8_MAX)
    codes = codes.astype(np.int8)
    values = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=1)
    return values, codes.astype(np.float32) * scale
