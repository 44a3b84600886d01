"""Files read through commands: real processes, and all the ways in which they fail."""

from __future__ import annotations

import gc
import gzip
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.integration.processes import clean_environment
from trireme.data.byte_streams import ByteStream
from trireme.data.pipe import Pipe
from trireme.data.sources import DataFile, find_files
from trireme.errors import BadRequest, DataError, Internal

NUM_LINES = 3000
TEXT = "".join(f"line {i}\n" for i in range(NUM_LINES))
READER = """\
import sys
import trireme.fleet as fleet
class Reader(fleet.MultiSlotDataGenerator):
    def generate_sample(self, line):
        yields = [[("n", [int(line.split()[1])])]]
        return lambda: yields
with open(sys.argv[1], "a") as starts:
    starts.write("x")
Reader().run_from_stdin()
"""
NUMBERS = "".join(f"1 {i}\n" for i in range(NUM_LINES))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", clean_environment()["PYTHONPATH"])


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """No descriptor of this process, no child of its keeper."""
    gc.collect()  # threads close descriptors of earlier tests now, not meanwhile
    with Pipe("true") as pipe, pipe.open(file_at(Path(__file__))) as stream:
        read(stream)  # there is a keeper from now on
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before
    keepers = children(os.getpid(), "keeper_program.py")
    assert len(keepers) == 1
    assert children(keepers[0]) == []
    assert not [t for t in threading.enumerate() if t.name.startswith("trireme")]


def children(parent: int, word: str = "") -> list[int]:
    """Processes, zombies too."""
    actual = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(status[1]) == parent and word in command:
            actual.append(int(pid))
    return actual


@pytest.fixture
def file(tmp_path: Path) -> DataFile:
    path = tmp_path / "part-0.txt"
    path.write_text(TEXT)
    return file_at(path)


def file_at(path: Path) -> DataFile:
    [file] = find_files(path)
    return file


def read(stream: ByteStream, size: int = 1 << 16) -> str:
    text, buffer = b"", np.empty(size, np.uint8)
    while num_bytes := stream.readinto(buffer):
        text += buffer[:num_bytes].tobytes()
    return text.decode()


def through(command: str, file: DataFile, patience_s: float = 60.0) -> str:
    with Pipe(command, patience_s=patience_s) as pipe, pipe.open(file) as stream:
        text = read(stream)
        assert stream.readinto(np.empty(8, np.uint8)) == 0
        return text


def python(code: str) -> str:
    return f"{sys.executable} -c '{code}'"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("cat", TEXT),
        ("head -n 2", "line 0\nline 1\n"),
        ("grep '[5]$' | head -n 1", "line 5\n"),
        ("sleep 1000 & tail -n 1", "line 2999\n"),  # the end of the command is the end
        ("true", ""),
        ("sh -c 'cat; exec >&-; exit 0'", TEXT),
        ("cat; echo $TRIREME_OF_A_TEST", TEXT + "seen\n"),
    ],
)
def test_a_file_goes_through_a_command(
    command: str, expected: str, file: DataFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIREME_OF_A_TEST", "seen")
    assert through(command, file) == expected


def test_compressed_files_are_fed_as_text_and_only_as_far_as_the_command_reads(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(TEXT.encode()))
    file = file_at(tmp_path / "a.gz")
    assert through("cat", file) == TEXT
    assert through("head -n 1", file) == "line 0\n"
    (tmp_path / "b.gz").write_bytes(gzip.compress(TEXT.encode())[:-100])
    file = file_at(tmp_path / "b.gz")
    with pytest.raises(DataError, match=r"cannot decompress .*b\.gz"):
        through("cat", file)


def test_the_command_waits_for_its_reader(file: DataFile) -> None:
    """It writes for ever and gets no further than the pipe is large."""
    with Pipe("yes") as pipe, pipe.open(file) as stream:
        buffer = np.empty(1 << 22, np.uint8)
        sizes = [stream.readinto(buffer) for _ in range(10)]
    assert max(sizes) <= 1 << 20
    assert buffer[: sizes[-1]].tobytes().strip(b"y\n") == b""


@pytest.mark.parametrize("clears", ["", "env -i "])
def test_a_session_of_its_own_ends_with_the_command(
    clears: str, tmp_path: Path, file: DataFile
) -> None:
    """Its parent ends first, so that nobody knows whose child it was."""
    daemon = f"setsid {clears}sh -c 'echo $$ > {tmp_path}/pid; exec sleep 1000' &"
    command = f"({daemon}) > /dev/null 2>&1; until [ -s {tmp_path}/pid ]; do sleep 0.01; done; cat"
    assert through(command, file) == TEXT
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_children_of_a_command_end_with_it(file: DataFile) -> None:
    assert set(through("yes & sleep 0.05", file)) == {"y", "\n"}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no_such_command", r"exit code 0, found 127; its last lines on stderr:\n.*not found"),
        ("/no/such/command x", "found 127"),
        ("head -n 3; echo wrong >&2; exit 3", r"found 3; its last lines on stderr:\nwrong$"),
        ("exit 4", "found 4; nothing on stderr"),
        ("kill -9 $$", r"found signal 9 \(Killed\)"),
        (python("import os; os.abort()"), r"found signal 6 \(Aborted\)"),
        ("cat 'unclosed", "found 2"),
        (python("1/0"), r"found 1; [^$]*\nZeroDivisionError: division by zero$"),
    ],
)
def test_a_failing_command_is_an_error_with_its_last_lines(
    command: str, message: str, file: DataFile
) -> None:
    with pytest.raises(DataError, match=rf"on {file.path}: expected .*{message}"):
        through(command, file)


