"""Folders train/ and test/ with small files in Criteo's format, learnable within seconds."""

from __future__ import annotations

import random
from pathlib import Path

NUM_TEST = 2000
_NUM_TRAIN, _REPEATS = 4000, 20


def write_criteo_folder(folder: Path, seed: int = 7, *, repeats: int = _REPEATS) -> None:
    """Every category agrees with the label in 7 of 10 examples; integers say nothing."""
    draw = random.Random(seed)
    train = "".join(_line(draw) for _ in range(_NUM_TRAIN))
    for name, text in (
        ("train/0.tsv", train * (repeats // 2)),
        ("train/1.tsv", train * (repeats // 2)),
        ("test/0.tsv", "".join(_line(draw) for _ in range(NUM_TEST))),
    ):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def _line(draw: random.Random) -> str:
    label = draw.randrange(2)
    integers = [str(draw.randrange(10)) if draw.random() < 0.9 else "" for _ in range(13)]
    agrees = [label if draw.random() < 0.7 else 1 - label for _ in range(26)]
    categories = [f"{2 * draw.randrange(5) + bit:08x}" for bit in agrees]
    return "\t".join([str(label), *integers, *categories]) + "\n"
