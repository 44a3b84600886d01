"""How far a fit is, as a checkpoint records it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FitProgress:
    """begun_at: epochs made before the fit. num_epochs: epochs made until now. is_under_way:
    whether an epoch has begun and not ended. figures: of the last epoch.
    """

    begun_at: int = 0
    num_epochs: int = 0
    is_under_way: bool = False
    figures: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        figures = {k: None if math.isnan(v) else v for k, v in self.figures.items()}
        return {**vars(self), "figures": figures}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FitProgress:
        """Missing values are those of a run that has not trained."""
        figures = {
            k: math.nan if v is None else float(v) for k, v in values.get("figures", {}).items()
        }
        return cls(
            int(values.get("begun_at", 0)),
            int(values.get("num_epochs", 0)),
            bool(values.get("is_under_way", False)),
            figures,
        )