def test_stderr_is_bounded_and_does_not_stop_the_command(file: DataFile) -> None:
    with pytest.raises(DataError, match="found 1") as raised:
        through("seq 1 200000 >&2; exit 1", file)
    assert str(raised.value).endswith("\n199999\n200000")
    assert str(raised.value).count("\n") == 10


@pytest.mark.parametrize(
    "command",
    [
        "sleep 1000",
        "exec >&-; sleep 1000",
        "head -n 1; trap : TERM; while true; do sleep 1000; done",
    ],
)
def test_a_command_that_hangs_is_killed(command: str, file: DataFile) -> None:
    with pytest.raises(DataError, match=r"read, write or end within 0\.3 s, found nothing"):
        through(command, file, patience_s=0.3)


def test_a_command_that_reads_slowly_has_not_hung(file: DataFile) -> None:
    """Twice the timeout without output, but the command still reads."""
    slow = "; ".join(["sleep 0.2", "head -c 1000 >&2"] * 20)
    assert through(f"{slow}; echo done", file, patience_s=2.0) == "done\n"


def test_a_file_that_has_changed_is_an_error(file: DataFile) -> None:
    with Pipe("cat") as pipe:
        with pipe.open(file) as stream:
            os.truncate(file.path, 100)  # the command finds the end there, and says nothing
            with pytest.raises(DataError, match=r"found 100, .*has changed"):
                read(stream)
        with pytest.raises(DataError, match=r"found 100, .*has changed"):
            pipe.open(file)
        os.unlink(file.path)
        with pytest.raises(DataError, match=r"cannot read .*No such file"):
            pipe.open(file)


def test_closing_in_the_middle_leaves_no_process(tmp_path: Path, file: DataFile) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(TEXT.encode()))
    for path in (Path(file.path), tmp_path / "a.gz"):
        for command in ("cat", "trap : TERM; cat | cat; sleep 1000"):
            with Pipe(command) as pipe, pipe.open(file_at(path)) as stream:
                assert stream.readinto(np.empty(10, np.uint8)) == 10


def test_stop_ends_a_read_that_waits(tmp_path: Path, file: DataFile) -> None:
    os.mkfifo(tmp_path / "started")
    with Pipe(f"echo x > {tmp_path}/started; sleep 1000") as pipe, pipe.open(file) as stream:
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                read(stream)
            except Internal as error:
                raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        (tmp_path / "started").read_text()
        stream.stop()
        thread.join()
    assert "stopped" in str(raised)


def starts_of(tmp_path: Path) -> int:
    return len((tmp_path / "starts").read_text())


def reader(tmp_path: Path) -> str:
    (tmp_path / "reader.py").write_text(READER)
    return f"{sys.executable} {tmp_path}/reader.py {tmp_path}/starts"


