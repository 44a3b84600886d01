"""Policies of tables: who gets a row, what a row remembers, how long it lives, what is exported.

A policy's numbers are part of the table's schema (`fixed`), so all servers and checkpoints agree on
them. Time is data time: seconds that pushes carry, whole days of 86,400 s.

    score(show, click) = (show - click) * nonclk_coeff + click * click_coeff

Source of the score, the fields and the accessors' defaults: Paddle's CtrAccessorParameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from trireme.errors import BadRequest

SKETCH_BYTES_MIN = 4096 * 64  # one cache line per bucket


def _check(subject: str, **conditions: tuple[bool, str, object]) -> None:
    for field, (holds, expected, found) in conditions.items():
        if not holds:
            raise BadRequest(f"{subject}: expected {field} {expected}, found {found!r}")


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ShowClick:
    """The columns of a batch that say how often each example was shown and clicked."""

    show: str
    click: str

    def __post_init__(self) -> None:
        for field in ("show", "click"):
            value = getattr(self, field)
            ok = isinstance(value, str) and value != ""
            _check("ShowClick", **{field: (ok, "the name of a column", value)})


# ---- admission ----


@dataclass(frozen=True)
class Admission:
    """Base of the rules that decide which new keys get a row. Without one all do.

    A key that is not admitted keeps answering what an absent key answers; its gradient is dropped.
    """

    name: ClassVar[str]

    def fixed(self) -> dict[str, Any]:
        """What the table's schema fixes."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"name": self.name, **own}


@dataclass(frozen=True)
class CountFilter(Admission):
    """A key gets its row with the push that makes its occurrences `n`; that push is the first whose
    gradient counts.

    sketch_bytes: None: counts are exact, in 16 to 23 bytes for every key that was seen and has no
        row; they are as many as there are such keys. Else: a count-min sketch of so many bytes for
        the whole table. Each of 4096 buckets has four rows of cells (of one byte for n up to 255,
        two up to 65535, else four). A key's estimate is never below its count, and above it by more
        than e / (cells of a row) * (occurrences counted in the bucket) with probability e^-4 at
        most: a key may be admitted early, never late. A key that has lost its row gets it back at
        once.

    Where the policy has ttl_s or delete_after_unseen_days, shrink() forgets the exact counts of
    keys that were not seen for longer, and halves a sketch once in that time.
    """

    name: ClassVar[str] = "count_filter"
    n: int
    sketch_bytes: int | None = None

    def __post_init__(self) -> None:
        _check("CountFilter", n=(type(self.n) is int and 1 <= self.n < 2**31, ">= 1", self.n))
        size = self.sketch_bytes
        if size is not None:
            _check(
                "CountFilter",
                sketch_bytes=(
                    type(size) is int and SKETCH_BYTES_MIN <= size < 2**40,
                    f"None or at least {SKETCH_BYTES_MIN}",
                    size,
                ),
            )


@dataclass(frozen=True)
class Probability(Admission):
    """Every push of a key without a row gives it one with probability `p`, however often the key
    occurs in it. The draw is a hash of (table seed, key, stream, sequence), so it is the same in a
    retry, and on any number of servers; in sync it is that of the step's first stream.
    """

    name: ClassVar[str] = "probability"
    p: float

    def __post_init__(self) -> None:
        ok = _is_number(self.p) and 0 < self.p <= 1
        _check("Probability", p=(ok, "in (0, 1]", self.p))


@dataclass(frozen=True)
class ScoreFilter(Admission):
    """A key gets its row with the first push whose own score is at least `threshold`. The table
    needs a ScorePolicy.
    """

    name: ClassVar[str] = "score_filter"
    threshold: float

    def __post_init__(self) -> None:
        _check("ScoreFilter", threshold=(_is_number(self.threshold), "finite", self.threshold))


# ---- life ----


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How long rows live, by the time of their last push.

    Args:
        ttl_s: rows that no push has touched for longer are removed by shrink(); None: never.
        max_rows, max_bytes: of the whole table, memory for its rows; the least recently pushed rows
            go first. Each bucket holds at most its share. None: no limit.
    """

    name: ClassVar[str] = "plain"

    ttl_s: int | None = None
    max_rows: int | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in ("ttl_s", "max_rows", "max_bytes"):
            value = getattr(self, field)
            ok = value is None or (type(value) is int and 1 <= value < 2**63)
            _check(type(self).__name__, **{field: (ok, "None or a whole number >= 1", value)})

    def fixed(self) -> dict[str, Any]:
        """What the table's schema fixes: numbers by name."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        own.pop("show_click", None)  # the workers' business: names of columns
        return {"name": self.name, **own}


