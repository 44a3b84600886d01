"""Placements of CTR-DNN on two types of CPU workers, throttled unlike: measured jobs beside what
`trireme place` expects of them.

chosen      examples/s per price of the job that has most of it by prediction, beside the job that
            has most by measuring all of them; the mean over prices of the second type. `detail`
            has the planner's answers to QUESTIONS, beside those of the measured jobs

Types and jobs are those of macro/placed_job.py. "gpu" is a name: it is a CPU too.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from benchmarks.criteo import tsv_files
from benchmarks.harness import Claim, Contest, Run, Settings, say
from benchmarks.macro.ours import environment
from benchmarks.macro.throttled import cgroups
from benchmarks.process import run_process
from trireme.place.choice import StageChain
from trireme.place.machine_types import read_types
from trireme.place.measurements import Measurements, chain_of
from trireme.place.solver import Solver

_ROOT = Path(__file__).resolve().parents[2]
_JOB = str(Path(__file__).with_name("placed_job.py"))
_TIMEOUT_S = 600
_BATCH = 512
_NUM_TIMED = 6  # files: of three, the beginning and the end of a job took 2 % of the time
_CORES = {"cpu": 0.25, "gpu": 0.5}  # of one worker
TYPES = """
types:
  cpu: {cores: 1, price: 1.0, network: 1.0e10, reads: true, limit: 2}
  gpu: {cores: 1, price: 1.0, network: 1.0e10, device: gpu, limit: 1}
