"""Where a key stands twice in the files of an import. The files are read again, since rows do not
keep their places.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

from trireme.interchange.server_side.staged_rows import StagedRows
from trireme.protocol.routing import NUM_BUCKETS, Keys, buckets_of

KeysOf = Callable[[str], Iterator[Keys]]
PlacesOf = Callable[[str, int], Iterator[str]]


def first_duplicate(staged: StagedRows, keys_of: KeysOf, places_of: PlacesOf) -> str | None:
    """A key of `staged.files` that occurs twice, and where; None: the files are others now.

    places_of: names the lines or rows of a file that have a key.
    """
    bucket = _bucket_with_fewer(staged, keys_of)
    of_bucket = [
        keys[buckets_of(keys) == bucket] for path in staged.files for keys in keys_of(path)
    ]
    distinct, counts = np.unique(np.concatenate(of_bucket), return_counts=True)
    twice = distinct[counts > 1]
    if not len(twice):
        return None
    key = int(twice[0])
    places = islice((place for path in staged.files for place in places_of(path, key)), 2)
    return f"{' and '.join(places)}: expected distinct keys, found {key} twice"


def _bucket_with_fewer(staged: StagedRows, keys_of: KeysOf) -> int:
    counts = np.zeros(NUM_BUCKETS, np.int64)
    for path in staged.files:
        for keys in keys_of(path):
            counts += np.bincount(buckets_of(keys), minlength=NUM_BUCKETS)
    owned: Sequence[int] = np.flatnonzero(staged.wanted).tolist()
    return next((b for b in owned if counts[b] > len(staged.rows.snapshot(b).keys)), owned[0])