def test_one_interpreter_serves_many_files(tmp_path: Path, file: DataFile) -> None:
    with Pipe(reader(tmp_path)) as pipe:
        for _ in range(20):
            with pipe.open(file) as stream:
                assert read(stream) == NUMBERS
        assert starts_of(tmp_path) == 1
        with pipe.open(file) as first, pipe.open(file) as second:
            assert (read(second), read(first)) == (NUMBERS, NUMBERS)
        assert starts_of(tmp_path) == 2


def test_a_threads_interpreters_are_as_many_as_threads(tmp_path: Path, file: DataFile) -> None:
    texts: list[str] = []

    def work() -> None:
        for _ in range(25):
            with pipe.open(file) as stream:
                texts.append(read(stream))

    with Pipe(reader(tmp_path)) as pipe:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(texts) == 50
    assert set(texts) == {NUMBERS}
    assert starts_of(tmp_path) == 2


@pytest.mark.parametrize("wrapped", ["{} | cat", "sh -c '{}; true'", "{}; :"])
def test_a_reader_inside_a_shell_serves_one_file(
    wrapped: str, tmp_path: Path, file: DataFile
) -> None:
    with Pipe(wrapped.format(reader(tmp_path))) as pipe:
        for _ in range(2):
            with pipe.open(file) as stream:
                assert read(stream) == NUMBERS
    assert starts_of(tmp_path) == 2


def test_a_reader_that_fails_at_a_later_file_names_it_and_the_line(
    tmp_path: Path, file: DataFile
) -> None:
    (tmp_path / "bad.txt").write_text("line 1\nline x\n")
    bad = file_at(tmp_path / "bad.txt")
    with Pipe(reader(tmp_path)) as pipe:
        with pipe.open(file) as stream:
            assert read(stream) == NUMBERS
        with pipe.open(bad) as stream, pytest.raises(DataError) as raised:
            read(stream)
        with pipe.open(file) as stream:
            assert read(stream) == NUMBERS
    assert "bad.txt: expected exit code 0, found 1" in str(raised.value)
    assert "Reader: line 2 of stdin: ValueError: invalid literal" in str(raised.value)
    assert starts_of(tmp_path) == 2


def test_an_interpreter_that_dies_while_it_waits_is_replaced(
    tmp_path: Path, file: DataFile
) -> None:
    with Pipe(reader(tmp_path)) as pipe:
        with pipe.open(file) as stream:
            read(stream)
        (keeper,) = children(os.getpid(), "keeper_program.py")
        (waiting,) = children(keeper)
        pidfd = os.pidfd_open(waiting)
        os.kill(waiting, signal.SIGKILL)
        select.select([pidfd], [], [], 60)
        os.close(pidfd)
        with pipe.open(file) as stream:
            assert read(stream) == NUMBERS


def test_an_interpreter_that_fails_after_its_last_file_is_an_error(
    tmp_path: Path, file: DataFile, caplog: pytest.LogCaptureFixture
) -> None:
    command = reader(tmp_path)
    with (tmp_path / "reader.py").open("a") as script:
        script.write("sys.exit('too late')\n")
    with Pipe(command) as pipe, pipe.open(file) as stream:
        read(stream)
    assert "after its last file: 1\ntoo late" in caplog.text


PARENT = """\
import os, sys
import numpy as np
from trireme.data.pipe import Pipe
from trireme.data.sources import find_files
stream = Pipe("sleep 1000 | cat & cat >&2; echo $$; wait").open(find_files(sys.argv[1])[0])
buffer = np.empty(100, np.uint8)
print(buffer[:stream.readinto(buffer)].tobytes().decode().strip(), flush=True)
sys.stdin.read()
"""


def test_the_command_and_all_it_has_started_end_with_the_job(
    tmp_path: Path, file: DataFile
) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py"), file.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with parent:
        assert parent.stdout is not None
        shell = int(parent.stdout.readline())
        group = [os.pidfd_open(pid) for pid in (shell, *children(shell))]
        parent.kill()
        parent.wait(60)
        for pidfd in group:
            assert select.select([pidfd], [], [], 60)[0], "it outlives its job"
            os.close(pidfd)
    assert len(group) >= 2


def test_no_command_is_refused() -> None:
    for command in ("", "  ", None):
        with pytest.raises(BadRequest, match="expected a command"):
            Pipe(command)  # type: ignore[arg-type]
