"""`trireme`, where the system forbids io_uring as Docker's default profile does: by seccomp."""

from __future__ import annotations

import ctypes
import os
import struct
import sys

from trireme.commands import cli

IO_URING_SETUP, EPERM = 425, 1
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
_LOAD, _IS_EQUAL, _RETURN = 0x20, 0x15, 0x06  # instructions of the kernel's packet filter
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def forbid_io_uring() -> None:
    """For this process, which cannot take it back. Raises OSError: the system does not let it."""
    instructions = (
        (_LOAD, 0, 0, 0),  # the number of the system call
        (_IS_EQUAL, 0, 1, IO_URING_SETUP),
        (_RETURN, 0, 0, _FAIL | EPERM),
        (_RETURN, 0, 0, _ALLOW),
    )
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    program = _Program(len(instructions), code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    forbid_io_uring()
    sys.exit(cli.main(sys.argv[1:]))
