"""The solver of placements equals trying all of them."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest

from tests.seeds import SEED
from trireme.errors import ResourceExhausted
from trireme.place import partial_search
from trireme.place.choice import Choice, StageChain, exact
from trireme.place.group_search import GroupSearch
from trireme.place.machine_types import MachineType
from trireme.place.solver import Solver

NUM_CASES = 1000


def machine(name: str, **values: object) -> MachineType:
    kind = MachineType(name=name, cores=1, price=1.0, network=1e9, reads=True, label=name)
    return dataclasses.replace(kind, **values)  # type: ignore[arg-type]  # by name


def chain(types: Sequence[MachineType], *seconds: Sequence[float], **values: object) -> StageChain:
    """A chain with no bytes. seconds: of each stage, by type."""
    num = len(seconds)
    plain = StageChain(
        stages=[f"s{i}" for i in range(num)],
        types=types,
        seconds={kind.name: [by_type[i] for by_type in seconds] for i, kind in enumerate(types)},
        bytes_before=[0.0] * num,
        bytes_sent_to=[0.0] * num,
    )
    return dataclasses.replace(plain, **values)  # type: ignore[arg-type]  # by name


# ---- all placements, one by one ----


def all_cuts(chain: StageChain, begin: int = 0) -> Iterator[list[tuple[int, int, MachineType]]]:
    num_stages = len(chain.stages)
    if begin == num_stages:
        yield []
        return
    for end in range(begin + 1, num_stages + 1):
        for kind in chain.types:
            if begin == 0 and (end < chain.num_first or not kind.reads):
                continue
            for rest in all_cuts(chain, end):
                yield [(begin, end, kind), *rest]


def seconds_of(chain: StageChain, begin: int, end: int, kind: MachineType) -> Fraction:
    """As the docstring of the solver says, term by term."""
    num_stages = len(chain.stages)
    before = exact(chain.bytes_before[begin])
    moved = Fraction() if begin == 0 else before
    if end < num_stages:
        moved += exact(chain.bytes_before[end])
    sent = range(end, num_stages) if begin == 0 else range(begin, end)
    moved += sum(exact(chain.bytes_sent_to[i]) for i in sent)
    own = sum(exact(chain.seconds[kind.name][i]) for i in range(begin, end))
    pulled = before if begin == 0 else Fraction()
    by_worker = moved * exact(chain.seconds_per_byte[kind.name])
    return own + (moved + pulled) / exact(kind.network) + by_worker


@dataclasses.dataclass(frozen=True)
class Tried:
    """A placement, computed from its definition."""

    key: tuple[Fraction, int, int, tuple[str, ...]]
    rate: float | Fraction


def tried(chain: StageChain, rate: Fraction, *, exceeds: bool = False) -> Iterator[Tried]:
    """All placements within the limits that reach the rate."""
    for cuts in all_cuts(chain):
        cost, workers, paces = Fraction(), 0, []
        used = dict.fromkeys((kind.name for kind in chain.types), 0)
        relayed = 2 * sum(exact(chain.bytes_before[begin]) for begin, _, _ in cuts[2:])
        for begin, end, kind in cuts:
            seconds = seconds_of(chain, begin, end, kind)
            if begin == 0:
                by_worker = exact(chain.seconds_per_byte[kind.name])
                seconds += relayed * (1 / exact(kind.network) + by_worker)
            num = math.floor(rate * seconds) + 1 if exceeds else max(1, math.ceil(rate * seconds))
            used[kind.name] += num
            workers += num
            cost += num * exact(kind.price)
            paces.append(seconds / num)
        if all(kind.limit is None or used[kind.name] <= kind.limit for kind in chain.types):
            names = tuple(kind.name for begin, end, kind in cuts for _ in range(begin, end))
            slowest = max(paces)
            yield Tried((cost, workers, len(cuts), names), 1 / slowest if slowest else math.inf)


def key_of(choice: Choice) -> tuple[Fraction, int, int, tuple[str, ...]]:
    names = tuple(g.type.name for g in choice.groups for _ in range(g.begin, g.end))
    return choice.cost, choice.workers, len(choice.groups), names


def random_case(
    rng: random.Random, *, slow: float = 1.0, least: int = 1
) -> tuple[StageChain, Fraction]:
    """Few distinct numbers, so that ties are common. slow: how much slower each stage is on all
    types but one. least: stages and types at least.
    """
    num_stages, num_types = rng.randint(least, 5), rng.randint(least, 3)
    coarse = rng.random() < 0.5

    def number(high: float) -> float:
        return rng.choice([0.0, 0.5, 1.0, 2.0]) * high if coarse else rng.uniform(0, high)

    types = [
        machine(
            f"t{i}",
            price=rng.choice([0.1, 0.3, 1.0, 2.5]) if coarse else round(rng.uniform(0, 5), 3),
            network=rng.choice([1e6, 4e6, 1e9]),
            reads=i == 0 or rng.random() < 0.5,
            limit=rng.randint(1, 5) if rng.random() < 0.6 else None,
        )
        for i in range(num_types)
    ]
    rng.shuffle(types)
    best = [rng.randrange(num_types) for _ in range(num_stages)]
    made = StageChain(
        stages=[f"s{i}" for i in range(num_stages)],
        types=types,
        seconds={
            kind.name: [number(1e-3) * (1.0 if best[i] == k else slow) for i in range(num_stages)]
            for k, kind in enumerate(types)
        },
        bytes_before=[number(500.0) for _ in range(num_stages)],
        bytes_sent_to=[number(100.0) for _ in range(num_stages)],
        num_first=rng.randint(1, num_stages),
        seconds_per_byte={kind.name: number(1e-6) for kind in types},
    )
    return made, exact(rng.choice([1.0, 500.0, 1000.0, 3000.0]))


def key_without_relaying(
    chain: StageChain, rate: Fraction
) -> tuple[Fraction, int, int, tuple[str, ...]]:
    """The key of what would be best if the first group passed nothing on."""
    solver = Solver(chain)
    search = GroupSearch(chain, solver._loads, solver._prices, rate, exceeds=False)
    return key_of(solver.choice_of(search.rests[0][1]))


def cheapest_of(chain: StageChain, rate: Fraction) -> Choice:
    """Of a chain without limits, which always has a placement."""
    choice = Solver(chain).cheapest(rate)
    assert choice is not None
    return choice


def test_the_solver_equals_all_placements_in_1000_random_cases() -> None:
    print(f"TRIREME_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    num_limited = num_impossible = 0
    for number in range(NUM_CASES):
        made, rate = random_case(rng)
        exceeds = rng.random() < 0.3
        expected = min((one.key for one in tried(made, rate, exceeds=exceeds)), default=None)
        choice = Solver(made).cheapest(rate, exceeds=exceeds)
        actual = None if choice is None else key_of(choice)
        assert actual == expected, f"case {number}: {made}, {rate}"
        num_impossible += expected is None
        free = [dataclasses.replace(kind, limit=None) for kind in made.types]
        without = Solver(dataclasses.replace(made, types=free)).cheapest(rate, exceeds=exceeds)
        assert without is not None
        num_limited += actual is not None and key_of(without) != actual
    print(f"{num_limited} cases changed by limits, {num_impossible} impossible within them")
    assert num_limited > 50
    assert num_impossible > 20


def test_what_the_first_group_passes_on_counts_as_in_all_placements() -> None:
    print(f"TRIREME_TEST_SEED={SEED}")
    rng = random.Random(SEED + 2)
    num_changed = num_limited = 0
    for number in range(120):
        made, rate = random_case(rng, slow=1000.0, least=3)
        types = [  # the one that reads has a slow network
            dataclasses.replace(kind, reads=k == 0, network=1e6 if k == 0 else 1e9)
            for k, kind in enumerate(made.types)
        ]
        free = dict.fromkeys((kind.name for kind in types), 0.0)
        made = dataclasses.replace(made, types=types, num_first=1, seconds_per_byte=free)
        expected = min((one.key for one in tried(made, rate)), default=None)
        choice = Solver(made).cheapest(rate)
        assert (None if choice is None else key_of(choice)) == expected, f"case {number}"
        free_types = [dataclasses.replace(kind, limit=None) for kind in types]
        unlimited = dataclasses.replace(made, types=free_types)
        is_changed = key_without_relaying(unlimited, rate) != key_of(cheapest_of(unlimited, rate))
        num_changed += is_changed
        num_limited += is_changed and expected != key_of(cheapest_of(unlimited, rate))
    print(f"{num_changed} cases changed by what is passed on, {num_limited} by limits too")
    assert num_changed > 5
    assert num_limited > 0


def test_the_rate_of_a_choice_is_that_of_its_slowest_group() -> None:
    types = [machine("a"), machine("b", price=10.0)]
    choice = Solver(chain(types, (1e-3, 1.0), (1.0, 0.0004))).cheapest(Fraction(2500))
    assert choice is not None
    assert [(g.type.name, g.workers) for g in choice.groups] == [("a", 3), ("b", 1)]
    assert choice.slowest is choice.groups[1]
    assert choice.rate == pytest.approx(2500)
    assert choice.groups[0].rate == pytest.approx(3000)
    assert choice.cost == 13


def test_the_next_choices_equal_all_placements() -> None:
    print(f"TRIREME_TEST_SEED={SEED}")
    rng = random.Random(SEED + 1)
    num_cheaper = 0
    for number in range(100):
        made, rate = random_case(rng)
        best = Solver(made).cheapest(rate)
        if best is None or not best.pace:
            continue
        faster = Solver(made).cheapest(1 / best.pace, exceeds=True)
        expected = min((one.key for one in tried(made, 1 / best.pace, exceeds=True)), default=None)
        assert (None if faster is None else key_of(faster)) == expected, f"case {number}"
        cheaper = Solver(made).fastest(rate, below=best.cost)
        if cheaper is not None:
            num_cheaper += 1
            assert cheaper.cost < best.cost
            above = tried(made, 1 / cheaper.pace, exceeds=True)
            assert all(one.key[0] >= best.cost for one in above), f"case {number}"
        else:
            assert all(one.key[0] >= best.cost for one in tried(made, Fraction(1, 10**9)))
    assert num_cheaper > 20


def test_within_limits_the_fastest_choice_uses_what_there_is() -> None:
    types = [machine("a", limit=4), machine("b", limit=1, price=3.0)]
    made = chain(types, (1e-3, 2e-3), (1e-3, 1e-3))
    assert Solver(made).cheapest(Fraction(10_000)) is None
    fastest = Solver(made).fastest(Fraction(10_000))
    assert fastest is not None
    assert fastest.rate == pytest.approx(2000)  # a, a alone, as a for one stage waits for b


def test_a_cost_that_is_equal_in_decimals_is_equal() -> None:
    """3 * 0.1 > 0.3 in floating point."""
    types = [machine("many", price=0.1), machine("one", price=0.3)]
    choice = Solver(chain(types, (3e-3, 1e-3))).cheapest(Fraction(1000))
    assert choice is not None
    assert [(g.type.name, g.workers) for g in choice.groups] == [("one", 1)]


def test_a_rate_that_workers_reach_exactly_takes_no_further_one() -> None:
    """1000 * (0.0001 + 0.0002) > 0.3 in floating point."""
    made = chain([machine("a")], (0.0001,), (0.0002,))
    choice = Solver(made).cheapest(Fraction(10_000))
    assert choice is not None
    assert choice.workers == 3


def test_the_first_group_sends_what_all_other_stages_need() -> None:
    types = [machine("a", network=1e3), machine("b", reads=False, network=1e9)]
    made = chain(types, (1e-3, 1.0), (1.0, 1e-3), (1.0, 1e-3), bytes_sent_to=[7.0, 1.0, 2.0])
    choice = Solver(made).cheapest(Fraction(1000))
    assert choice is not None
    assert [(g.end, g.type.name, g.workers) for g in choice.groups] == [(1, "a", 4), (3, "b", 3)]


def test_a_search_within_limits_that_becomes_too_large_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partial_search, "PARTIAL_MAX", 5)
    types = [machine("a", limit=3), machine("b", price=2.0)]
    made = chain(types, *([(1e-3, 1e-3)] * 6))
    with pytest.raises(ResourceExhausted, match=r"at most 5 partial placements .* of 6 stages"):
        Solver(made).cheapest(Fraction(1000))
