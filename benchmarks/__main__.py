"""`python -m benchmarks [NAME ...] [--rival NAME]`: run benchmarks, one JSON line per result.

Results go to stdout, messages for people to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import BenchError, Claim, Contest, Settings, run_contest, say
from benchmarks.machine import header

_ROOT = Path(__file__).resolve().parents[1]
_PADDLE_VARIABLE = "TRIREME_BENCH_PADDLE"
_PADDLE_MADE = _ROOT / "build" / "paddle" / "bin" / "python"  # by `make paddle`
_TORCHREC_MADE = _ROOT / "build" / "torchrec" / "bin" / "python"  # by `make torchrec`

# Name: module with `contests(settings)`, what it measures.
BENCHES = {
    "ctr": ("benchmarks.macro.ctr", "CTR-DNN jobs: examples/s and held-out AUC"),
    "own_pushes": ("benchmarks.macro.own_pushes", "what it costs to see one's own pushes"),
    "step": ("benchmarks.macro.step", "where the CPU of a step goes, under perf"),
    "collective": ("benchmarks.macro.collective", "CTR-DNN without servers, beside torchrec"),
    "pass": ("benchmarks.macro.device_pass", "data in memory, in passes on a device"),
    "startup": ("benchmarks.macro.startup", "CPU of a job on a tiny file, beside torch's import"),
    "heter": ("benchmarks.macro.heter", "jobs with compute workers, beside what is expected"),
    "service": ("benchmarks.macro.service", "the parameter service alone: examples/s"),
    "fleet": ("benchmarks.macro.fleet_rows", "Fleet's rules beside Paddle's: distance of rows"),
    "zoo": ("benchmarks.macro.zoo", "each model, beside itself with torch's embeddings: scores"),
    "modes": ("benchmarks.macro.modes", "consistency modes under late pushes: held-out AUC"),
    "geo": ("benchmarks.macro.geo", "word2vec under geo: how soon it reaches the loss of async"),
    "slot": ("benchmarks.macro.slot", "slot_dnn's shape, 300 ragged features: examples/s"),
    "feed": ("benchmarks.macro.feed", "from files to batches: parsing, shuffled memory, commands"),
    "checkpoint": ("benchmarks.macro.checkpoint", "what is saved and loaded: bytes/s"),
    "durability": ("benchmarks.macro.durability", "what it costs to keep what servers acknowledge"),
    "network": ("benchmarks.macro.network", "a server behind a slow network: CTR-DNN"),
    "security": ("benchmarks.macro.security", "what encryption costs: CTR-DNN with keys"),
    "shared": ("benchmarks.macro.shared_memory", "what memory that processes share saves: CTR-DNN"),
    "place": ("benchmarks.macro.placed_jobs", "the best placement by prediction, and by measuring"),
    "scale": ("benchmarks.macro.scale", "a server with 1,000 workers: CPU per request, steps"),
    "ssd": ("benchmarks.macro.ssd", "rows on SSD, beside RocksDB, the device, and memory"),
    "hostile": ("benchmarks.macro.hostile", "what a server with keys spends on hostile peers"),
    "table": ("benchmarks.micro.bench_table", "rows of the table core, on one thread"),
    "placement": ("benchmarks.micro.bench_placement", "the solver of trireme place: milliseconds"),
    "predictor": ("benchmarks.micro.bench_predictor", "lookups and answers of an export"),
    "batch": ("benchmarks.micro.bench_batch", "the batch work of a step, on one thread"),
    "gpu_step": ("benchmarks.micro.bench_gpu_step", "a step on rows on a GPU, beside FBGEMM"),
    "rpc": ("benchmarks.micro.bench_rpc", "calls between processes, beside plain TCP"),
}


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # end the contestants first
    settings = Settings(
        is_smoke=args.smoke,
        num_rounds=args.rounds,
        data=args.data,
        rivals=args.rivals,
        paddle_python=args.paddle,
        torchrec_python=args.torchrec,
        batch=args.batch,
    )
    _emit(header(is_smoke=args.smoke), args.json)
    num_failed = 0
    for name in args.names or BENCHES:
        module = importlib.import_module(BENCHES[name][0])
        for contest in module.contests(settings):
            chosen = contest.only(_choose(contest, args.metric, args.rival))
            try:
                for result in run_contest(name, chosen):
                    _emit(result, args.json)
            except BenchError as error:
                num_failed += 1
                say(f"{name}: failed: {error}")
    return 1 if num_failed else 0


def _choose(contest: Contest, metric: str, rival: str | None) -> list[Claim]:
    """The claims that match --metric, each with the rivals that match --rival."""
    claims = [claim for claim in contest.claims if fnmatch.fnmatch(claim.metric, metric)]
    if rival is None:
        return claims
    return [
        dataclasses.replace(claim, rivals=kept)
        for claim in claims
        if (kept := tuple(n for n in claim.rivals if n == rival or n.startswith(f"{rival}_")))
    ]


def _emit(result: dict[str, Any], json_path: Path | None) -> None:
    line = json.dumps(result)
    print(line, flush=True)
    if json_path is not None:
        with json_path.open("a") as file:
            file.write(line + "\n")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    meanings = "\n".join(f"  {name:10} {meaning}" for name, (_, meaning) in BENCHES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"Measure Trireme, beside rivals where there are any.\n\n{meanings}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all of them")
    parser.add_argument("--rival", help="only results against this one (paddle: also tuned)")
    parser.add_argument("--metric", default="*", metavar="GLOB", help="only these metrics")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only shows that it runs")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (default 3)")
    parser.add_argument("--batch", type=int, metavar="N", help="examples of a step, of `step`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the results there too")
    parser.add_argument("--data", metavar="FOLDER", help="made by gen_criteo.py (default: make it)")
    parser.add_argument(
        "--rivals",
        metavar="FOLDER",
        default=str(_ROOT.parent / "shared" / "bench"),
        help="of the rivals' scripts (default %(default)s)",
    )
    parser.add_argument(
        "--paddle",
        metavar="PYTHON",
        default=os.environ.get(_PADDLE_VARIABLE, str(_PADDLE_MADE)),
        help=f"of an environment with Paddle (default ${_PADDLE_VARIABLE} or `make paddle`'s)",
    )
    parser.add_argument(
        "--torchrec",
        metavar="PYTHON",
        default=str(_TORCHREC_MADE),
        help="of an environment with torchrec (default `make torchrec`'s)",
    )
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in BENCHES]
    if unknown:
        parser.error(f"expected NAME out of {', '.join(BENCHES)}, found {', '.join(unknown)}")
    if args.rounds < 1:
        parser.error(f"expected --rounds of at least 1, found {args.rounds}")
    return args


if __name__ == "__main__":
    sys.exit(main())
