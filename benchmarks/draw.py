"""Draws the pictures of README.md and docs/tiers.md from results.

python -m benchmarks.draw
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
RESULTS = _ROOT / "benchmarks" / "results" / "all_epyc-2core_202611.jsonl"
PICTURE = _ROOT / "docs" / "throughput.svg"
TIER_RESULTS = _ROOT / "benchmarks" / "results" / "ssd_memory_epyc-2core_202611.jsonl"
TIER_PICTURE = _ROOT / "docs" / "tiers.svg"

# Label, metric without the batch size, rival (None: ours), colour.
_BARS = (
    ("Trireme, 1 server + 1 worker", "async_1x1", None, "#1f6feb"),
    ("Paddle 2.6, 1 server + 1 worker", "async_1x1", "paddle", "#8c959f"),
    ("the same, MKL tuned for this CPU", "async_1x1", "paddle_tuned", "#afb8c1"),
    ("Trireme, one process", "embedded", None, "#54aeff"),
    ("PyTorch, nn.Embedding, one process", "embedded", "torch", "#d0d7de"),
)
_BATCH_SIZES = (512, 4096)
_WIDTH, _LEFT, _BAR_MAX, _STEP, _THICKNESS = 760, 262, 420, 24, 16
_FONT = 'font-family="Helvetica, Arial, sans-serif"'


@dataclass(frozen=True)
class _Group:
    """Bars under a title: (label, value, what stands beside it, colour)."""

    title: str
    bars: Sequence[tuple[str, float, str, str]]


def draw(results: Path = RESULTS) -> str:
    """The picture of README.md as SVG text; the same results give the same bytes."""
    values = dict(_read(results))
    largest = max(
        values[metric, batch, rival] for _, metric, rival, _ in _BARS for batch in _BATCH_SIZES
    )
    groups = []
    for batch in _BATCH_SIZES:
        bars = []
        for label, metric, rival, colour in _BARS:
            value = values[metric, batch, rival]
            bars.append((label, value / largest, f"{value:,.0f}", colour))
        groups.append(_Group(f"CTR-DNN, batches of {batch}, examples/s on 2 cores", bars))
    return _svg("Examples per second of Trireme, Paddle and PyTorch", groups)


def draw_tiers(results: Path = TIER_RESULTS) -> str:
    """The picture of docs/tiers.md: what memory of this share of a table's rows does."""
    runs = [json.loads(line) for line in results.read_text().splitlines()]
    fastest = max(run["examples_per_s"] for run in runs)
    speed, hits = [], []
    for run in runs:
        share = (
            f"memory of {run['share']:.0%} of the rows' bytes" if run["memory"] else "all in memory"
        )
        value = run["examples_per_s"]
        speed.append((share, value / fastest, f"{value:,.0f}", "#1f6feb"))
        if run["memory"]:
            rate = 1 - (run["misses"] + run["fetched"]) / (run["hits"] + run["misses"])
            hits.append((share, rate, f"{rate:.0%}", "#54aeff"))
    return _svg(
        "Examples per second and hit rate with less memory than rows",
        [
            _Group("CTR-DNN, batches of 4096, examples/s on 2 cores", speed),
            _Group("Distinct keys of a batch whose rows are in memory", hits),
        ],
    )


def _svg(title: str, groups: Sequence[_Group]) -> str:
    lines, y = [], 30
    for group in groups:
        lines.append(_text(16, y, group.title, bold=True))
        y += 14
        for label, share, beside, colour in group.bars:
            width = round(_BAR_MAX * share, 1)
            lines.append(_text(_LEFT - 8, y + 13, label, anchor="end"))
            lines.append(
                f'<rect x="{_LEFT}" y="{y}" width="{width}" height="{_THICKNESS}" fill="{colour}"/>'
            )
            lines.append(_text(_LEFT + width + 6, y + 13, beside))
            y += _STEP
        y += 28
    height = y - 16
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}"'
        f' viewBox="0 0 {_WIDTH} {height}">\n<title>{title}</title>\n'
        '<rect width="100%" height="100%" fill="#ffffff"/>'
    )
    return "\n".join([head, *lines, "</svg>"]) + "\n"


def _read(results: Path) -> Iterator[tuple[tuple[str, int, str | None], float]]:
    """(metric, batch size, rival or None for ours) and the value, the first of each."""
    seen = set()
    for line in results.read_text().splitlines():
        result = json.loads(line)
        metric, _, batch = result.get("metric", "").rpartition("_b")
        if result["bench"] != "ctr" or metric == "auc":
            continue
        for rival, value in ((None, result["value"]), (result["vs"], result["vs_value"])):
            key = (metric, int(batch), rival)
            if key not in seen:
                seen.add(key)
                yield key, value


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="13" fill="#24292f"'
        f" {_FONT}{weight}>{text}</text>"
    )


if __name__ == "__main__":
    PICTURE.write_text(draw())
    TIER_PICTURE.write_text(draw_tiers())
