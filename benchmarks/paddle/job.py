"""One server and one worker of Paddle on this machine: the same script in both roles."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

_TIMEOUT_S = 400


def is_launcher() -> bool:
    """Whether this process is neither the server nor the worker of a job."""
    return "TRAINING_ROLE" not in os.environ


def launch(options: dict[str, object], *, threads: int = 1) -> None:
    """Run this script again as server and worker, in a folder of their own, until the worker ends.

    options: of the script, by name; paths in them absolute.

    Exits with 1 when the worker fails, naming its log.
    """
    folder = tempfile.mkdtemp(prefix="paddle_job.")
    server, worker, http = (f"127.0.0.1:{_free_port()}" for _ in range(3))
    base = dict(
        os.environ,
        PADDLE_PSERVERS_IP_PORT_LIST=server,
        PADDLE_TRAINER_ENDPOINTS=worker,
        PADDLE_TRAINERS_NUM="1",
        PADDLE_TRAINER_ID="0",
        PADDLE_WITH_GLOO="1",
        PADDLE_GLOO_RENDEZVOUS="3",
        PADDLE_GLOO_HTTP_ENDPOINT=http,
        PADDLE_GLOO_FS_PATH=folder,
        FLAGS_enable_pir_api="0",
        POD_IP="127.0.0.1",
        CPU_NUM=str(threads),
    )
    command = [sys.executable, os.path.abspath(sys.argv[0])]
    command += [f"--{name}={value}" for name, value in options.items()]
    processes = []
    status: int | None = None
    try:
        for role, address in (("PSERVER", server), ("TRAINER", worker)):
            env = dict(base, TRAINING_ROLE=role, PADDLE_PORT=address.split(":")[1])
            with open(f"{folder}/{role}.log", "w") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=env,
                        cwd=folder,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        status = processes[1].wait(timeout=_TIMEOUT_S)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status != 0:
        sys.exit(f"{sys.argv[0]}: the worker ended with {status}: see {folder}/TRAINER.log")
    shutil.rmtree(folder)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
