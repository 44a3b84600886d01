"""Numbers of NumPy as Arrow's and back, without a copy.

pyarrow's own conversions load pandas where it is installed, for a quarter of a second in every
process that saves or loads.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trireme.protocol.wire import Array


def to_arrow(values: Array) -> pa.Array:
    """Numbers that lie one behind the other, (n,)."""
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def to_numpy(array: pa.Array) -> npt.NDArray[Any]:
    """(n,), not writable. Raises ArrowInvalid: some are null."""
    if array.null_count:
        raise pa.ArrowInvalid(f"expected no nulls, found {array.null_count}")
    return np.from_dlpack(array)
