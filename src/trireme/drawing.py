"""Plain text: aligned columns, bars, numbers and sizes."""

import math
from collections.abc import Sequence

BAR = 40


def columns(lines: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Aligned lines: the first `left` columns to the left, the others to the right."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def bars(labels: Sequence[str], counts: Sequence[int]) -> list[str]:
    """A bar for each count. The largest is BAR wide; every count above 0 has a bar."""
    largest, total = max(counts, default=0) or 1, sum(counts) or 1
    cells = [
        [label, f"{count:,}", f"{100 * count / total:.1f} %"]
        for label, count in zip(labels, counts, strict=True)
    ]
    widths = [math.ceil(BAR * count / largest) for count in counts]
    lines = columns(cells, left=0)
    return [f"{line}  {'#' * width}".rstrip() for line, width in zip(lines, widths, strict=True)]


def number(value: float) -> str:
    """A number with five significant digits; "-" for NaN."""
    return "-" if math.isnan(value) else f"{value:.5g}"


def size(num_bytes: float) -> str:
    """A number of bytes, >= 0, in the unit with one to four digits before the point."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if num_bytes < 1024 or unit == "PiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")
