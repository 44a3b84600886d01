"""The solver of `trireme place`: milliseconds for one placement, of random stages and types.

stages64_types4          64 stages on 4 types
stages64_types4_limits   the same with limits just below what the best placement would use
stages64_types4_passed   each stage is fast on one type only: the first group passes on a lot
stages64_types4_scarce   20 workers of each type, at ten times the rate
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

from benchmarks.harness import Claim, Contest, Run, Settings
from trireme.place.choice import Choice, StageChain
from trireme.place.machine_types import MachineType
from trireme.place.measuring import rounded
from trireme.place.solver import Solver

_NUM_TYPES = 4
_RATE = Fraction(20_000)
_SLOWNESS = 30.0
_SLOW_NETWORK = 1.25e8
_SCARCE = 20


def contests(settings: Settings) -> Sequence[Contest]:
    num_stages = settings.pick(smoke=6, real=64)
    name = f"stages{num_stages}_types{_NUM_TYPES}"
    chain = random_chain(num_stages)
    chains = {
        name: (chain, _RATE),
        f"{name}_limits": (_limited(chain), _RATE),
        f"{name}_passed": (_passing(chain), _RATE),
        f"{name}_scarce": (_scarce(chain), 10 * _RATE),
    }
    return [
        Contest(
            {name: partial(_of_chain, chain, rate) for name, (chain, rate) in chains.items()},
            [Claim(one, one, unit="ms") for one in chains],
            settings.rounds,
            num_warm_ups=1,
        )
    ]


def random_chain(num_stages: int) -> StageChain:
    """Stages that take some microseconds and send some hundred bytes per example."""
    rng = random.Random(num_stages)
    types = [
        MachineType(
            name=f"type{i}",
            cores=1,
            price=round(rng.uniform(0.1, 5.0), 2),
            network=rng.choice([1.25e8, 1.25e9, 3e9, 1.25e10]),
            reads=i == 0,
        )
        for i in range(_NUM_TYPES)
    ]

    def numbers(high: float) -> list[float]:
        return [rounded(rng.uniform(0, high)) for _ in range(num_stages)]

    return StageChain(
        stages=[f"stage{i}" for i in range(num_stages)],
        types=types,
        seconds={kind.name: numbers(1e-5) for kind in types},
        bytes_before=numbers(1000.0),
        bytes_sent_to=numbers(1000.0),
    )


def _limited(chain: StageChain) -> StageChain:
    """With one worker less of the type that the best placement has most of, if it has several."""
    best = Solver(chain).cheapest(_RATE)
    assert best is not None
    used = {kind.name: _workers(best, kind) for kind in chain.types}
    most = max(used, key=lambda name: used[name])
    limit = max(used[most] - 1, 1)
    types = [replace(k, limit=limit if k.name == most else None) for k in chain.types]
    return replace(chain, types=types)


def _passing(chain: StageChain) -> StageChain:
    """With a slow network where the first group is."""
    rng = random.Random(len(chain.stages))
    fast = [rng.choice(chain.types).name for _ in chain.stages]
    seconds = {
        name: [rounded(one if name == fast[i] else _SLOWNESS * one) for i, one in enumerate(each)]
        for name, each in chain.seconds.items()
    }
    types = [replace(kind, network=_SLOW_NETWORK) if kind.reads else kind for kind in chain.types]
    return replace(chain, types=types, seconds=seconds)


def _scarce(chain: StageChain) -> StageChain:
    return replace(chain, types=[replace(kind, limit=_SCARCE) for kind in chain.types])


def _workers(choice: Choice, kind: MachineType) -> int:
    return sum(group.workers for group in choice.groups if group.type == kind)


def _of_chain(chain: StageChain, rate: Fraction, _: object) -> Run:
    started = time.perf_counter()
    choice = Solver(chain).cheapest(rate)
    elapsed_ms = 1e3 * (time.perf_counter() - started)
    if choice is None:  # the limits allow none
        return Run(elapsed_ms, "none", {"cost": None, "workers": 0, "groups": 0})
    cuts = [(group.begin, group.end, group.type.name, group.workers) for group in choice.groups]
    detail = {"cost": float(choice.cost), "workers": choice.workers, "groups": len(cuts)}
    return Run(elapsed_ms, hashlib.sha256(repr(cuts).encode()).hexdigest()[:16], detail)
