"""How far a fit is, as a checkpoint records it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trireme.train.dealt_streams import DealtStreams


@dataclass
class FitProgress:
    """How far a fit is."""

    begun_at: int = 0  # epochs made before it
    num_epochs: int = 0  # epochs made until now
    is_under_way: bool = False  # an epoch has begun and not ended
    figures: dict[str, float] = field(default_factory=dict)  # of the last epoch
    callbacks: dict[str, Any] = field(default_factory=dict)  # their states, by name
    dealt: DealtStreams | None = None  # the streams of the epoch, if others had begun it
    cut: str = ""  # how worker 0's data is cut into batches, see cut_of

    def to_json(self) -> dict[str, Any]:
        values = {**vars(self), "figures": figures_to_json(self.figures)}
        if self.dealt is None:
            del values["dealt"]
        else:
            values["dealt"] = self.dealt.to_json()
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FitProgress:
        """Missing values are those of a run that has not trained."""
        return cls(
            int(values.get("begun_at", 0)),
            int(values.get("num_epochs", 0)),
            bool(values.get("is_under_way", False)),
            figures_from_json(values.get("figures", {})),
            dict(values.get("callbacks", {})),
            DealtStreams.from_json(values["dealt"]) if "dealt" in values else None,
            str(values.get("cut", "")),
        )


def figures_to_json(figures: Mapping[str, float]) -> dict[str, float | None]:
    """NaN, which JSON does not have, becomes null."""
    return {name: None if math.isnan(value) else value for name, value in figures.items()}


def figures_from_json(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: math.nan if value is None else float(value) for name, value in values.items()}
