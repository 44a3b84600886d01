"""Folders, and how rows on SSD are read."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

from trireme.doctor.finding import Finding, note, ok
from trireme.doctor.software import BROKEN
from trireme.drawing import size
from trireme.errors import Unavailable


def disk() -> Iterator[Finding]:
    yield _working_folder()
    yield _io_uring()


def _working_folder() -> Finding:
    folder = os.getcwd()
    text = f"{size(shutil.disk_usage(folder).free)} free in {folder}"
    if not os.access(folder, os.W_OK):
        return note(
            f"{text}, which cannot be written",
            "trireme launch writes logs to log/ there: give --log_dir, and save elsewhere",
        )
    return ok(text)


def _io_uring() -> Finding:
    try:
        from trireme import _core
    except BROKEN:
        return note("io_uring is not tried: the core cannot be imported", "see Trireme above")
    try:
        with tempfile.TemporaryDirectory() as folder:
            _core.SsdDevice(folder, "io_uring")
    except Unavailable as error:
        return note(
            f"no io_uring: {error}",
            "rows on SSD are read by threads, which costs more CPU: allow io_uring_setup, _enter"
            " and _register in the profile of seccomp, and kernel.io_uring_disabled=0",
        )
    except OSError as error:
        return note(f"io_uring is not tried: {error}", "set TMPDIR to a folder that can be written")
    return ok("rows on SSD are read by io_uring")
