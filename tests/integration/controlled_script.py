"""Stands in for a training script: connects to the test and executes the commands it receives.

Run as `controlled_script.py PORT`. The connection closes when the process ends, so a test can wait
for the end without polling.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys


def main() -> None:
    port = int(sys.argv[1])
    name = os.environ["STANDIN_NAME"] if "STANDIN_NAME" in os.environ else _job_name()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        stream = connection.makefile("rw", newline="\n")
        stream.write(f"{name}\n")
        stream.flush()
        for line in stream:
            answer = _obey(*line.strip().split(maxsplit=1))
            stream.write(f"{answer}\n")
            stream.flush()


def _job_name() -> str:
    return f"{os.environ['TRIREME_ROLE']} {os.environ['TRIREME_INDEX']}"


def _obey(command: str, argument: str = "") -> str:
    if command == "exit":
        sys.exit(int(argument))
    if command == "raise":
        raise RuntimeError(argument)
    if command == "print":
        sys.stdout.write(argument.encode().decode("unicode_escape"))
    if command == "stubborn":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    if command == "polite":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop"))
    if command == "stopped_well":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if command == "spawn":
        env = {**os.environ, "STANDIN_NAME": argument}
        subprocess.Popen([sys.executable, *sys.argv], env=env)
    if command == "pid":
        return str(os.getpid())
    if command == "loaded":
        return str(argument in sys.modules)
    if command == "env":
        return os.environ.get(argument, "")
    if command == "terminal":
        return f"{sys.stdout.isatty()} {os.get_terminal_size() if sys.stdout.isatty() else ''}"
    if command == "accept":
        fd = int(os.environ["TRIREME_LISTEN_FD"])
        with socket.socket(fileno=fd) as listener, listener.accept()[0] as peer:
            return peer.recv(100).decode()
    if command == "greet":
        host, port = argument.split(":")
        with socket.create_connection((host, int(port))) as peer:
            peer.sendall(_job_name().encode())
    return "done"


main()
