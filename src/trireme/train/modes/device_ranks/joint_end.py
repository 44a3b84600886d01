"""How a pass of all workers comes to the servers: as one import, to which each sends its rows."""

from __future__ import annotations

from collections.abc import Callable

from trireme.errors import TriremeError
from trireme.protocol.block_messages import BlockTensors
from trireme.train.modes.device_ranks.exchange import Exchange, caught
from trireme.train.modes.device_ranks.owned_rows import OwnedRows
from trireme.train.modes.device_ranks.owned_window import OwnedWindow
from trireme.train.modes.setup import TrainingSetup
from trireme.worker import passes


class JointEnd:
    """Worker 0 makes the import, with the dense blocks, and asks the coordinator, whose decision is
    that of all workers.
    """

    def __init__(
        self, setup: TrainingSetup, exchange: Exchange, rows: OwnedRows | OwnedWindow
    ) -> None:
        self._exchange, self._rows = exchange, rows
        self._client = setup.cluster.client
        self._last_id = ""  # of the last attempt, at worker 0

    def give(self, blocks: Callable[[], BlockTensors], num_steps: int) -> None:
        """Bring the rows that have changed, and the blocks, to the servers. After an error, which
        all workers raise, it may be called again, by all. Raises as `importing`.
        """
        if self._has_taken_place():
            return
        self._exchange.agree(caught(self._rows.check_unchanged))
        if self._exchange.rank == 0:
            self._give_first(blocks, num_steps)
        else:
            self._give_other()

    def _has_taken_place(self) -> bool:
        """Whether the last attempt has ended the pass: its answer may have been lost."""
        last, is_over, failure = self._last_id, False, None
        finish, timeout_s = self._client.servers.finish, self._client.timeout_s
        try:
            is_over = bool(last) and finish("import", last, commit=False, timeout_s=timeout_s)
        except TriremeError as error:
            failure = error
        return bool(self._exchange.agree(failure, {"is_over": is_over})[0]["is_over"])

    def _give_first(self, blocks: Callable[[], BlockTensors], num_steps: int) -> None:
        others_wait = True
        try:
            self._last_id = id = self._rows.import_id()

            def decide(id: str) -> bool:
                return passes.end_device_pass(self._client, id, num_steps, together=True)

            with self._rows.ending(id, blocks(), decide):
                self._exchange.agree(body={"id": id})
                failure = caught(lambda: self._rows.send(id))
                others_wait = False
                self._exchange.agree(failure)
                others_wait = True
        except TriremeError as error:
            if others_wait:
                self._exchange.agree(error)
            raise
        self._exchange.agree()

    def _give_other(self) -> None:
        id = str(self._exchange.agree()[0]["id"])
        self._exchange.agree(caught(lambda: self._rows.send(id)))
        self._exchange.agree()
