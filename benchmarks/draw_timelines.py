"""Draws the pictures of docs/consistency.md, docs/rows.md and docs/failures.md: what happens when.

python -m benchmarks.draw_timelines
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

_DOCS = Path(__file__).resolve().parents[1] / "docs"
_FONT = 'font-family="Helvetica, Arial, sans-serif"'
_WIDTH, _LEFT = 780, 150
_TRAIN, _WAIT, _SERVER, _GONE, _LINE, _TEXT = (
    *("#ddf4ff", "#ffffff", "#fff8c5", "#ffebe9"),
    *("#57606a", "#24292f"),
)

# The figures of a row: pushes by day of data, as many shows; the policy of its table.
SHOWS = {0: 1, 1: 1, 2: 4, 3: 2, 5: 3}
ADMITTED_AT, DECAY, THRESHOLD, DAYS = 3, 0.7, 0.8, 14


def consistency() -> str:
    """Steps of a fast and a slow worker: when each mode lets the fast one begin its next step."""
    fast, slow = 40, 70
    lines: list[str] = []
    y = 34
    for mode, promise, lead, window in (
        ("sync", "every step waits for all workers", 0, 1),
        ("bounded, staleness=2", "at most 2 steps ahead of the slowest", 1, 1),
        ("async", "waits for nobody", None, 1),
        ("geo, k=4", "rows of the worker; differences every 4 steps", None, 4),
    ):
        lines += [_text(16, y - 8, mode, bold=True), _text(_LEFT + 20, y - 8, promise)]
        slow_ends = [slow * (step + 1) for step in range(8)]
        for row, (worker, length) in enumerate((("fast worker", fast), ("slow worker", slow))):
            top, at = y + 30 * row, 0
            lines.append(_text(16, top + 16, worker))
            for step in range(_steps(length)):
                begin = at
                if worker == "fast worker" and lead is not None and step > lead:
                    begin = max(at, slow_ends[step - lead - 1])
                if begin > at:
                    lines.append(_box(_LEFT + at, top, begin - at, 22, _WAIT, dashed=True))
                if begin + length > 8 * slow:
                    break
                lines.append(_box(_LEFT + begin, top, length, 22, _TRAIN, str(step + 1)))
                at = begin + length
                if (step + 1) % window == 0:
                    seen_at = slow_ends[step] if mode == "sync" else at
                    lines.append(_mark(_LEFT + seen_at, top + 22))
        y += 98
    lines += [
        _mark(24, y - 22),
        _text(36, y - 14, "others see the push from here on"),
        _box(300, y - 28, 40, 18, _WAIT, dashed=True),
        _text(348, y - 14, "waits"),
    ]
    return _svg("What a fast and a slow worker do in each consistency mode", y, lines)


def row_life() -> str:
    """The score of a row over days of data, by the formulas of docs/rows.md."""
    score, seen, admitted, removed, bars = 0.0, 0, None, None, []
    for day in range(DAYS):
        if admitted is not None:
            score *= DECAY
        shows = SHOWS.get(day, 0)
        seen += shows
        if admitted is None and seen >= ADMITTED_AT:
            admitted = day
        if admitted is not None and removed is None:
            score += shows
            bars.append((day, score))
            if score * DECAY < THRESHOLD:
                removed = day
    assert admitted is not None
    assert removed is not None
    base, unit, per_day = 230, 32.0, (_WIDTH - _LEFT - 30) / DAYS
    lines = [
        _text(16, base - 110, "score"),
        _text(16, base - 92, f"decay_rate {DECAY}"),
        _text(16, base + 22, "day of data"),
    ]
    lines.append(_text(16, base + 44, "shows in pushes"))
    for day in range(DAYS):
        x = _LEFT + per_day * day
        lines.append(_text(x + per_day / 2, base + 22, str(day), anchor="middle"))
        shown = str(SHOWS.get(day, "")) or "-"
        lines.append(_text(x + per_day / 2, base + 44, shown, anchor="middle"))
    for day, value in bars:
        height = value * unit
        x = _LEFT + per_day * day
        lines.append(_box(x + 4, base - height, per_day - 8, height, _TRAIN))
        lines.append(_text(x + per_day / 2, base - height - 5, f"{value:.1f}", anchor="middle"))
    edge = base - THRESHOLD * unit
    lines.append(_path(f"M{_LEFT},{edge:g} H{_WIDTH - 20}", dashed=True))
    lines.append(_text(_WIDTH - 20, edge - 6, f"delete_threshold {THRESHOLD}", anchor="end"))
    for day, texts in (
        (0, ("counted,", "no row yet")),
        (admitted, ("admitted by", f"CountFilter({ADMITTED_AT})")),
        (removed + 1, ("shrink() removes", "the row: its score", "would fall below")),
    ):
        x = _LEFT + per_day * day
        for number, text in enumerate(texts):
            lines.append(_text(x + 4, 22 + 17 * number, text, bold=number == 0))
        lines.append(_path(f"M{x:g},10 V{base}"))
    lines.append(_path(f"M{_LEFT},{base} H{_WIDTH - 20}"))
    return _svg("The life of a row: counted, admitted, decayed, removed", base + 62, lines)


def server_dies() -> str:
    """A push before, during and after the death of a server that has a log."""
    lines: list[str] = []
    rows = {"worker": 30, "server": 110, "log on disk": 190}
    for name, y in rows.items():
        lines.append(_text(16, y + 20, name, bold=True))
    worker, server, log = rows.values()
    for x, width, text in (
        (0, 120, "push 7"),
        (140, 300, "push 8: sent again until answered"),
        (460, 130, "push 9"),
    ):
        lines.append(_box(_LEFT + x, worker, width, 30, _TRAIN, text))
    for x, width, fill, text in (
        (0, 190, _SERVER, "applies 7, then 8"),
        (190, 90, _GONE, "kill -9"),
        (280, 130, _SERVER, "reads the log"),
        (410, 180, _SERVER, "knows 8; applies 9"),
    ):
        lines.append(_box(_LEFT + x, server, width, 30, fill, text))
    lines.append(_box(_LEFT, log, 590, 30, _WAIT, "records: ... 7, 8 (before the answer), 9"))
    for x, begin, end in (
        (20, worker + 30, server),
        (60, server + 30, log),
        (100, server, worker + 30),
        (150, worker + 30, server),
        (180, server + 30, log),
        (345, log, server + 30),
        (420, worker + 30, server),
        (432, server, worker + 30),
        (480, worker + 30, server),
        (520, server + 30, log),
        (560, server, worker + 30),
    ):
        tip = end - (2 if end > begin else -2)
        lines.append(_path(f"M{_LEFT + x},{begin} V{tip}", arrow=True))
    lines.append(
        _text(16, 250, "The answer to push 8 is lost with the server. Its number is in the log, so")
    )
    lines.append(
        _text(
            16, 267, "the second sending is answered and not applied: nothing lost, nothing twice."
        )
    )
    return _svg("A server with --durability process is killed and restarted", 284, lines)


PICTURES = {
    "consistency.svg": consistency,
    "row_life.svg": row_life,
    "server_dies.svg": server_dies,
}


def _steps(length: int) -> int:
    return 8 * 70 // length + 1


def _svg(title: str, height: int, lines: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{_WIDTH}" height="{height}"'
        f' viewBox="0 0 {_WIDTH} {height}">\n<title>{escape(title)}</title>\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
        f' markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{_LINE}"/></marker>'
        '</defs>\n<rect width="100%" height="100%" fill="#ffffff"/>'
    )
    return "\n".join([head, *lines, "</svg>"]) + "\n"


def _box(
    x: float, y: float, width: float, height: float, fill: str, text: str = "", dashed: bool = False
) -> str:
    dashes = ' stroke-dasharray="3 3"' if dashed else ""
    box = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"'
        f' stroke="{_LINE}"{dashes}/>'
    )
    return box + (_text(x + width / 2, y + height / 2 + 5, text, anchor="middle") if text else "")


def _mark(x: float, y: float) -> str:
    return f'<path d="M{x - 5:g},{y + 9:g} h10 l-5,-8 z" fill="{_LINE}"/>'


def _path(path: str, *, dashed: bool = False, arrow: bool = False) -> str:
    more = ' stroke-dasharray="5 4"' if dashed else ""
    more += ' marker-end="url(#tip)"' if arrow else ""
    return f'<path d="{path}" fill="none" stroke="{_LINE}"{more}/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="13" fill="{_TEXT}"'
        f" {_FONT}{weight}>{escape(text)}</text>"
    )


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (_DOCS / name).write_text(draw())
