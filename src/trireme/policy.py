"""Policies of tables: which keys get rows, how long rows live, and which are exported.

The numbers of a policy are part of the table's schema (`fixed`), so all servers and checkpoints
agree on them. Time is data time, in seconds that pushes carry; a day has 86,400 s.

    score(show, click) = (show - click) * nonclk_coeff + click * click_coeff

Source of the score, the fields and the accessors' defaults: Paddle's CtrAccessorParameter.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from trireme.errors import check_values, wrong_argument

SKETCH_BYTES_MIN = 4096 * 64  # one cache line per bucket


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _check(owner: object, expected: str, is_valid: Callable[[Any], bool], *names: str) -> None:
    """Raise BadRequest for the first of the named fields with a value that is not valid."""
    for name in names:
        value = getattr(owner, name)
        check_values(type(owner).__name__, **{name: (is_valid(value), expected, value)})


@dataclass(frozen=True)
class ShowClick:
    """The columns of a batch with the number of shows and clicks of each example. show: None: each
    is one show.
    """

    show: str | None
    click: str

    def __post_init__(self) -> None:
        name = "the name of a column"
        _check(self, f"{name}, or None", lambda v: v is None or _is_name(v), "show")
        _check(self, name, _is_name, "click")


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
        _check(self, "from 1 to 2**31 - 1", lambda n: type(n) is int and 1 <= n < 2**31, "n")

        def is_size(value: Any) -> bool:
            return value is None or (type(value) is int and SKETCH_BYTES_MIN <= value < 2**40)

        _check(self, f"None or from {SKETCH_BYTES_MIN} to 2**40 - 1", is_size, "sketch_bytes")


@dataclass(frozen=True)
class Probability(Admission):
    """Each push of a key without a row gives it one with probability `p`, however often the key
    occurs in the push. The draw is a hash of (table seed, key, stream, sequence), so retries and
    any number of servers draw the same; in sync it is the draw of the step's first stream.
    """

    name: ClassVar[str] = "probability"
    p: float

    def __post_init__(self) -> None:
        _check(self, "in (0, 1]", lambda p: _is_number(p) and 0 < p <= 1, "p")


@dataclass(frozen=True)
class ScoreFilter(Admission):
    """A key gets its row with the first push of at least this score. Needs a ScorePolicy."""

    name: ClassVar[str] = "score_filter"
    threshold: float

    def __post_init__(self) -> None:
        _check(self, "finite", _is_number, "threshold")


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

        def is_limit(value: Any) -> bool:
            return value is None or (type(value) is int and 1 <= value < 2**63)

        _check(self, "None or a whole number >= 1", is_limit, "ttl_s", "max_rows", "max_bytes")

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
        _check(self, "None or a ShowClick", lambda v: isinstance(v, ShowClick | None), "show_click")
        _check(self, "a finite number", _is_number, "nonclk_coeff", "click_coeff")
        thresholds = ("delete_threshold", "base_threshold", "delta_threshold")
        _check(self, "a finite number", _is_number, *thresholds)
        _check(self, "in (0, 1]", lambda v: _is_number(v) and 0 < v <= 1, "decay_rate")
        optional = "None or a finite number"
        _check(self, optional, lambda v: v is None or _is_number(v), "embedx_threshold")
        _check(self, "True or False", lambda v: type(v) is bool, "pulls_statistics")

        def is_days(value: Any) -> bool:
            return value is None or (type(value) is int and 0 <= value < 2**31)

        days = ("delete_after_unseen_days", "delta_keep_days")
        _check(self, "None or a number of days >= 0", is_days, *days)


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
    admission: Admission = _built(fixed, (CountFilter, Probability, ScoreFilter), "admission")
    return admission


def policy_of(fixed: Mapping[str, Any]) -> Policy:
    """The inverse of `Policy.fixed`, without names of columns. Raises BadRequest."""
    policy: Policy = _built(fixed, (Policy, ScorePolicy), "policy")
    return policy


def _built(fixed: Mapping[str, Any], classes: Sequence[Any], what: str) -> Any:
    kinds = {kind.name: kind for kind in classes}
    kind = kinds.get(str(fixed.get("name")))
    if kind is None:
        raise wrong_argument(f"{what}: expected one of {sorted(kinds)}, found {fixed!r}")
    values = {name: value for name, value in fixed.items() if name != "name"}
    names = {field.name for field in fields(kind)} - {"show_click"}
    if values.keys() != names:
        raise wrong_argument(f"{what}: expected {sorted(names)}, found {sorted(map(str, values))}")
    return kind(**values)
