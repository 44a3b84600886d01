"""What a worker reports of the compute workers of a label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from trireme.errors import BadRequest
from trireme.label import is_label
from trireme.protocol.wire import need

LABELS_MAX = 16


@dataclass(frozen=True, kw_only=True)
class LabelUse:
    """As one worker uses the compute workers of a label.

    Attributes:
        compute_workers: of the job. reachable: of them, as far as this worker knows.
        credits: batches that this worker may have in flight. in_flight: batches that it has.
        batches: computed for it so far.
        failovers: calls that another compute worker got because one did not answer or was full.
        waited_s: seconds that this worker waited for these batches, all credits together.
        computed_s: seconds that compute workers computed them.
    """

    compute_workers: int
    reachable: int
    credits: int
    in_flight: int
    batches: int = 0
    failovers: int = 0
    waited_s: float = 0.0
    computed_s: float = 0.0

    def to_wire(self) -> dict[str, float]:
        return asdict(self)

    @staticmethod
    def from_wire(body: Any) -> LabelUse:
        """Raises BadRequest."""
        kinds: dict[str, type[Any]] = {"float": float, "int": int}
        return LabelUse(**{f.name: need(body, f.name, kinds[str(f.type)]) for f in FIELDS})


FIELDS = fields(LabelUse)


def uses_from_wire(body: Mapping[str, Any]) -> dict[str, LabelUse]:
    """By label, at most LABELS_MAX. Raises BadRequest."""
    uses = need({"labels": {}, **body}, "labels", dict)
    if len(uses) > LABELS_MAX or not all(isinstance(u, str) and is_label(u) for u in uses):
        raise BadRequest(
            f"message: expected at most {LABELS_MAX} labels such as gpu, found {list(uses)}"[:500]
        )
    return {label: LabelUse.from_wire(use) for label, use in uses.items()}
