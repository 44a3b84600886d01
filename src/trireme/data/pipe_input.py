"""What a `pipe_command` reads on stdin: the file itself, or bytes that a thread writes."""

import os
import threading
from io import FileIO

import numpy as np
from numpy.typing import NDArray

from trireme.data.byte_streams import BLOCK_BYTES, ByteStream, open_bytes, open_raw
from trireme.data.sources import DataFile
from trireme.errors import Internal

_JOIN_S = 30.0


class FileInput:
    """A local file, which the command reads itself."""

    def __init__(self, file: DataFile, raw: FileIO) -> None:
        self._file = file
        self._raw = raw
        self.fd = raw.fileno()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes read so far: the offset is shared with the command."""
        if not self._raw.closed:
            self._num_bytes = self._raw.tell()
        return self._num_bytes

    def lent(self) -> None:
        """Do nothing: the command has its own descriptor."""

    def check(self) -> None:
        self._file.check_unchanged()

    def stop(self) -> None:
        """Do nothing: the command is killed."""

    def close(self) -> None:
        self._num_bytes = self.num_bytes
        self._raw.close()


class FedInput:
    """Bytes that a thread writes to the command, as fast as it reads them."""

    def __init__(self, source: ByteStream) -> None:
        self._source = source
        self._error: BaseException | None = None
        self.fd, self._feed = os.pipe()
        self._thread = threading.Thread(target=self._run, name="trireme-pipe-feed", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        return self._source.num_bytes_in

    def lent(self) -> None:
        os.close(self.fd)

    def _run(self) -> None:
        buffer: NDArray[np.uint8] = np.empty(BLOCK_BYTES, np.uint8)
        try:
            with FileIO(self._feed, "w") as feed:
                while num_bytes := self._source.readinto(buffer):
                    rest = buffer.data[:num_bytes]
                    while rest:
                        rest = rest[feed.write(rest) or 0 :]
        except BrokenPipeError:
            return  # the command reads no more: its exit code says whether it has failed
        except BaseException as error:  # noqa: BLE001 - raised again in check()
            self._error = error
        finally:
            self._source.close()

    def check(self) -> None:
        """Raise the thread's error. It ends with the command, which is done, at the latest."""
        self._join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._source.stop()

    def close(self) -> None:
        """Stop the thread, which cannot wait for the command, as that has ended."""
        self._source.stop()
        self._join()

    def _join(self) -> None:
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise Internal(f"PipeStream: its feeder did not stop within {_JOIN_S:.0f} s")


def open_input(file: DataFile) -> FileInput | FedInput:
    if file.is_local and file.codec is None:
        return FileInput(file, open_raw(file))
    return FedInput(open_bytes(file))
