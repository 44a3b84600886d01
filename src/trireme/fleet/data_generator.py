"""Data generators: a reader script subclasses one to turn its lines into MultiSlot text.

import trireme.fleet as fleet

class Reader(fleet.MultiSlotDataGenerator):
    def generate_sample(self, line):
        def examples():
            label, *ids = map(int, line.split())
            yield [("label", [label]), ("ids", ids)]
        return examples

Reader().run_from_stdin()

Run as `pipe_command`, for example "python reader.py": one process per file, or one for many files
where the reader of the pipe offers them (see `_files`).
"""

import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

from trireme.errors import DataError, check_counts

Sample = Sequence[tuple[str, Sequence[Any]]]
Samples = Callable[[], Iterable[Sample | None]]

_SHOWN_CHARS = 200


class _DataGenerator:
    """What both generators share. A subclass need not call __init__."""

    batch_size_ = 32

    def generate_sample(self, line: str | None) -> Samples:
        """Parse a line; to be implemented by the subclass.

        Args:
            line: one line of the input with its end; None from run_from_memory.

        Returns:
            A function that returns an iterable of examples [(name, [value, ...]), ...], in the
            order of the model's inputs; None is skipped.
        """
        raise NotImplementedError(f"{type(self).__name__}: expected a method generate_sample")

    def generate_batch(self, samples: list[Sample]) -> Samples:
        """Process examples together, for example to pad them; may be overridden.

        Args:
            samples: as many as `set_batch` says; fewer at the end of a file.
        """
        return lambda: samples

    def set_batch(self, batch_size: int) -> None:
        """Set how many examples generate_batch gets, 32 by default."""
        check_counts(f"{type(self).__name__}.set_batch", batch_size=batch_size)
        self.batch_size_ = batch_size

    def run_from_stdin(self) -> None:
        """Convert stdin to stdout, and each further file if the pipe's reader offers more.

        Raises:
            DataError: an error in a line; names its number and shows it.
        """
        for _ in _files():
            self._number, self._line = 0, ""
            try:
                self._write(self._samples(sys.stdin))
            except OSError:  # stdout is closed, or what the subclass has opened
                raise
            except Exception as error:
                raise DataError(
                    f"{type(self).__name__}: line {self._number} of stdin: "
                    f"{type(error).__name__}: {error}; the line: {self._line[:_SHOWN_CHARS]!r}"
                ) from error

    def run_from_memory(self) -> None:
        """Write what `generate_sample(None)` yields."""
        self._write(self.generate_sample(None)())

    def _samples(self, lines: TextIO) -> Iterator[Sample | None]:
        generate = self.generate_sample
        for self._number, self._line in enumerate(lines, 1):
            yield from generate(self._line)()

    def _write(self, samples: Iterable[Sample | None]) -> None:
        write, text = sys.stdout.write, self._gen_str
        for sample in self._batched(samples):
            if sample is not None:
                write(text(sample))

    def _batched(self, samples: Iterable[Sample | None]) -> Iterable[Sample | None]:
        if type(self).generate_batch is _DataGenerator.generate_batch:
            return samples
        return self._through_batches(samples)

    def _through_batches(self, samples: Iterable[Sample | None]) -> Iterator[Sample | None]:
        batch: list[Sample] = []
        for sample in samples:
            if sample is not None:
                batch.append(sample)
            if len(batch) == self.batch_size_:
                yield from self.generate_batch(batch)()
                batch = []
        if batch:
            yield from self.generate_batch(batch)()

    def _gen_str(self, line: Sample) -> str:
        raise NotImplementedError


class MultiSlotDataGenerator(_DataGenerator):
    """Values are ints and floats; every example must have the fields of the first one.

    Raises:
        DataError: from run_*: other fields than in the first example, an empty field, a value that
            is neither int nor float. Uncaught it ends the script with exit code 1.
    """

    _names: tuple[str, ...] | None = None

    def _gen_str(self, line: Sample) -> str:
        """The example as a line of MultiSlot text."""
        fields = _fields(self, line)
        names = tuple([name for name, _ in fields])
        if names != self._names:
            self._check_names(names)
        parts = []
        for name, values in fields:
            if not isinstance(values, list) or not values:
                raise DataError(
                    f"{type(self).__name__}: expected a list with at least one value as {name!r}, "
                    f"found {values!r}; pad what is empty, with 0 say"
                )
            parts.append(str(len(values)))
            for value in values:
                if type(value) is not int and type(value) is not float:
                    self._check_value(name, value)
                parts.append(str(value))
        return " ".join(parts) + "\n"

    def _check_names(self, names: tuple[str, ...]) -> None:
        for name in names:
            if not isinstance(name, str):
                raise DataError(f"{type(self).__name__}: expected a str as name, found {name!r}")
        if self._names is not None:
            raise DataError(
                f"{type(self).__name__}: expected the fields of the first example, "
                f"{', '.join(self._names)}; found {', '.join(names)}"
            )
        self._names = names

    def _check_value(self, name: str, value: object) -> None:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise DataError(
                f"{type(self).__name__}: expected int or float as {name!r}, "
                f"found {value!r} of type {type(value).__name__}"
            )


class MultiSlotStringDataGenerator(_DataGenerator):
    """Values are strings, written unchecked, which is faster."""

    def _gen_str(self, line: Sample) -> str:
        """The example as a line of MultiSlot text."""
        parts = []
        for _, values in _fields(self, line):
            parts.append(str(len(values)))
            parts += values
        return " ".join(parts) + "\n"


def _fields(generator: _DataGenerator, line: Sample) -> Sample:
    if isinstance(line, (list, tuple)):
        return line
    if isinstance(line, zip):
        return list(line)
    raise DataError(
        f"{type(generator).__name__}: expected a list of (name, values), found {line!r}"
    )


def _files() -> Iterator[None]:
    """Yields once for each file, which is then stdin and stdout.

    The reader of the pipe may offer more files through a Unix socket, TRIREME_PIPE_FD=FD:PID. This
    process sends a byte when all output of a file is written; the reply is the stdin and stdout of
    another file. The end of the socket is the end of the files.
    """
    yield
    fd, _, pid = os.environ.get("TRIREME_PIPE_FD", "").partition(":")
    if pid != str(os.getpid()):  # no offer, or an offer to a parent of this process
        return
    null = os.open(os.devnull, os.O_RDWR)
    with socket.socket(fileno=int(fd)) as offer:
        while True:
            sys.stdout.flush()
            os.dup2(null, 0)
            os.dup2(null, 1)
            try:
                offer.send(b".")
                _, fds, _, _ = socket.recv_fds(offer, 1, 2)
            except ConnectionError:
                return
            if not fds:
                return
            for standard_fd, file_fd in enumerate(fds):
                os.dup2(file_fd, standard_fd)
                os.close(file_fd)
            old = sys.stdin
            sys.stdin = open(0, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
            yield
