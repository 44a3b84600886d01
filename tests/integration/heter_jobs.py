"""Heterogeneous jobs of a test: servers in its process, workers and compute workers as programs."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.jobs import Job
from tests.programs import Program, Template, clean_environment

SCRIPT = str(Path(__file__).with_name("heter_script.py"))
STAGES_SCRIPT = str(Path(__file__).with_name("stages_script.py"))  # of a model with stages
ROOT = str(Path(__file__).parents[2])  # of `tests`, for scripts that import from it


class HeterJob:
    """A job whose processes the test starts, kills and starts again.

    with HeterJob(programs, {"strategy": {"mode": "sync"}}, num_workers=2) as job:
        results = job.finish()

    options: of heter_script.py, and those of the compute workers if they differ. path: of another
    script with options. script: one with other arguments. labels: of the compute workers, in order;
    default `num_compute` times cpu.
    """

    def __init__(
        self,
        programs: Template,
        options: Mapping[str, Any] | None = None,
        *,
        path: str = SCRIPT,
        script: Sequence[str] = (),
        num_workers: int = 1,
        num_compute: int = 1,
        servers: Sequence[str] = (),
        timeout_s: float = 60.0,
        labels: Sequence[str] | None = None,
        compute_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._programs = programs
        self._script = [*script] or [path, json.dumps(options)]
        self._compute_script = self._script
        if compute_options is not None:
            self._compute_script = [path, json.dumps(compute_options)]
        self._labels = ["cpu"] * num_compute if labels is None else list(labels)
        self.num_workers, self.num_compute = num_workers, len(self._labels)
        self._servers, self._timeout_s = list(servers), timeout_s
        self._exit = ExitStack()
        self.workers: list[Program] = []
        self.compute: list[Program] = []

    def __enter__(self) -> HeterJob:
        if not self._servers:
            self.job = self._exit.enter_context(Job(1))
            self._servers = self.job.endpoints
        self._listeners = [
            self._exit.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(self.num_compute)
        ]
        self.addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in self._listeners]
        self.compute = [self.start_compute(i) for i in range(self.num_compute)]
        self.workers = [self.start_worker(i) for i in range(self.num_workers)]
        return self

    def __exit__(self, *error: Any) -> None:
        self._exit.__exit__(*error)

    def start_compute(self, index: int) -> Program:
        """Start compute worker `index`, again after it has ended."""
        return self._start(
            f"heter {index}",
            self._compute_script,
            {"TRIREME_ROLE": "heter", "TRIREME_INDEX": str(index)},
            self._listeners[index],
        )

    def start_worker(self, index: int) -> Program:
        env = {"TRIREME_ROLE": "worker", "TRIREME_INDEX": str(index)}
        return self._start(f"worker {index}", self._script, env)

    def _start(
        self,
        name: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        listener: socket.socket | None = None,
    ) -> Program:
        env = {
            "TRIREME_NUM_WORKERS": str(self.num_workers),
            "TRIREME_SERVERS": ",".join(self._servers),
            "TRIREME_TIMEOUT_S": f"{self._timeout_s:g}",
            **_environment(),
            **env,
        }
        if self._labels:
            pairs = zip(self._labels, self.addresses, strict=True)
            env["TRIREME_HETER"] = ",".join(f"{label}={a}" for label, a in pairs)
        program = self._programs.start(name, arguments, env, listener=listener)
        return self._exit.enter_context(program)

    def results(self) -> list[dict[str, Any]]:
        """What each worker found, once all have."""
        return [json.loads(worker.wait_line("RESULT (.*)")[1]) for worker in self.workers]

    def finish(self) -> list[dict[str, Any]]:
        """`results`, and all processes have ended with code 0."""
        results = self.results()
        assert [worker.finish() for worker in self.workers] == [0] * len(self.workers)
        assert [one.finish() for one in self.compute] == [0] * len(self.compute)
        return results


def _environment() -> dict[str, str]:
    """Of a process of such a job, and of one that is alone."""
    return {
        "TRIREME_THREADS": "1",
        "TRIREME_DEVICE_GPU": "cpu",
        "PYTHONPATH": os.pathsep.join([ROOT, clean_environment()["PYTHONPATH"]]),
    }


def alone(programs: Template, options: Mapping[str, Any], *, path: str = SCRIPT) -> dict[str, Any]:
    """The result of the script in one process, which has the tables too."""
    with programs.start("alone", [path, json.dumps(options)], _environment()) as one:
        result: dict[str, Any] = json.loads(one.wait_line("RESULT (.*)")[1])
        assert one.finish() == 0
    return result


def plain(programs: Template, options: Mapping[str, Any], num_workers: int) -> list[dict[str, Any]]:
    """The results of the workers of a job without compute workers."""
    with HeterJob(programs, options, num_workers=num_workers, num_compute=0) as job:
        return job.finish()
