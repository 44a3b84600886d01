"""The loss and metrics that a worker reports while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trireme.errors import BadRequest
from trireme.protocol.wire import need

FIGURES_MAX = 32
FIGURE_NAME_MAX = 64


def figures_from_wire(body: Mapping[str, Any]) -> dict[str, float]:
    """By name, at most FIGURES_MAX; empty if the worker shows none. Raises BadRequest."""
    figures = need({"figures": {}, **body}, "figures", dict)
    names = list(figures)
    is_short = all(isinstance(name, str) and len(name) <= FIGURE_NAME_MAX for name in names)
    if len(names) > FIGURES_MAX or not is_short:
        raise BadRequest(
            f"message: expected at most {FIGURES_MAX} figures with names of at most"
            f" {FIGURE_NAME_MAX} characters, found {names}"[:500]
        )
    return {name: need(figures, name, float) for name in names}
