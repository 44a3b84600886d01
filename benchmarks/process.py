"""Runs a contestant in processes of its own, which always end with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from benchmarks.harness import BenchError

_LAST_LINES = 30
_GRACE_S = 15.0


def run_process(
    command: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> str:
    """Run a command to its end and return its stdout.

    Raises:
        BenchError: it failed or took longer than `timeout_s`; with its last lines of output.
    """
    with subprocess.Popen(
        command,
        env=None if env is None else dict(env),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except BaseException as stop:
            out, errors = _end(process)
            if isinstance(stop, subprocess.TimeoutExpired):
                raise BenchError(
                    f"{_short(command)}: expected an end within {timeout_s:.0f} s, stopped it;"
                    f" last lines:\n{_tail(out + errors)}"
                ) from None
            raise
    if process.returncode != 0:
        raise BenchError(
            f"{_short(command)}: expected exit code 0, found {process.returncode};"
            f" last lines:\n{_tail(out + errors)}"
        )
    return out


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """SIGTERM first: a launcher then ends its children, which have sessions of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    return "", ""


def _short(command: Sequence[str]) -> str:
    text = " ".join(command)
    return text if len(text) <= 300 else f"{text[:300]}..."


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-_LAST_LINES:])
