"""What a push needs of tables with rows on SSD, from before its record until it is applied: its
rows in memory, and room for new ones. So what is recorded is applied whatever a disk or other
requests do meanwhile, and no step of sync waits for a disk; unless it is much of the memory.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain

import numpy as np

from trireme import _core
from trireme.errors import TriremeError
from trireme.protocol.routing import Keys
from trireme.protocol.wire import Push
from trireme.server.served_tables import ServedTable

log = logging.getLogger("trireme.server")

Claims = Mapping[str, list[_core.Claim]]
"""By the table's name: none for a table in memory, nor where claims would take too much memory."""
NO_CLAIMS: Claims = {}

WithRoom = Callable[[Callable[[], _core.Claim | None]], _core.Claim | None]


class RowClaims:
    """The claims of staged pushes. Threads: any, but one at a time for a push.

    table: by its name.
    with_room: see `RowTier.with_room`.
    """

    def __init__(
        self, table: Callable[[str], ServedTable], with_room: WithRoom, pool: _core.Pool
    ) -> None:
        self._table, self._with_room, self._pool = table, with_room, pool
        self._staged: dict[tuple[int, int], Claims] = {}

    def claim(self, push: Push) -> Claims:
        """Raises ResourceExhausted: no room. Unavailable, DeadlineExceeded, Corruption: a disk.

        All parts of a table have one claim or none: they are applied together, and what some had
        would be lacking then.
        """
        tables = {part.table: self._table(part.table) for part in push.tables}
        return {
            name: self.claim_keys(
                table, np.concatenate([part.keys for part in push.tables if part.table == name])
            )
            for name, table in tables.items()
            if table.rows.tier is not None
        }

    def claim_keys(self, table: ServedTable, keys: Keys) -> list[_core.Claim]:
        """None for a table in memory, nor for keys whose rows take too much of the memory: those
        are read again when they are needed, if need be. Raises as `claim`.
        """
        if table.rows.tier is None:
            return []
        claim = self._with_room(partial(table.rows.claim, keys, self._pool))
        return [] if claim is None else [claim]

    def fetch(self, push: Push) -> None:
        """Bring the rows of a push from SSD into memory, as far as there is room: many at a time,
        where applying it reads those of a few buckets after the other.
        """
        for part in push.tables:
            self._table(part.table).rows.fetch(part.keys, self._pool)

    def keep(self, push: Push, claims: Claims) -> None:
        """Until the push is dropped."""
        if claims:
            self._staged[push.id] = claims

    def keep_anew(self, pushes: Iterable[Push]) -> None:
        """Claim and keep what pushes need that were staged before a start, as far as there is room:
        with less memory than before, their step makes room when it is applied.
        """
        for push in pushes:
            try:
                self.keep(push, self.claim(push))
            except TriremeError as error:
                log.warning("the rows of a staged push cannot be claimed: %s", error)
                return

    def of(self, pushes: Sequence[Push]) -> Claims:
        """The claims of a step. Of a table of which a push has none, those of the others are given
        up: the step then makes room as it is applied, and would wait for what they hold.
        """
        claims: dict[str, list[_core.Claim]] = {}
        for name in {part.table for push in pushes for part in push.tables}:
            of_pushes = [
                self._staged.get(push.id, NO_CLAIMS).get(name, [])
                for push in pushes
                if any(part.table == name for part in push.tables)
            ]
            if all(of_pushes):
                claims[name] = list(chain.from_iterable(of_pushes))
            else:
                self._give_up(name, pushes)
        return claims

    def _give_up(self, name: str, pushes: Sequence[Push]) -> None:
        for push in pushes:
            if (of_push := self._staged.get(push.id)) is not None:
                of_push.get(name, []).clear()

    def drop(self, pushes: Iterable[Push]) -> None:
        """They have been applied, or will never be."""
        for push in pushes:
            self._staged.pop(push.id, None)
