"""Jobs of a test whose model has stages: workers and compute workers of several labels."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.integration.heter_jobs import HeterJob
from tests.programs import Program, Template

SCRIPT = str(Path(__file__).with_name("stages_script.py"))


class StagesJob(HeterJob):
    """labels: of the compute workers, in order."""

    def __init__(
        self, programs: Template, options: Mapping[str, Any], labels: Sequence[str], **rest: Any
    ) -> None:
        script = [SCRIPT, json.dumps(options)]
        compute_options = rest.pop("compute_options", None)
        super().__init__(programs, script=script, num_compute=len(labels), **rest)
        if compute_options is not None:
            self._compute_script = [SCRIPT, json.dumps(compute_options)]
        self.labels = list(labels)

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
            "TRIREME_DEVICE_GPU": "cpu",
            **env,
        }
        if self.labels:
            pairs = zip(self.labels, self.addresses, strict=True)
            env["TRIREME_HETER"] = ",".join(f"{label}={a}" for label, a in pairs)
        program = self._programs.start(name, arguments, env, listener=listener)
        return self._exit.enter_context(program)


def stages_alone(programs: Template, options: Mapping[str, Any]) -> dict[str, Any]:
    """The result of the script in one process, which has the tables too."""
    env = {"TRIREME_THREADS": "1", "TRIREME_DEVICE_GPU": "cpu"}
    with programs.start("alone", [SCRIPT, json.dumps(options)], env) as one:
        result: dict[str, Any] = json.loads(one.wait_line("RESULT (.*)")[1])
        assert one.finish() == 0
    return result
