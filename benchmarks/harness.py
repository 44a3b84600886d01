"""Measures contestants alternately, A, B, A, B, ..., and compares them round by round.

A benchmark is a function that returns contests. A contest is a set of contestants, measured once
each per round, and of claims: "metric m of ours, against these rivals". The ratio of a claim is
taken within each round, so that changes of the machine's speed between rounds cancel.
"""

from __future__ import annotations

import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

T = TypeVar("T")


class BenchError(Exception):
    """A contestant failed, or computed a wrong result."""


class Absent(Exception):
    """A contestant that cannot run here. The message says what is missing and how to get it."""


@dataclass(frozen=True)
class Run:
    """One measurement.

    hash: of the result. It must be equal in every round; None if the computation is not
        deterministic.
    detail: more about the run, for people.
    """

    value: float
    hash: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """A metric of one contestant, against others of the same contest."""

    metric: str
    contestant: str
    rivals: tuple[str, ...] = ()
    unit: str = "examples/s"


@dataclass(frozen=True)
class Contest:
    """Contestants by name, in the order they run; each takes the round's number as its seed."""

    contestants: Mapping[str, Callable[[int], Run]]
    claims: Sequence[Claim]
    num_rounds: int
    num_warm_ups: int = 0
    statistic: Literal["median", "mean"] = "median"

    def __post_init__(self) -> None:
        for claim in self.claims:
            for name in (claim.contestant, *claim.rivals):
                if name not in self.contestants:
                    raise BenchError(f"Contest: claim {claim.metric} names no contestant: {name}")

    def only(self, claims: Iterable[Claim]) -> Contest:
        """The part of the contest that these claims need."""
        kept = list(claims)
        names = {name for claim in kept for name in (claim.contestant, *claim.rivals)}
        contestants = {n: run for n, run in self.contestants.items() if n in names}
        return Contest(contestants, kept, self.num_rounds, self.num_warm_ups, self.statistic)


@dataclass(frozen=True)
class Settings:
    """The size of benchmarks, by mode, and the places of files outside the project.

    data: folder made by the rivals' gen_criteo.py, or None.
    batch: of `step`; None: those that it chooses.
    """

    is_smoke: bool
    num_rounds: int = 3
    data: str | None = None
    rivals: str = ""
    paddle_python: str | None = None
    torchrec_python: str | None = None
    batch: int | None = None

    def pick(self, *, smoke: T, real: T) -> T:
        """The value of a parameter: small whenever the tests run, real when it is measured."""
        return smoke if self.is_smoke else real

    @property
    def rounds(self) -> int:
        return self.pick(smoke=1, real=self.num_rounds)


def say(text: str) -> None:
    """Print a message for people on stderr."""
    print(text, file=sys.stderr, flush=True)


def run_contest(bench: str, contest: Contest) -> list[dict[str, Any]]:
    """Measure everything and return one result per claim and rival.

    An absent contestant is skipped, and its reason printed. A claim without rivals still reports
    its value.

    Raises:
        BenchError: a contestant failed, or its result differs from that of another round.
    """
    present = dict(contest.contestants)
    runs: dict[str, list[Run]] = {name: [] for name in present}
    foreign = ForeignLoad()
    for number in range(-contest.num_warm_ups, contest.num_rounds):
        for name in list(present):
            try:
                run = present[name](max(number, 0))
            except Absent as reason:
                say(f"{bench}: {name} skipped: {reason}")
                del present[name]
                continue
            if number >= 0:
                say(f"{bench}: round {number + 1}/{contest.num_rounds}, {name}: {run.value:,.6g}")
                runs[name].append(run)
    taken_cores = foreign.cores()
    results = []
    for claim in contest.claims:
        for result in _results(claim, runs, contest.statistic):
            results.append({"bench": bench, **result, "foreign_cores": taken_cores})
    return results


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _results(
    claim: Claim, runs: Mapping[str, list[Run]], statistic: str
) -> Iterable[dict[str, Any]]:
    ours = runs[claim.contestant]
    if not ours:
        return
    middle = statistics.median if statistic == "median" else statistics.fmean
    values = [run.value for run in ours]
    head = {"metric": claim.metric, "value": _rounded(middle(values)), "unit": claim.unit}
    tail = {
        "value_min": _rounded(min(values)),
        "value_max": _rounded(max(values)),
        "rounds": len(ours),
        "hash": _same_hash(claim, ours),
        "detail": dict(ours[-1].detail),
    }
    no_rival = {"vs": None, "ratio": None, "ratio_min": None, "ratio_max": None, "vs_value": None}
    rivals = [name for name in claim.rivals if runs[name]]
    if not rivals:
        yield {**head, **no_rival, **tail}
    for name in rivals:
        rival_values = [run.value for run in runs[name]]
        ratios = [a / b for a, b in zip(values, rival_values, strict=True)]
        yield {
            **head,
            "vs": name,
            "ratio": _rounded(middle(ratios)),
            "ratio_min": _rounded(min(ratios)),
            "ratio_max": _rounded(max(ratios)),
            "vs_value": _rounded(middle(rival_values)),
            **(_difference(values, rival_values) if statistic == "mean" else {}),
            **tail,
            "vs_detail": dict(runs[name][-1].detail),
        }


def _difference(ours: Sequence[float], rival_values: Sequence[float]) -> dict[str, float | None]:
    """The difference of the means over the seeds, and its standard error if there are several."""
    error = None
    if len(ours) > 1:
        variances = statistics.variance(ours) + statistics.variance(rival_values)
        error = _rounded(math.sqrt(variances / len(ours)))
    difference = statistics.fmean(ours) - statistics.fmean(rival_values)
    return {"difference": _rounded(difference), "standard_error": error}


def _same_hash(claim: Claim, runs: Sequence[Run]) -> str | None:
    hashes = {run.hash for run in runs}
    if len(hashes) > 1:
        raise BenchError(
            f"{claim.contestant}: expected one result in every round, found hashes {hashes}"
        )
    return hashes.pop()


class ForeignLoad:
    """CPU time of all other processes of the machine since the start."""

    def __init__(self) -> None:
        self._start = _clocks()

    def cores(self) -> float | None:
        """Cores that other processes kept busy, on average since the start; None if unknown."""
        now = _clocks()
        if now is None or self._start is None:
            return None
        wall_s, all_s, own_s = (after - b for after, b in zip(now, self._start, strict=True))
        return round(max(all_s - own_s, 0.0) / max(wall_s, 1e-9), 3)


def _clocks() -> tuple[float, float, float] | None:
    """Seconds of wall time, CPU of the whole machine, CPU of this process and its children."""
    try:
        with open("/proc/stat") as file:
            ticks = sum(int(field) for field in file.readline().split()[1:4])
    except OSError:
        return None
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own_s = sum(usage.ru_utime + usage.ru_stime for usage in spent)
    return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own_s
