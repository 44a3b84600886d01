"""`trireme server` in a process of its own, and what it uses."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import BenchError
from benchmarks.macro.ours import environment

_START_S = 60.0


class ServerProcess:
    """A server that writes below `folder`. options: of the command. start_s: until it listens. Ends
    with the block.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        listen: str = "127.0.0.1:0",
        start_s: float = _START_S,
    ) -> None:
        command = [sys.executable, "-u", "-m", "trireme", "server", "--listen", listen]
        self._log = (folder / "server.log").open("w+")
        self._process = subprocess.Popen(
            [*command, "--root", str(folder), *options],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
        self.endpoint = self._wait_line(folder / "server.log", "listening on ", start_s)

    def _wait_line(self, path: Path, start: str, wait_s: float) -> str:
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and self._process.poll() is None:
            for line in path.read_text().splitlines():
                if line.startswith(start):
                    return line.removeprefix(start)
            time.sleep(0.05)
        raise BenchError(f"expected the server to listen, found: {path.read_text()}")

    def cpu_s(self) -> float:
        """CPU seconds of all its threads, from the scheduler's clock."""
        total_ns = 0
        for task in Path(f"/proc/{self._process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                total_ns += int((task / "schedstat").read_text().split()[0])
        return total_ns / 1e9

    def memory_mib(self) -> float:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)

    def forget_peak(self) -> None:
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def peak_mib(self) -> float:
        """The most memory since the start, or since it was forgotten."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) / (1 << 10)

    def kill(self) -> None:
        """As kill -9."""
        self._process.kill()
        self._process.wait(30)

    def log_bytes(self) -> int:
        return os.fstat(self._log.fileno()).st_size

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()
