"""Run a command that ends when its parent ends, however the parent ends.

Run by path and not imported, in a bare interpreter (`python -I -S child.py PARENT COMMAND...`): it
asks the kernel to kill this process with its parent, then becomes the command. A function run
between fork and exec would do the same, but Python code there may deadlock once threads exist.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; kept across exec


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)
    os.execv(command[0], command)


main()
