"""Sample data in the text forms that the reader scripts here read, easy enough to learn."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

HERE = Path(__file__).parent
NUM_SLOTS = 300


def copy(name: str, folder: Path) -> Path:
    """The folder of a configuration with its sample data, as a user has it."""
    shutil.copytree(HERE / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
    if name == "slot_dnn":
        write_slots(folder / "data")
    else:
        write_clicks(folder / "data" / "sample_data" / "train", num_files=2, num_lines=1500, seed=1)
        write_clicks(folder / "data" / "sample_data" / "test", num_files=1, num_lines=500, seed=2)
    return folder


def write_clicks(folder: Path, *, num_files: int, num_lines: int, seed: int) -> None:
    """name:value pairs of dnn and wide_deep; ids agree with the click in 7 of 10 cases, and a
    tenth of the features is absent.
    """
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    for number in range(num_files):
        lines = []
        for _ in range(num_lines):
            click = draw.randrange(2)
            dense = [f"dense_feature:{draw.random():.3f}" for _ in range(13)]
            sparse = [
                f"{name}:{_key(draw, click, name)}" for name in range(1, 27) if draw.random() < 0.9
            ]
            lines.append(" ".join([f"click:{click}", *dense, *sparse]))
        (folder / f"part-{number}").write_text("\n".join(lines) + "\n")


def write_slots(folder: Path, *, num_lines: int = 150, seed: int = 3) -> None:
    """show, click and some of the slots 2 to 301, some twice; by day and half hour."""
    draw = random.Random(seed)
    for day, time in (("20190720", "0000"), ("20190720", "0030"), ("20190721", "0000")):
        lines = []
        for _ in range(num_lines):
            click = draw.randrange(2)
            slots = draw.choices(range(2, 2 + NUM_SLOTS), k=60)
            pairs = [f"{slot}:{_key(draw, click, slot)}" for slot in slots]
            lines.append(" ".join(["show:1", f"click:{click}", *pairs]))
        (folder / day / time).mkdir(parents=True)
        (folder / day / time / "part-0").write_text("\n".join(lines) + "\n")


def _key(draw: random.Random, click: int, feature: int) -> int:
    bit = click if draw.random() < 0.7 else 1 - click
    return feature * 1000 + 2 * draw.randrange(1, 6) + bit
