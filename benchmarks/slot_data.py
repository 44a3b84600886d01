"""Data in the shape of PaddleRec's slot_dnn: MultiSlot text of show, click and 300 ragged features.

Each feature of an example has 1 to 4 ids (Fleet allows no empty one), 1.3 on average; ids follow
Zipf's law within their feature. Both contestants read the same files.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from benchmarks.criteo import MADE_HERE
from benchmarks.harness import Settings, say

NUM_FEATURES = 300
NAMES = [str(number) for number in range(2, 2 + NUM_FEATURES)]
EXAMPLES_PER_FILE = 4096  # 23 MB
_COUNTS = (1, 2, 3, 4)
_SHARES = (0.8, 0.12, 0.06, 0.02)
_EXPONENT = 1.2
_IDS_PER_FEATURE = 1 << 20


def slot_files(settings: Settings) -> tuple[str, ...]:
    """Ten files of equal size, created if missing; tiny ones in smoke mode."""
    num_examples = settings.pick(smoke=64, real=EXAMPLES_PER_FILE)
    folder = MADE_HERE / settings.pick(smoke="slot_smoke", real="slot")
    paths = [folder / f"part-{number}.txt" for number in range(10)]
    if not all(path.is_file() for path in paths):
        say(f"making the data in {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        for number, path in enumerate(paths):
            _write(path, num_examples, seed=number)
    return tuple(map(str, paths))


def _write(path: Path, num_examples: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts_BF = rng.choice(_COUNTS, (num_examples, NUM_FEATURES), p=_SHARES)
    ranks_N = rng.zipf(_EXPONENT, int(counts_BF.sum())) % _IDS_PER_FEATURE
    features_N = np.repeat(np.tile(np.arange(NUM_FEATURES), num_examples), counts_BF.ravel())
    ids = iter((ranks_N + (features_N << 32)).tolist())
    clicks = rng.integers(0, 2, num_examples).tolist()
    aside = path.with_suffix(f".{os.getpid()}")
    with aside.open("w") as lines:
        for click, counts_F in zip(clicks, counts_BF.tolist(), strict=True):
            slots = (
                f"{count} " + " ".join(str(next(ids)) for _ in range(count)) for count in counts_F
            )
            lines.write(f"1 1 1 {click} {' '.join(slots)}\n")
    aside.replace(path)
