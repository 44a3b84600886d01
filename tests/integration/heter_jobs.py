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
ROOT = str(Path(__file__).parents[2])  # of `tests`, for scripts that import from it


class HeterJob:
    """A job whose processes the test starts, kills and starts again.

    with HeterJob(programs, {"strategy": {"mode": "sync"}}, num_workers=2) as job:
        results = job.finish()

    options: of heter_script.py, and those of the compute workers if they differ. script: another,
    with its arguments.
    """

    def __init__(
        self,
        programs: Template,
        options: Mapping[str, Any] | None = None,
        *,
        script: Sequence[str] = (),
        num_workers: int = 1,
        num_compute: int = 1,
        servers: Sequence[str] = (),
        timeout_s: float = 60.0,
        label: str = "cpu",
        compute_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._programs = programs
        self._script = [*script] or [SCRIPT, json.dumps(options)]
        self._compute_script = self._script
        if compute_options is not None:
            self._compute_script = [SCRIPT, json.dumps(compute_options)]
        self.num_workers, self.num_compute = num_workers, num_compute
        self._servers, self._timeout_s, self._label = list(servers), timeout_s, label
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
            "TRIREME_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([ROOT, clean_environment()["PYTHONPATH"]]),
            **env,
        }
        if self.num_compute:
            env["TRIREME_HETER"] = ",".join(f"{self._label}={a}" for a in self.addresses)
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


def alone(programs: Template, options: Mapping[str, Any]) -> dict[str, Any]:
    """The result of the script in one process, which has the tables too."""
    with programs.start("alone", [SCRIPT, json.dumps(options)], {"TRIREME_THREADS": "1"}) as one:
        result: dict[str, Any] = json.loads(one.wait_line("RESULT (.*)")[1])
        assert one.finish() == 0
    return result


def plain(programs: Template, options: Mapping[str, Any], num_workers: int) -> list[dict[str, Any]]:
    """The results of the workers of a job without compute workers."""
    with HeterJob(programs, options, num_workers=num_workers, num_compute=0) as job:
        return job.finish()