"""
# Name -> workers that read, and compute workers; without these the former train alone.
JOBS: Mapping[str, tuple[int, int]] = {
    "cpu1": (1, 0),
    "cpu2": (2, 0),
    "cpu1_gpu1": (1, 1),
    "cpu2_gpu1": (2, 1),
}
# The rate to reach, beside what the planner expects of "cpu1"; price of the second type, of the
# first it is 1.
QUESTIONS = ((0.8, 0.7), (1.7, 0.7), (1.7, 1.5))
PRICES = (0.5, 1.0, 2.0)


def contests(settings: Settings) -> Sequence[Contest]:
    round_of = functools.cache(lambda number: Round(settings, number))
    return [
        Contest(
            {
                "chosen": lambda number: round_of(number).chosen(),
                "best_measured": lambda number: round_of(number).best(),
            },
            [Claim("chosen", "chosen", ("best_measured",), unit="examples/s per price")],
            settings.rounds,
        ),
    ]


def sum_of_parts(settings: Settings) -> Contest:
    """The job cpu2_gpu1 beside what its parts add up to; macro/heter.py has it."""
    round_of = functools.cache(lambda number: Round(settings, number))
    return Contest(
        {
            "cpu2_gpu1": lambda number: round_of(number).measured("cpu2_gpu1"),
            "sum_of_parts": lambda number: round_of(number).predicted("cpu2_gpu1"),
        },
        [Claim("cpu2_gpu1", "cpu2_gpu1", ("sum_of_parts",))],
        settings.rounds,
    )


class Round:
    """The types, measured once, and the jobs, each measured when it is asked for."""

    def __init__(self, settings: Settings, number: int) -> None:
        files = tsv_files(settings).train
        num_timed = settings.pick(smoke=1, real=_NUM_TIMED)
        self._data = [f"--seed={number + 1}", "--net=ctr", "--data=criteo", "--dim=9"]
        self._data += [f"--batch={settings.pick(smoke=32, real=_BATCH)}"]
        self._files = ["--warm", *files[:1], "--timed", *files[1 : 1 + num_timed]]
        self._measured: dict[str, Run] = {}
        self._chain = self._measure_types()

    def _measure_types(self) -> StageChain:
        with (
            tempfile.TemporaryDirectory(prefix="trireme_bench_") as name,
            cgroups(_CORES) as groups,
        ):
            folder = Path(name)
            (folder / "types.yaml").write_text(TYPES)
            types = read_types(folder / "types.yaml")
            measured = []
            for kind in types:
                file = folder / f"{kind.name}.json"
                job = [str(groups), kind.name, *self._options(1), f"--out={folder / 'out.json'}"]
                place = ["place", _JOB, "--types", str(folder / "types.yaml")]
                place += ["--type", kind.name, "--measure", str(file), "--args", " ".join(job)]
                say(self._run(place))
                measured.append(Measurements.load(file))
        return chain_of(types, measured)

    def _options(self, threads: int) -> list[str]:
        return [*self._data, f"--threads={threads}", *self._files]

    def _run(self, arguments: Sequence[str]) -> str:
        own = {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "TRIREME_THREADS": "1"}
        own["TRIREME_DEVICE_GPU"] = "cpu"
        command = [sys.executable, "-m", "trireme", *arguments]
        return run_process(command, timeout_s=_TIMEOUT_S, env=environment() | own)

    def measured(self, name: str) -> Run:
        """Examples per second of a real job."""
        if name not in self._measured:
            self._measured[name] = self._measure(*JOBS[name])
            say(f"{name}: {self._measured[name].value:,.0f}, expected {self._rate(name):,.0f}")
        return self._measured[name]

    def _measure(self, num_workers: int, num_compute: int) -> Run:
        cores = {f"worker_{i}": _CORES["cpu"] for i in range(num_workers)}
        cores |= {f"heter_{i}": _CORES["gpu"] for i in range(num_compute)}
        cores["server_0"] = 1.0
        with tempfile.TemporaryDirectory(prefix="trireme_bench_") as name, cgroups(cores) as groups:
            out = Path(name) / "out.json"
            launch = ["launch", "--server_num", "1", "--worker_num", str(num_workers)]
            if num_compute:
                launch += ["--heter_worker_num", str(num_compute), "--heter_devices", "gpu"]
            launch += ["--log_dir", name, _JOB, str(groups), "none", *self._options(2)]
            self._run([*launch, f"--out={out}"])
            result = json.loads(out.read_text())
        return Run(result["examples_per_s"], detail=result)

    def predicted(self, name: str) -> Run:
        return Run(self._rate(name))

    def _rate(self, name: str) -> float:
        """What the planner expects of a placement: the rate of its slowest group."""
        num_workers, num_compute = JOBS[name]
        solver = Solver(self._chain)
        if num_compute:
            return solver.choice_of([(0, 1, 0, num_workers), (1, 2, 1, num_compute)]).rate
        return solver.choice_of([(0, 2, 0, num_workers)]).rate

    def chosen(self) -> Run:
        """What the jobs are worth that are the best by prediction, one for each price."""
        worth = [
            self._worth(max(JOBS, key=lambda name: self._rate(name) / _cost(name, price)), price)
            for price in PRICES
        ]
        rates = {name: (round(self._rate(name)), round(self.measured(name).value)) for name in JOBS}
        detail = {"chosen_best": self._answers(), "expected_measured": rates}
        return Run(statistics.fmean(worth), detail=detail)

    def best(self) -> Run:
        """What the jobs are worth that are the best by measuring, one for each price."""
        worth = [max(self._worth(name, price) for name in JOBS) for price in PRICES]
        return Run(statistics.fmean(worth))

    def _worth(self, name: str, price: float) -> float:
        return self.measured(name).value / _cost(name, price)

    def _answers(self) -> dict[str, tuple[str | None, str | None]]:
        """Question -> the job that the planner chooses, and the best one by measuring."""
        answers = {}
        for factor, price in QUESTIONS:
            rate = factor * self._rate("cpu1")
            answers[f"{rate:,.0f}/s, gpu at {price}"] = (
                self._chosen(rate, price),
                self._best_measured(rate, price),
            )
        return answers

    def _chosen(self, rate: float, price: float) -> str | None:
        """The job that the planner chooses."""
        cpu, gpu = self._chain.types
        types = [cpu, replace(gpu, price=price)]
        choice = Solver(replace(self._chain, types=types)).cheapest(Fraction(rate))
        if choice is None:
            return None
        groups = [(group.type.name, group.workers) for group in choice.groups]
        names = {tuple(_groups(name)): name for name in JOBS}
        return names.get(tuple(groups), str(groups))

    def _best_measured(self, rate: float, price: float) -> str | None:
        """The cheapest job that reaches the rate when it runs."""
        costs = {n: _cost(n, price) for n in JOBS if self.measured(n).value >= rate}
        return min(costs, key=lambda name: costs[name], default=None)


def _groups(name: str) -> list[tuple[str, int]]:
    num_workers, num_compute = JOBS[name]
    return [("cpu", num_workers), *([("gpu", num_compute)] if num_compute else [])]


def _cost(name: str, price: float) -> float:
    num_workers, num_compute = JOBS[name]
    return num_workers + num_compute * price
