"""How dense parameters are cut into blocks, and which server has which block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import xxhash

from trireme.errors import BadRequest

SIZE = 65536
# torch's kernels take so many elements at a time, and round those that are left over otherwise: a
# cut anywhere else would show in the bits.
UNIT = 64
ROUND_ROBIN, HASH = "round_robin", "hash"

Place = Callable[[str, int, int], int]
"""(parameter's name, number of the block in it, number of servers) -> index of a server."""


class Blocks:
    """The cut of the dense parameters, and their placement. Neither changes what sync computes.

    Args:
        size: elements of a block, a multiple of 64; None: parameters stay whole, which optimizers
            need that look at more than one element at a time (Adafactor, Muon).
        place: "round_robin": blocks are dealt to the servers in turn. "hash": by a hash of the
            block's name, so that a block's server depends on nothing else. Or a function of the
            parameter's name, the block's number in it from 0 and the number of servers, which
            returns the index of a server: the same on every worker.

    Raises:
        BadRequest: another size, or another placement.
    """

    def __init__(self, size: int | None = SIZE, *, place: str | Place = ROUND_ROBIN) -> None:
        if size is not None and not _is_size(size):
            raise BadRequest(
                f"Blocks: expected size as a multiple of {UNIT}, or None, found {size!r}"
            )
        if not callable(place) and place not in (ROUND_ROBIN, HASH):
            raise BadRequest(
                f"Blocks: expected place {ROUND_ROBIN!r}, {HASH!r} or a function, found {place!r}"
            )
        self.size, self.place = size, place

    def __repr__(self) -> str:
        """What workers must agree on; of functions, what they return is compared."""
        place = "a function" if callable(self.place) else repr(self.place)
        return f"Blocks({self.size}, place={place})"

    def owners(self, parameters: Sequence[str], num_servers: int) -> list[int] | None:
        """The server of each block; None: the coordinator deals them in turn.

        parameters: of each block the parameter's name, in the order of the blocks.

        Raises:
            BadRequest: the function returned something else than the index of a server.
        """
        if self.place == ROUND_ROBIN:
            return None
        place = self.place if callable(self.place) else _by_hash
        counted: Counter[str] = Counter()
        owners = []
        for name in parameters:
            number, counted[name] = counted[name], counted[name] + 1
            owner = place(name, number, num_servers)
            is_index = isinstance(owner, int) and not isinstance(owner, bool)
            if not is_index or not 0 <= owner < num_servers:
                raise BadRequest(
                    f"Blocks: expected a server below {num_servers} for block {number} of {name},"
                    f" found {owner!r}"
                )
            owners.append(owner)
        return owners


def _is_size(size: int) -> bool:
    return type(size) is int and size >= UNIT and size % UNIT == 0


def _by_hash(name: str, number: int, num_servers: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{name}/{number}".encode()) % num_servers
