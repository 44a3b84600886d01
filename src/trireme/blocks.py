"""How dense parameters are cut into blocks, and which server owns which block."""

from collections import Counter
from collections.abc import Callable, Sequence

import xxhash

from trireme.errors import wrong_argument

SIZE = 65536
# torch's kernels process 64 elements at a time and round the rest differently: a cut anywhere else
# would change bits.
UNIT = 64
SIZE_MAX = 1 << 40
ROUND_ROBIN, HASH = "round_robin", "hash"

Placement = Callable[[str, int, int], int]
"""(parameter's name, number of the block in it, number of servers) -> index of a server."""


class Blocks:
    """The cut of dense parameters, and the placement of blocks. Neither changes results of sync.

    Args:
        size: elements of a block, a multiple of 64; None: parameters stay whole, as Adafactor and
            Muon need them.
        place: "round_robin": servers take blocks in turn. "hash": a hash of the block's name alone
            chooses its server. Or a function of the parameter's name, the number of the block in it
            (from 0) and the number of servers, which returns the index of a server, the same on
            every worker.

    Raises:
        BadRequest: another size, or another placement.
    """

    def __init__(self, size: int | None = SIZE, *, place: str | Placement = ROUND_ROBIN) -> None:
        is_size = type(size) is int and size in range(UNIT, SIZE_MAX + 1, UNIT)
        if size is not None and not is_size:
            raise wrong_argument(
                f"Blocks: expected size as a multiple of {UNIT} up to {SIZE_MAX}, or None for whole"
                f" parameters, found {size!r}"
            )
        if not callable(place) and place not in (ROUND_ROBIN, HASH):
            raise wrong_argument(
                f"Blocks: expected place {ROUND_ROBIN!r}, {HASH!r} or a function, found {place!r}"
            )
        self.size, self.place = size, place

    def __repr__(self) -> str:
        """What workers must agree on; functions are compared by their results."""
        place = "a function" if callable(self.place) else repr(self.place)
        return f"Blocks({self.size}, place={place})"

    def owners(self, parameters: Sequence[str], num_servers: int) -> list[int] | None:
        """The server of each block; None: round robin, by the coordinator.

        parameters: the parameter's name of each block, in the order of the blocks.

        Raises:
            BadRequest: the function returned something other than the index of a server.
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
                raise wrong_argument(
                    f"Blocks: expected a server below {num_servers} for block {number} of {name},"
                    f" found {owner!r}"
                )
            owners.append(owner)
        return owners


def _by_hash(name: str, number: int, num_servers: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{name}/{number}".encode()) % num_servers
