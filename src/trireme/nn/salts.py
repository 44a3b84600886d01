"""Keys of tables with `salt`: each feature has keys of its own for its ids."""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from trireme import _core
from trireme.errors import BadRequest
from trireme.nn.ids import Ids

Keys = np.ndarray[Any, np.dtype[np.uint64]]


def salt_of(feature: str) -> int:
    """The salt of a feature's keys: a uint64 that depends only on its name.

    Permanent: rows of saved tables are found by it.
    """
    return int.from_bytes(hashlib.blake2b(feature.encode(), digest_size=8).digest(), "little")


def keys_of(feature: str, ids: npt.ArrayLike) -> Keys:
    """The keys of a feature's ids in a table with `salt`, to import rows or look them up by key.

    Args:
        ids: (n,) integers of 64 bits.

    Returns:
        (n,) uint64.

    Raises:
        BadRequest: ids of another form.
    """
    values = np.asarray(ids)
    if values.ndim != 1 or values.dtype not in (np.int64, np.uint64):
        raise BadRequest(
            f"keys_of: expected ids (n,) of int64 or uint64, found {values.dtype} of {values.shape}"
        )
    offsets = np.array([0, len(values)], np.int64)
    return salted_keys(Ids((feature,), 1, np.ascontiguousarray(values), offsets, None), None)


def salted_keys(ids: Ids, padding_key: int | None) -> Keys:
    """The key of each id; the padding key stays as it is."""
    salts = np.array([salt_of(name) for name in ids.features], np.uint64)
    out = np.empty(len(ids.values), np.uint64)
    _core.salt(ids.values.view(np.uint64), ids.offsets, salts, out, padding_key)
    return out
