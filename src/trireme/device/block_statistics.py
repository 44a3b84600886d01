"""How an update changes the statistics of the rows of a block: core/store/statistics.h on tensors,
with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trireme.device.block_layout import RowTensors
from trireme.device.step_values import StepValues, powers
from trireme.errors import BadRequest
from trireme.policy import ScorePolicy
from trireme.rows.row_statistics import DAY_S

_SIGN = -(2**31)


@dataclass(frozen=True, eq=False)
class UpdateFacts:
    """What an update brings besides gradients.

    time: data time in seconds; 0: none. version: that changed rows are stamped with.
    show_click: (K, 2) float32, of the updated slots in order; None: the table is not scored.
    features: (K,) int32, bits of uint32; None: features stay.
    """

    time: int = 0
    version: int = 0
    show_click: Tensor | None = None
    features: Tensor | None = None


class RowStep(NamedTuple):
    """What changes rows in a step beside gradients: values of the rule, and facts."""

    values: StepValues
    facts: UpdateFacts


def count(rows: RowTensors, slots: Tensor, facts: UpdateFacts, policy: Mapping[str, Any]) -> None:
    """Note an update of rows, (K,) int64 distinct slots. policy: of the table's schema. Raises as
    `check_shows`.
    """
    check_shows(facts, policy)
    stamps = rows.stamps[slots]
    time = torch.full_like(stamps[:, 1], as_int32(facts.time))
    if facts.show_click is not None:
        _count_shows(rows, slots, stamps[:, 1], facts, policy)
    is_later = (stamps[:, 1] ^ _SIGN) > (time ^ _SIGN)
    stamps[:, 1] = torch.where(is_later, stamps[:, 1], time)
    stamps[:, 0] = as_int32(facts.version)
    rows.stamps[slots] = stamps


def check_shows(facts: UpdateFacts, policy: Mapping[str, Any]) -> None:
    """Raises BadRequest: shows for a table without scores, or none for one with."""
    is_scored = policy["name"] == ScorePolicy.name
    if (facts.show_click is not None) != is_scored:
        raise BadRequest(
            f"RowBlock: expected show_click {'for' if is_scored else 'only for'} a scored table,"
            f" found {'none' if is_scored else 'some'}"
        )


def _count_shows(
    rows: RowTensors, slots: Tensor, times: Tensor, facts: UpdateFacts, policy: Mapping[str, Any]
) -> None:
    assert facts.show_click is not None
    pushed = facts.show_click.to(torch.float64)
    from_s = times.long() & 0xFFFFFFFF
    days = facts.time // DAY_S - from_s // DAY_S
    days = torch.where((from_s == 0) | (from_s >= facts.time), 0, days)
    decay = powers(float(policy["decay_rate"]), days)[:, None]
    rows.shows[slots] = rows.shows[slots] * decay + pushed
    show, click = pushed.unbind(1)
    gained = (show - click) * policy["nonclk_coeff"] + click * policy["click_coeff"]
    rows.delta_scores[slots] = (rows.delta_scores[slots].double() + gained).to(torch.float32)
    if facts.features is not None:
        rows.features[slots] = facts.features


def as_int32(number: int) -> int:
    """The int32 with the bits of a uint32."""
    return number - 2**32 if number >= 2**31 else number
