"""The choice of a consistency mode: when a step becomes visible to the other workers."""

from typing import Any

from trireme.errors import check_choice, check_counts, check_values, wrong_argument

# Mode -> its knobs.
KNOBS = {
    "sync": (),
    "bounded": ("staleness",),
    "async": (),
    "geo": ("k", "cache_bytes"),
    "hybrid": (),
    "collective": (),
}
MODES = tuple(KNOBS)
CACHE_BYTES = 1 << 30


class Strategy:
    """A consistency mode and its knobs; docs/consistency.md says what each mode costs and when to
    choose it.

    Args:
        mode: "sync": every step equals one process on the union of the workers' batches.
            "bounded": as async, and no stream is more than `staleness` steps ahead of the slowest.
            "async": a push is applied when it arrives; its staleness is measured and reported.
            "geo": each worker trains on a cache of its own and exchanges differences every `k`
            steps.
            "hybrid": rows as in async; dense parameters by all-reduce among the workers, equal on
            all of them after every step.
            "collective": sync in a job without servers: the workers hold the rows and exchange
            them by all-to-all.
        staleness: of "bounded" only, >= 1. With 1, all streams are in the same step.
        k: of "geo" only, >= 1.
        cache_bytes: of "geo" only: memory for the rows of a worker's cache, default 1 GiB.

    Raises:
        BadRequest: an unknown mode, a mode without its knob, a knob of another mode, or one out of
            range.
    """

    def __init__(
        self,
        mode: str = "async",
        *,
        staleness: int | None = None,
        k: int | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        check_choice("Strategy", MODES, mode=mode)
        knobs = {"staleness": staleness, "k": k, "cache_bytes": cache_bytes}
        for knob, value in knobs.items():
            if value is not None:
                _check_knob(mode, knob, value)
        self.mode = mode
        self.staleness = int(staleness or 0)
        self.k = int(k or 0)
        self.cache_bytes = int(cache_bytes or CACHE_BYTES) if mode == "geo" else 0
        for knob in KNOBS[mode]:
            if getattr(self, knob) == 0:
                raise wrong_argument(f"Strategy: expected {knob} with mode {mode!r}, found none")

    def __repr__(self) -> str:
        knobs = "".join(f", {knob}={getattr(self, knob)}" for knob in KNOBS[self.mode])
        return f"Strategy({self.mode!r}{knobs})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strategy) and repr(other) == repr(self)

    def __hash__(self) -> int:
        return hash(repr(self))


def _check_knob(mode: str, knob: str, value: Any) -> None:
    owner = next(owner for owner, knobs in KNOBS.items() if knob in knobs)
    if owner != mode:
        raise wrong_argument(f"Strategy: {knob} belongs to mode {owner!r}, found mode {mode!r}")
    check_counts("Strategy", **{knob: value})
    check_values("Strategy", **{knob: (value < 2**63, "< 2**63", value)})
