"""Real processes of a test: started together, waited for, and ended with the test."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import trireme


def clean_environment() -> dict[str, str]:
    """The test's own environment without anything that says a role; finds this trireme anywhere."""
    ours = ("TRIREME_", "PADDLE_", "TRAINING_ROLE", "POD_IP", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "PYTHONPATH": str(Path(trireme.__file__).parents[1])}


class Processes:
    """Started processes by name; each writes to a file of its own in `folder`.

    with Processes(folder) as processes:
        processes.start("server 0", [sys.executable, "-m", "trireme", "server", ...])
        outputs = processes.finish(60)
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> None:
        with self._log(name).open("wb") as log:
            self._running[name] = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**clean_environment(), **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
            )

    def output(self, name: str) -> str:
        return self._log(name).read_text()

    def finish(self, timeout_s: float) -> dict[str, str]:
        """What each wrote, once all have ended with code 0."""
        deadline = time.monotonic() + timeout_s
        codes = {
            name: process.wait(max(0.0, deadline - time.monotonic()))
            for name, process in self._running.items()
        }
        outputs = {name: self.output(name) for name in codes}
        assert set(codes.values()) == {0}, (codes, outputs)
        return outputs

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        """End what still runs: asked first, so that it can end what it has started."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.txt"
