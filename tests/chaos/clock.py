"""Clocks that jump: a library loaded before libc (clock.c) gives processes another time of day."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
import sysconfig
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")
NUM_SLOTS = 64


class Clock:
    """`env` is for the templates of programs; a program's slot is its CHAOS_CLOCK_SLOT."""

    def __init__(self, folder: Path, compiler: str) -> None:
        library, offsets = folder / "clock.so", folder / "clock"
        flags = ["-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run([compiler, *flags], check=True)
        offsets.write_bytes(bytes(8 * NUM_SLOTS))
        with offsets.open("r+b") as file:
            self._offsets = mmap.mmap(file.fileno(), 8 * NUM_SLOTS)
        self.env = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(offsets)}

    def jump(self, slot: int, seconds: float) -> None:
        """The clock of the processes of a slot goes by so many seconds more, or less."""
        (before,) = struct.unpack_from("q", self._offsets, 8 * slot)
        struct.pack_into("q", self._offsets, 8 * slot, before + int(seconds))

    def set_right(self) -> None:
        self._offsets[:] = bytes(8 * NUM_SLOTS)


def make_clock(folder: Path) -> Clock | str:
    """A clock, or why there is none."""
    compiler = shutil.which("cc")
    if compiler is None:
        return "there is no C compiler"
    # Without it Python gives deadlines of its waits in the time of day, and the kernel's is right.
    if not sysconfig.get_config_var("HAVE_SEM_CLOCKWAIT"):
        return "this Python waits by the time of day, which the shim cannot change in the kernel"
    return Clock(folder, compiler)
