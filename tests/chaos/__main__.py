"""`make chaos KILLS=100 SEED=n`: run rounds of chaos until that many processes were killed.

Ends with one line `CHAOS {json}`; code 0 if nothing was lost, nothing was applied twice, nothing
hung and everything else was as it should be too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.chaos.lab import Lab, lab
from tests.chaos.plan import LONG, MODES, NETWORKS, SMALL, Scale, draw
from tests.chaos.round import Outcome, run_round

DEADLINE_S = 300.0
FOLDER = Path("build/chaos")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", default=str(int.from_bytes(os.urandom(3), "big")))
    parser.add_argument("--round", help="this one alone, as SEED.NUMBER")
    parser.add_argument("--mode", choices=MODES, help="in all rounds")
    parser.add_argument("--network", choices=NETWORKS, help="in all rounds")
    parser.add_argument("--ssd", action="store_true", help="rows on SSD in all rounds")
    parser.add_argument("--heter", type=int, default=0, metavar="N", help="compute workers in all")
    parser.add_argument("--stages", action="store_true", help="where there are compute workers")
    parser.add_argument("--small", action="store_true", help="rounds as in `make test`")
    arguments = parser.parse_args()
    scale = SMALL if arguments.small else LONG
    started = time.monotonic()
    with lab() as made:
        for kind, why in made.impossible.items():
            print(f"chaos: without {kind}: {why}")
        seeds = (f"{arguments.seed}.{number}" for number in itertools.count())
        if arguments.round:
            seeds = iter([arguments.round])  # type: ignore[assignment]
        else:
            print(f"chaos: seed {arguments.seed}", flush=True)
        outcomes: list[Outcome] = []
        for seed in seeds:
            outcomes.append(_one(seed, made, scale, arguments))
            if sum(outcome.kills for outcome in outcomes) >= arguments.kills:
                break
    actual = summary(outcomes)
    actual |= {"seed": arguments.round or arguments.seed}
    actual |= {"seconds": round(time.monotonic() - started)}
    print("CHAOS", json.dumps(actual), flush=True)
    return exit_code(outcomes, 0 if arguments.round else arguments.kills)


def exit_code(outcomes: list[Outcome], num_kills: int) -> int:
    """0 if every round was right, and so many processes were killed."""
    is_enough = sum(outcome.kills for outcome in outcomes) >= num_kills
    return 0 if is_enough and all(outcome.is_right for outcome in outcomes) else 1


def summary(outcomes: list[Outcome]) -> dict[str, object]:
    """Of all rounds. ended: those whose job ended otherwise than it should, with an error."""
    events = sum((outcome.counts for outcome in outcomes), Counter[str]())
    return {
        "kills": sum(outcome.kills for outcome in outcomes),
        "lost": sum(outcome.verdict.lost for outcome in outcomes),
        "twice": sum(outcome.verdict.twice for outcome in outcomes),
        "hung": sum(outcome.is_hung for outcome in outcomes),
        "differing": sum(bool(outcome.verdict.differing) for outcome in outcomes),
        "ended": sum(bool(outcome.problem) and not outcome.is_hung for outcome in outcomes),
        "rounds": len(outcomes),
        "modes": dict(Counter(outcome.plan.mode for outcome in outcomes)),
        "events": dict(events),
        "on_ssd": _of_tiers([outcome for outcome in outcomes if outcome.plan.tier is not None]),
    }


def _of_tiers(outcomes: list[Outcome]) -> dict[str, object]:
    """Of the rounds whose servers have rows on SSD."""
    figures = sum((Counter(outcome.tiers) for outcome in outcomes), Counter[str]())
    return {
        "rounds": len(outcomes),
        "kills": sum(outcome.kills for outcome in outcomes),
        "modes": dict(Counter(outcome.plan.mode for outcome in outcomes)),
        **figures,
    }


def _one(seed: str, made: Lab, scale: Scale, arguments: argparse.Namespace) -> Outcome:
    options = {"mode": arguments.mode, "network": arguments.network, "has_tier": arguments.ssd}
    options |= {"num_compute": arguments.heter, "has_stages": arguments.stages}
    plan = draw(seed, scale, **options)
    folder = (FOLDER / seed).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    print(f"chaos: round {seed}: {plan}", flush=True)
    try:
        outcome = run_round(plan, folder, made, deadline_s=DEADLINE_S)
    except Exception as error:  # noqa: BLE001 whatever it is, the rounds before it count
        traceback.print_exc()
        outcome = Outcome(plan=plan, problem=f"the round itself failed: {error!r}")
    print(f"chaos: round {seed}: {outcome}", flush=True)
    if outcome.is_right:
        shutil.rmtree(folder)
    else:
        print(f"chaos: its logs are in {folder}; again: {again(seed, arguments)}", flush=True)
    return outcome


def again(seed: str, arguments: argparse.Namespace) -> str:
    """The command that runs this round alone. `make chaos` knows no more than the round."""
    options = [f"--{name} {getattr(arguments, name)}" for name in ("mode", "network")]
    options = [text for text in options if not text.endswith(" None")]
    options += [f"--heter {arguments.heter}"] if arguments.heter else []
    options += [f"--{name}" for name in ("ssd", "stages", "small") if getattr(arguments, name)]
    if not options:
        return f"make chaos ROUND={seed}"
    return " ".join([".venv/bin/python -m tests.chaos --round", seed, *options])


if __name__ == "__main__":
    sys.exit(main())
