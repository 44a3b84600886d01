"""The data: the folder of the rivals' gen_criteo.py (tsv, multislot, npz, and the same in test).

Smoke mode uses a few small TSV files of its own instead.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness import Absent, Settings, say
from benchmarks.process import run_process

EXAMPLES_PER_FILE = 25_000  # of gen_criteo.py with its defaults: 32 files, and 2 to test
NUM_FILES = 32
MADE_HERE = Path(__file__).resolve().parents[1] / "build" / "bench"
_SMOKE_EXAMPLES = 2_000
_SMOKE_FILES = 4
_MAKE_TIMEOUT_S = 600


@dataclass(frozen=True)
class Files:
    """Criteo TSV files, in order."""

    train: tuple[str, ...]
    test: tuple[str, ...]


def tsv_files(settings: Settings) -> Files:
    """Our training files: the same examples as the rivals', as text.

    Raises:
        Absent: the data is not here and cannot be made.
    """
    folder = _smoke_folder() if settings.is_smoke else rivals_folder(settings)
    num_train = _SMOKE_FILES if settings.is_smoke else NUM_FILES
    train = tuple(str(folder / "tsv" / f"part-{k}.tsv") for k in range(num_train))
    test = tuple(str(folder / "test" / "tsv" / f"part-{k}.tsv") for k in range(2))
    for path in (*train, *test):
        if not Path(path).is_file():
            raise Absent(f"expected gen_criteo.py's files in {folder}, found no {path}")
    return Files(train, test)


def rivals_folder(settings: Settings) -> Path:
    """The folder that all contestants read; created unless --data names one.

    Raises:
        Absent: no --data, and no generator among the rivals' scripts; or smoke mode.
    """
    if settings.is_smoke:
        raise Absent("it needs the large data, which smoke mode does without")
    if settings.data is not None:
        return Path(settings.data)
    folder = MADE_HERE / "criteo"
    if not (folder / "meta.json").is_file():
        script = Path(settings.rivals) / "gen_criteo.py"
        if not script.is_file():
            raise Absent(f"no data: no {script} to make it, and no --data FOLDER")
        say(f"making the data in {folder} (1.1 GB, half a minute)")
        # meta.json is the last file that it writes.
        run_process([sys.executable, str(script), f"--out={folder}"], timeout_s=_MAKE_TIMEOUT_S)
    return folder


def _smoke_folder() -> Path:
    folder = MADE_HERE / "criteo_smoke"
    for number in range(_SMOKE_FILES):
        _write(folder / "tsv" / f"part-{number}.tsv", seed=number)
    for number in range(2):
        _write(folder / "test" / "tsv" / f"part-{number}.tsv", seed=100 + number)
    return folder


def _write(path: Path, *, seed: int) -> None:
    """Write random labels, small integers and ids: enough to run everything, nothing to learn."""
    if path.is_file():
        return
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, _SMOKE_EXAMPLES)
    integers = rng.integers(0, 100, (_SMOKE_EXAMPLES, 13))
    ids = rng.zipf(1.2, (_SMOKE_EXAMPLES, 26)) % (1 << 32)
    lines = (
        "\t".join([str(label), *map(str, numbers), *(f"{i:08x}" for i in row)]) + "\n"
        for label, numbers, row in zip(labels, integers, ids, strict=True)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text("".join(lines))
    aside.replace(path)
