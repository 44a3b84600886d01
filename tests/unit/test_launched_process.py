"""What a process of a job prints, on a console that other processes write to as well."""

import os
from pathlib import Path

import pytest

from trireme.launch.launched_process import Mirror
from trireme.launch.printing import Printer

WAIT_S = 60.0


def test_a_shared_console_gets_whole_lines(tmp_path: Path) -> None:
    log_path, console_path = tmp_path / "workerlog.0", tmp_path / "console"
    with console_path.open("ab") as console:
        printer = Printer(console.fileno())
        mirror = Mirror(log_path.open("wb"), printer)

        def shown(printed: bytes) -> bytes:
            """What the console has after the process has printed this."""
            with open(mirror.input_fd, "wb", closefd=False) as output:
                output.write(printed)
            assert mirror.pump()
            printer.finish(WAIT_S)
            return console_path.read_bytes()

        assert shown(b"batch 7") == b""
        assert shown(b"\nbatch") == b"batch 7\n"
        assert shown(b" 8: 10%\r20%") == b"batch 7\nbatch 8: 10%\r"
        mirror.flush()
        printer.finish(WAIT_S)
        assert console_path.read_bytes() == b"batch 7\nbatch 8: 10%\r20%"
        assert shown(b"\n") == b"batch 7\nbatch 8: 10%\r20%\n"
        without_end = b"x" * (1 << 16)
        assert not shown(without_end).endswith(b"x")
        assert shown(b"x").endswith(b"\n" + without_end + b"x"), "what is held back is bounded"
        os.close(mirror.input_fd)
        mirror.close()
    assert log_path.read_bytes().splitlines()[:2] == [b"batch 7", b"20%"]


def test_a_full_disk_under_a_log_ends_neither_job_nor_console(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    console_path = tmp_path / "console"
    full = Path("/dev/full")  # where every write finds no space
    with console_path.open("ab") as console, full.open("wb") as log:
        printer = Printer(console.fileno())
        mirror = Mirror(log, printer)
        for number in range(3):
            os.write(mirror.input_fd, b"batch %d\n" % number)
            assert mirror.pump()
        os.close(mirror.input_fd)
        mirror.close()
        printer.finish(WAIT_S)
    assert console_path.read_bytes() == b"batch 0\nbatch 1\nbatch 2\n"
    assert caplog.messages == [
        "launch: cannot write /dev/full: No space left on device; what the process prints is"
        " missing there until that works"
    ]
