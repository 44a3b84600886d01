"""Policies of tables: which keys get rows, how long rows live, and which are exported.

The numbers of a policy are part of the table's schema (`fixed`), so all servers and checkpoints
agree on them. Time is data time, in seconds that pushes carry; a day has 86,400 s.

    score(show, click) = (show - click) * nonclk_coeff + click * click_coeff

Source of the score, the fields and the accessors' defaults: Paddle's CtrAccessorParameter.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from trireme.errors import BadRequest, check_values

SKETCH_BYTES_MIN = 4096 * 64  # one cache line per bucket


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ShowClick:
    """The columns of a batch with the number of shows and clicks of each example."""

    show: str
    click: str

    def __post_init__(self) -> None:
        for field in ("show", "click"):
            value = getattr(self, field)
            ok = isinstance(value, str) and value != ""
            check_values("ShowClick", **{field: (ok, "the name of a column", value)})


# ---- admission ----


@dataclass(frozen=True)
class Admission:
    """Base of the rules that decide which new keys get a row. Without a rule all do.

    A key that is not admitted is read like any absent key; its gradient is dropped.
    """

    name: ClassVar[str]

    def fixed(self) -> dict[str, Any]:
        """The values for the table's schema."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"name": self.name, **own}


@dataclass(frozen=True)
class CountFilter(Admission):
    """A key gets its row with its n-th occurrence; the gradient of that push is the first applied.

    sketch_bytes: None: exact counts, in 16 to 23 bytes for every seen key without a row. Otherwise:
        a count-min sketch of this size for the whole table. Each of 4096 buckets has four rows of
        cells (of one byte for n up to 255, two up to 65535, else four). A key's estimate is never
        below its count. With probability at most e^-4 it exceeds the count by more than
        e / (cells of a row) * (occurrences counted in the bucket). So a key may be admitted early,
        never late; a key that has lost its row gets it back at once.

    If the policy has ttl_s or delete_after_unseen_days, shrink() forgets exact counts of keys that
    were not seen for longer, and halves a sketch once in that time.
    """

    name: ClassVar[str] = "count_filter"
    n: int
    sketch_bytes: int | None = None

    def __post_init__(self) -> None:
        check_values("CountFilter", n=(type(self.n) is int and 1 <= self.n < 2**31, ">= 1", self.n))
        size = self.sketch_bytes
        if size is not None:
            check_values(
                "CountFilter",
                sketch_bytes=(
                    type(size) is int and SKETCH_BYTES_MIN <= size < 2**40,
                    f"None or at least {SKETCH_BYTES_MIN}",
                    size,
                ),
            )


@dataclass(frozen=True)
class Probability(Admission):
    """Each push of a key without a row gives it one with probability `p`, however often the key
    occurs in the push. The draw is a hash of (table seed, key, stream, sequence), so retries and
    any number of servers draw the same; in sync it is the draw of the step's first stream.
    """

    name: ClassVar[str] = "probability"
    p: float

    def __post_init__(self) -> None:
        ok = _is_number(self.p) and 0 < self.p <= 1
        check_values("Probability", p=(ok, "in (0, 1]", self.p))


@dataclass(frozen=True)
class ScoreFilter(Admission):
    """A key gets its row with the first push of at least this score. Needs a ScorePolicy."""

    name: ClassVar[str] = "score_filter"
    threshold: float

    def __post_init__(self) -> None:
        check_values(
            "ScoreFilter", threshold=(_is_number(self.threshold), "finite", self.threshold)
        )


# ---- life ----


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How long rows live, by the time of their last push.

    Args:
        ttl_s: shrink() removes rows without a push for longer; None: never.
        max_rows, max_bytes: limits of the table's rows and of their memory. Each bucket holds at
            most its share, and evicts its least recently pushed rows. None: no limit.
    """

    name: ClassVar[str] = "plain"

    ttl_s: int | None = None
    max_rows: int | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in ("ttl_s", "max_rows", "max_bytes"):
            value = getattr(self, field)
            ok = value is None or (type(value) is int and 1 <= value < 2**63)
            check_values(type(self).__name__, **{field: (ok, "None or a whole number >= 1", value)})

    def fixed(self) -> dict[str, Any]:
        """The values for the table's schema, by name."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        own.pop("show_click", None)  # names of columns, which only workers need
        return {"name": self.name, **own}


@dataclass(frozen=True, kw_only=True)
class ScorePolicy(Policy):
    """Rows count shows and clicks, which decay daily; their score decides on keeping and exporting.

    Args:
        show_click: columns of the batch; None: every occurrence of a key is one show and no click.
        nonclk_coeff, click_coeff: of the score.
        decay_rate: factor of show and click for every day of data time.
        delete_threshold: shrink() removes rows with a lower score.
        delete_after_unseen_days: shrink() removes rows without a push for more days; None: never.
        base_threshold: the least score of exported rows (base, delta).
        delta_threshold: the least score gained since the last export of rows in a delta.
        delta_keep_days: rows without a push for more days are not exported; None: all are.
        embedx_threshold: rows have weight 0 alone, their head, until their score reaches it; None:
            rows are whole from the start.
        pulls_statistics: lookups return show and click before the weights.
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
        check_values(kind, show_click=(ok, "None or a ShowClick", columns))
        for field in (
            "nonclk_coeff",
            "click_coeff",
            "delete_threshold",
            "base_threshold",
            "delta_threshold",
        ):
            value = getattr(self, field)
            check_values(kind, **{field: (_is_number(value), "a finite number", value)})
        rate, threshold = self.decay_rate, self.embedx_threshold
        pulls = self.pulls_statistics
        check_values(
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
            check_values(kind, **{field: (ok, "None or a number of days >= 0", days)})

    def score(self, show: Any, click: Any) -> Any:
        """The score of shows and clicks; numbers or arrays."""
        return (show - click) * self.nonclk_coeff + click * self.click_coeff


@dataclass(frozen=True, kw_only=True)
class SparseAccessor(ScorePolicy):
    """The numbers of Fleet's default accessor. Lookups return the weights alone."""

    decay_rate: float = 0.98
    delete_threshold: float = 0.8
    delete_after_unseen_days: int | None = 30
    base_threshold: float = 1.5
    delta_threshold: float = 0.25
    delta_keep_days: int | None = 16
    embedx_threshold: float | None = 10.0


@dataclass(frozen=True, kw_only=True)
class CtrCommonAccessor(SparseAccessor):
    """Fleet's accessor of this name: lookups return show and click before the weights."""

    pulls_statistics: bool = True


@dataclass(frozen=True, kw_only=True)
class CtrDoubleAccessor(CtrCommonAccessor):
    """Fleet's accessor with show and click of 64 bits, which every ScorePolicy has here."""


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
"""Fleet's defaults for numbers of an accessor that a script leaves out: rows do not decay, and are
removed after 30 days without a push. Its embedx_threshold is then 0, which every row reaches with
its first update, when Fleet's rules begin the tail in any case."""


def admission_of(fixed: Mapping[str, Any]) -> Admission:
    """The inverse of `Admission.fixed`. Raises BadRequest."""
    kinds: dict[str, type[Admission]] = {
        kind.name: kind for kind in (CountFilter, Probability, ScoreFilter)
    }
    admission: Admission = _built(fixed, kinds, "admission")
    return admission


def policy_of(fixed: Mapping[str, Any]) -> Policy:
    """The inverse of `Policy.fixed`, without names of columns. Raises BadRequest."""
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
