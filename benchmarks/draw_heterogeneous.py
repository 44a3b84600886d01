"""Draws the picture of docs/heterogeneous.md: who computes what, and what flows between them.

python -m benchmarks.draw_heterogeneous
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "heterogeneous.svg"
_WIDTH, _HEIGHT = 780, 406
_FONT = 'font-family="Helvetica, Arial, sans-serif"'
_FILL = {"worker": "#ddf4ff", "compute": "#dafbe1", "server": "#fff8c5", "stage": "#ffffff"}


@dataclass(frozen=True)
class _Box:
    """x, y: of the upper left corner. lines: the first is bold. indent: of the lines."""

    kind: str
    x: int
    y: int
    width: int
    height: int
    lines: tuple[str, ...]
    indent: int = 10


_BOXES = (
    _Box("server", 20, 20, 740, 54, ("servers", "rows of the tables; dense parameters as blocks")),
    _Box("worker", 20, 150, 330, 200, ("worker, one of m",), 190),
    _Box("stage", 40, 182, 130, 50, ("read, plan, pull", "batches of a stream")),
    _Box("stage", 200, 182, 130, 50, ("stage cpu", "rows and columns")),
    _Box("stage", 200, 282, 130, 50, ("stage cpu_2", "and the loss")),
    _Box("stage", 40, 282, 130, 50, ("push", "(stream, sequence)")),
    _Box("compute", 550, 150, 210, 200, ("compute worker, one of n", "label gpu")),
    _Box("stage", 590, 210, 130, 50, ("stage gpu", "forward")),
    _Box("stage", 590, 282, 130, 50, ("stage gpu", "backward")),
)
# From, to, what flows, and where that is written; gradients are dashed.
_ARROWS = (
    ((105, 74), (105, 182), ("rows, weights",), (112, 118), False),
    ((170, 207), (200, 207), (), (0, 0), False),
    ((330, 200), (590, 225), ("tensors by name, weights,", "random numbers"), (360, 178), False),
    ((590, 245), (330, 295), ("outputs, buffers",), (380, 250), False),
    ((330, 310), (590, 302), ("gradients of outputs",), (390, 297), True),
    ((590, 322), (330, 335), ("gradients of inputs and weights",), (355, 352), True),
    ((655, 260), (655, 282), ("graph",), (662, 275), False),
    ((200, 307), (170, 307), (), (0, 0), True),
    ((40, 300), (28, 74), ("gradients",), (36, 138), True),
)


def draw() -> str:
    """The picture as SVG text."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}"'
        f' viewBox="0 0 {_WIDTH} {_HEIGHT}">',
        "<title>Who computes what in a heterogeneous job</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8"'
        ' markerHeight="8" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#57606a"/></marker>'
        "</defs>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for box in _BOXES:
        lines.append(
            f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6"'
            f' fill="{_FILL[box.kind]}" stroke="#57606a"/>'
        )
        for i, text in enumerate(box.lines):
            lines.append(_text(box.x + box.indent, box.y + 20 + 18 * i, text, bold=i == 0))
    for (x1, y1), (x2, y2), texts, (x, y), is_gradient in _ARROWS:
        dashes = ' stroke-dasharray="5 4"' if is_gradient else ""
        lines.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#57606a"{dashes}'
            ' marker-end="url(#tip)"/>'
        )
        lines += [_text(x, y + 15 * i, text) for i, text in enumerate(texts)]
    lines.append(
        _text(20, 378, "Dashed: gradients. Only the worker pushes: a batch is applied once,")
    )
    lines.append(_text(20, 394, "whichever compute workers have died meanwhile."))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _text(x: int, y: int, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="13" fill="#24292f" {_FONT}{weight}>{text}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw())
