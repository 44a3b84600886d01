"""The calls that made the order of examples in memory."""

import hashlib
import zlib


class ShuffleHistory:
    """The calls since a load, in order.

    Attributes:
        order: a number for the order of the examples: equal after the same calls.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.order = self._num_shuffles = 0

    def begin(self, worker: int, num_workers: int, num_examples: int) -> None:
        """Examples have been loaded."""
        self.order = zlib.crc32(
            repr(("load", self._seed, worker, num_workers, num_examples)).encode()
        )
        self._num_shuffles = 0

    def add(self, call: str, num_examples: int) -> None:
        """Another shuffle begins."""
        self._num_shuffles += 1
        text = repr((call, self._num_shuffles, num_examples))
        self.order = zlib.crc32(text.encode(), self.order)

    def seed(self, call: str, worker: int) -> int:
        """64 bits for the current shuffle."""
        text = repr((self._seed, call, self._num_shuffles, worker))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