@dataclass(frozen=True, kw_only=True)
class ScorePolicy(Policy):
    """Rows count shows and clicks, fade from day to day, and are kept and exported by their score.

    Args:
        show_click: columns of the batch; None: every occurrence of a key is one show and no click.
        nonclk_coeff, click_coeff: of the score.
        decay_rate: show and click are multiplied by it for every day of data time.
        delete_threshold: shrink() removes rows with a lower score.
        delete_after_unseen_days: shrink() removes rows without a push for more days; None: never.
        base_threshold: score that a row needs to be exported (base, delta).
        delta_threshold: score gained since the last export that a row needs for a delta.
        delta_keep_days: rows without a push for more days are not exported; None: all are.
        embedx_threshold: rows have weight 0 alone, their head, until their score reaches it; None:
            rows are whole from the start.
        pulls_statistics: lookups answer show and click before the weights.
    """

    name: ClassVar[str] = "score"

    show_click: ShowClick | None = None
    nonclk_coeff: float = 0.1
    click_coeff: float = 1.0
    decay_rate: float = 1.0
    delete_threshold: float = 0.0
    delete_after_unseen_days: int | None = None
    base_threshold: float = 0.0
    delta_threshold: float = 0.0
    delta_keep_days: int | None = None
    embedx_threshold: float | None = None
    pulls_statistics: bool = False

    def __post_init__(self) -> None:
        Policy.__post_init__(self)
        kind = type(self).__name__
        columns = self.show_click
        ok = columns is None or isinstance(columns, ShowClick)
        _check(kind, show_click=(ok, "None or a ShowClick", columns))
        for field in (
            "nonclk_coeff",
            "click_coeff",
            "delete_threshold",
            "base_threshold",
            "delta_threshold",
        ):
            value = getattr(self, field)
            _check(kind, **{field: (_is_number(value), "a finite number", value)})
        rate, threshold = self.decay_rate, self.embedx_threshold
        pulls = self.pulls_statistics
        _check(
            kind,
            decay_rate=(_is_number(rate) and 0 < rate <= 1, "in (0, 1]", rate),
            embedx_threshold=(
                threshold is None or _is_number(threshold),
                "None or a finite number",
                threshold,
            ),
            pulls_statistics=(type(pulls) is bool, "True or False", pulls),
        )
        for field in ("delete_after_unseen_days", "delta_keep_days"):
            days = getattr(self, field)
            ok = days is None or (type(days) is int and 0 <= days < 2**31)
            _check(kind, **{field: (ok, "None or a number of days >= 0", days)})

    def score(self, show: Any, click: Any) -> Any:
        """What so many shows and clicks are worth; numbers, or arrays of them."""
        return (show - click) * self.nonclk_coeff + click * self.click_coeff


@dataclass(frozen=True, kw_only=True)
class SparseAccessor(ScorePolicy):
    """Fleet's default accessor: its numbers, lookups answer the weights alone."""

    decay_rate: float = 0.98
    delete_threshold: float = 0.8
    delete_after_unseen_days: int | None = 30
    base_threshold: float = 1.5
    delta_threshold: float = 0.25
    delta_keep_days: int | None = 16
    embedx_threshold: float | None = 10.0


@dataclass(frozen=True, kw_only=True)
class CtrCommonAccessor(SparseAccessor):
    """Fleet's accessor of that name: lookups answer show and click before the weights."""

    pulls_statistics: bool = True


@dataclass(frozen=True, kw_only=True)
class CtrDoubleAccessor(CtrCommonAccessor):
    """Fleet's accessor of that name. There it keeps show and click in 64 bits; here every
    ScorePolicy does.
    """


ACCESSORS: dict[str, type[SparseAccessor]] = {
    kind.__name__: kind for kind in (SparseAccessor, CtrCommonAccessor, CtrDoubleAccessor)
}

UNSET_ACCESSOR: dict[str, Any] = {
    "base_threshold": 0.0,
    "delta_threshold": 0.0,
    "decay_rate": 1.0,
    "delete_threshold": 0.0,
    "embedx_threshold": None,
}
"""What Fleet's Python fills in for the numbers of an accessor that a script does not give: rows do
not fade, and leave when they have not been seen for 30 days. Its embedx_threshold is 0 then, which
every row has after its first update: there Fleet's rules begin the tail in any case."""


def admission_of(fixed: Mapping[str, Any]) -> Admission:
    """The inverse of `Admission.fixed`. Raises BadRequest for anything else."""
    kinds: dict[str, type[Admission]] = {
        kind.name: kind for kind in (CountFilter, Probability, ScoreFilter)
    }
    admission: Admission = _built(fixed, kinds, "admission")
    return admission


def policy_of(fixed: Mapping[str, Any]) -> Policy:
    """The inverse of `Policy.fixed`, up to the names of columns. Raises BadRequest for anything
    else.
    """
    kinds: dict[str, type[Policy]] = {kind.name: kind for kind in (Policy, ScorePolicy)}
    policy: Policy = _built(fixed, kinds, "policy")
    return policy


def _built(fixed: Mapping[str, Any], kinds: Mapping[str, Any], what: str) -> Any:
    kind = kinds.get(str(fixed.get("name")))
    if kind is None:
        raise BadRequest(f"{what}: expected one of {sorted(kinds)}, found {fixed!r}")
    values = {name: value for name, value in fixed.items() if name != "name"}
    names = {field.name for field in fields(kind)} - {"show_click"}
    if values.keys() != names:
        raise BadRequest(f"{what}: expected {sorted(names)}, found {sorted(map(str, values))}")
    return kind(**values)
