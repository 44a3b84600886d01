"""Stands in for `python` where programs under test start Python scripts: forks tests/template.py.

Run as `quick_python.py PYTHON ADDRESS ARGUMENTS`, in a bare interpreter. A script, or `-m MODULE`,
runs in a child of the template at ADDRESS, with the environment, folder, network and standard
streams of this process, which forwards signals to the child and ends as the child ends. Any other
arguments are for the real interpreter, PYTHON.
"""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    python, address, *arguments = sys.argv[1:]
    if not arguments or (arguments[0][0] == "-" and arguments[0] != "-m"):
        os.execv(python, [python, *arguments])
    environment = dict(os.environ)
    order = {"arguments": arguments, "env": environment, "folder": os.getcwd()}
    order["network"] = f"/proc/{os.getpid()}/ns/net"
    fds = [0, 1, 2]
    if "TRIREME_LISTEN_FD" in environment:
        fds.append(int(environment["TRIREME_LISTEN_FD"]))
    # A signal that comes before the child is known waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as template:
        template.connect(address)
        socket.send_fds(template, [json.dumps(order).encode()], fds)
        _, [child], _, _ = socket.recv_fds(template, 16, 1)
        for number in FORWARDED:
            signal.signal(number, lambda number, _: signal.pidfd_send_signal(child, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        status = template.recv(16)
    code = int(status or b"1")  # nothing: the template was killed
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
