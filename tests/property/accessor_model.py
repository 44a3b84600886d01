"""Fleet's accessors in plain Python: every row carries counts, updated once a day by shrink and by
the save of the batch model.
"""

from __future__ import annotations

from dataclasses import dataclass

from trireme.policy import ScorePolicy


@dataclass
class Row:
    show: float = 0.0
    click: float = 0.0
    delta_score: float = 0.0
    unseen_days: int = 0
    slot: int = 0


class Accessor:
    """CtrCommonAccessor, CtrDoubleAccessor and SparseAccessor, which count alike; `numbers` are
    theirs by our names.
    """

    def __init__(self, numbers: ScorePolicy) -> None:
        self.numbers = numbers
        self.rows: dict[int, Row] = {}

    def score(self, show: float, click: float) -> float:
        n = self.numbers
        return (show - click) * n.nonclk_coeff + click * n.click_coeff

    def update(self, key: int, slot: int, show: float, click: float) -> None:
        row = self.rows.setdefault(key, Row())
        row.show += show
        row.click += click
        row.slot = slot
        row.delta_score += self.score(show, click)
        row.unseen_days = 0

    def shrink(self) -> int:
        """Rows removed."""
        n = self.numbers
        for row in self.rows.values():
            row.show *= n.decay_rate
            row.click *= n.decay_rate
        gone = [
            key
            for key, row in self.rows.items()
            if self.score(row.show, row.click) < n.delete_threshold
            or (
                n.delete_after_unseen_days is not None
                and row.unseen_days > n.delete_after_unseen_days
            )
        ]
        for key in gone:
            del self.rows[key]
        return len(gone)

    def save(self, mode: int) -> set[int]:
        """Keys that a save in Fleet's mode writes; counts change as they do there."""
        if mode in (0, 3):
            saved = set(self.rows)
        else:
            saved = {key for key, row in self.rows.items() if self._is_exported(row, mode)}
        for key, row in self.rows.items():
            if mode in (1, 2) and key in saved:
                row.delta_score = 0.0
            if mode == 3:
                row.unseen_days += 1
        return saved

    def _is_exported(self, row: Row, mode: int) -> bool:
        n = self.numbers
        return (
            self.score(row.show, row.click) >= n.base_threshold
            and row.delta_score >= (n.delta_threshold if mode == 1 else 0.0)
            and (n.delta_keep_days is None or row.unseen_days <= n.delta_keep_days)
        )
