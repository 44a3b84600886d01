"""A pass on devices of all workers of a job, in the place of the mode that it interrupts.

The keys that the data of all workers needs are divided among the workers by bucket. Each has the
rows of its keys in blocks on its device, looks rows up there for the others and updates them; what
travels goes by all-to-all. A step is one of all workers that have a batch, and equals one of sync.
At the end the servers get all rows as one import, or none.

A worker that dies ends the pass for all: they have rows that nobody else has. Started again, all
repeat it, unless it has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from trireme.errors import BadRequest, TriremeError
from trireme.interchange.worker_side.import_requests import new_id
from trireme.job.cluster import Cluster
from trireme.protocol.block_messages import BlockTensors
from trireme.train.modes.base import Mode
from trireme.train.modes.device_pass.pass_mode import DevicePass
from trireme.train.modes.device_pass.rows_on_device import RowsOnDevice
from trireme.train.modes.device_ranks.asked_rows import AskedRows
from trireme.train.modes.device_ranks.exchange import IDLE, Exchange, Message, caught
from trireme.train.modes.device_ranks.next_keys import NextKeys
from trireme.train.modes.device_ranks.owned_rows import (
    OwnedKeys,
    OwnedRows,
    keys_ahead,
    keys_of_owner,
)
from trireme.train.modes.device_ranks.owned_window import OwnedWindow
from trireme.train.modes.device_ranks.owners import Owners
from trireme.train.modes.device_ranks.steps_together import StepMade, StepsTogether
from trireme.train.modes.setup import TableGradients, TrainingSetup, WorkerStep
from trireme.train.modes.worker_group import WorkerGroup, ways_to_find
from trireme.train.pass_data import PassData, WindowSize
from trireme.worker import passes
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.gradients import KeysByClass
from trireme.worker.pull import Pulled

log = logging.getLogger("trireme.train")

T = TypeVar("T", bound=RowsOnDevice)


class SharedDevicePass(DevicePass):
    """All workers call alike, but for rows and steps, as many as the data of each needs.

    num_steps: the steps of the job.
    """

    _asked: AskedRows
    _together: StepsTogether
    _end: JointEnd

    def __init__(
        self,
        setup: TrainingSetup,
        outside: Mode,
        source: PassData | WindowSize,
        device: torch.device,
        before: DevicePass | None,
        following: PassData | None,
    ) -> None:
        self._exchange: Exchange | None = None
        self._next_keys: NextKeys | None = None  # of the pass that follows
        self._device, self._has_stopped, self._follows = device, False, following is not None
        self._is_given = self._are_rows_lost = False
        try:
            super().__init__(setup, outside, source, device, before, following)
        except BaseException:
            self._leave()
            self._close()
            raise

    def _enter(self) -> None:
        super()._enter()
        if not self._is_over:
            self._exchange, self.num_steps = _meet(
                self._setup.cluster, self._device, self.num_steps
            )
            self._steps_made = self.num_steps

    def _bring_rows(
        self, source: PassData | WindowSize, device: torch.device, before: DevicePass | None
    ) -> None:
        exchange, setup = self._exchange, self._setup
        if exchange is None:
            if isinstance(source, PassData):
                source.keys()  # reading may draw random numbers, as it did for the predecessor
            return
        is_first = exchange.rank == 0  # which takes the lease of the pass for all
        exchange.agree(caught(self._take_lease) if is_first else None)
        self._owners = owners = Owners(exchange.size, setup.tables, setup.cluster.pool)
        before = before if isinstance(before, SharedDevicePass) else None
        self.rows = rows = self._owned(exchange, owners, source, device, before)
        self._asked = AskedRows(exchange, owners, rows, setup.cluster.pool)
        self._together = StepsTogether(setup, exchange, owners, self._asked, self._steps)
        self._end = JointEnd(setup, exchange, rows)

    def _owned(
        self,
        exchange: Exchange,
        owners: Owners,
        source: PassData | WindowSize,
        device: torch.device,
        before: SharedDevicePass | None,
    ) -> OwnedRows | OwnedWindow:
        """The rows of this worker."""
        setup, kind = self._setup, type(source).__name__
        ahead = None if before is None else before._keys_ahead(source)
        body = {
            "kind": kind,
            "id": new_id(),
            "follows": self._follows,
            "is_ahead": ahead is not None,
        }
        bodies = exchange.agree(body=body)
        _check_alike(bodies)
        rows_before = None if before is None else before.rows
        are_ahead = all(body["is_ahead"] for body in bodies)
        if rows_before is not None and not are_ahead:
            log.info("pass on devices: a worker begins with other data than was read ahead for")
            rows_before.close()
            rows_before = None
        if isinstance(source, WindowSize):
            id = str(bodies[0]["id"])
            return self._agreed(lambda: OwnedWindow(setup, source, device, self._lease, id))
        if ahead is not None and are_ahead:
            owned = keys_ahead(exchange, ahead)
        else:
            owned = keys_of_owner(exchange, owners, source)
        return self._agreed(lambda: OwnedRows(setup, owned, device, rows_before, self._lease))

    def _keys_ahead(self, source: PassData | WindowSize) -> NextKeys | None:
        """What was read during this pass, which has ended, for one over `source`."""
        ahead = self._next_keys
        if self.rows is None or ahead is None or not ahead.can_complete:
            return None
        is_same = isinstance(source, PassData) and source.dataset is ahead.data.dataset
        return ahead if is_same else None

    def _read_ahead(self, following: PassData) -> None:
        if self._exchange is None:
            return
        self._next_keys = self._exchange.next_keys = NextKeys(following, self._owners)
        super()._read_ahead(OwnedKeys.of(following, self._next_keys.owned))

    def _agreed(self, work: Callable[[], T]) -> T:
        """The rows that work makes, as all workers do. Raises at all of them the error of one."""
        assert self._exchange is not None
        try:
            rows = work()
        except TriremeError as error:
            self._exchange.agree(error)
            raise
        try:
            self._exchange.agree()
        except BaseException:
            rows.close()
            raise
        return rows

    # ---- rows ----

    def pull(self, keys: KeysByClass, *, blocks: bool, number: int | None = None) -> Pulled:
        self._open_rows()
        return self._pulled(keys, self._asked.ask(keys))

    def read(self, keys: KeysByClass) -> Pulled:
        """Of keys that no worker has on its device, the servers' rows."""
        if self._exchange is None:
            return super().read(keys)
        rows = {}
        for class_id, (rows_KD, is_here) in self._asked.look(keys).items():
            rows[class_id] = rows_KD.contiguous()
            if not bool(is_here.all()):
                lacking = keys[class_id][~is_here.cpu().numpy()]
                elsewhere = self._elsewhere(class_id, lacking)
                rows[class_id][~is_here] = elsewhere.to(rows_KD.device)
        return self._pulled(keys, rows)

    # ---- the step ----

    def clip(self, tables: TableGradients, dense: DenseParameters) -> TableGradients:
        """Nothing: the sum of all workers is clipped."""
        return tables

    def step(self, step: WorkerStep) -> None:
        self._open_rows()
        self._note_step(self._together.step(step))

    def _note_step(self, made: StepMade) -> None:
        self._has_trained = True
        self._steps_made += 1
        self.num_steps = self._steps_made
        if made.stops:
            request = self._setup.cluster.stop_request
            self._has_stopped, request.reason = True, request.reason or made.stops

    def has_stopped(self, reason: str = "") -> bool:
        """All workers stop after the same step."""
        return self._has_stopped

    def set_num_steps(self, num_steps: int) -> None:
        self.num_steps = self._steps_made = num_steps

    # ---- without a batch ----

    def begin_run(self) -> None:
        super().begin_run()
        self._has_stopped = False

    def end_run(self) -> None:
        self._take_part()

    def end_pass(self) -> None:
        self._take_part()

    def _take_part(self) -> None:
        """Take part in what the others do, until no worker has a batch."""
        exchange = self._exchange
        while exchange is not None:
            messages = exchange.share(IDLE, {})
            kinds = {one.kind for one in messages} - {IDLE}
            if not kinds:
                return
            self._answer(kinds.pop(), messages)

    def _answer(self, kind: str, messages: list[Message]) -> None:
        if kind == "rows":
            self._asked.answer(messages)
        elif kind == "look":
            self._asked.answer_look(messages)
        elif kind == "step":
            self._note_step(self._together.answer(messages))
        else:
            raise BadRequest(
                f"pass on devices: expected the other workers to train or evaluate, found {kind!r}:"
                " every worker must do the same in the same order"
            )

    # ---- its end ----

    def _give(self) -> None:
        if self._exchange is None or self._is_given:
            return
        self._take_part()
        self._end.give(self._blocks, self.num_steps)
        self._is_given = True

    def end_device_pass(self) -> Mode:
        """As there. All workers call it, and have the same error or none."""
        outside = super().end_device_pass()
        self._leave()
        return outside

    def _note_end(self, rows: RowsOnDevice) -> None:
        """As there. No worker changes rows again before all know the moment of the end."""
        super()._note_end(rows)
        if self._next_keys is None or self._exchange is None:
            return
        try:
            self._exchange.agree()
        except TriremeError as error:  # the pass has ended for all
            log.warning("pass on devices: the next one reads all its rows: %s", error)
            rows.close()

    def abandon_device_pass(self) -> Mode:
        """As there; the others learn of it and cannot go on either."""
        exchange = self._exchange
        self._are_rows_lost = (
            exchange is not None
            and exchange.has_lost_workers
            and self._setup.cluster.host is not None
        )
        self._leave()
        return super().abandon_device_pass()

    def _adopt_if_servers_answer(self) -> None:
        if self._are_rows_lost:  # with a worker that hosted some: its server would be waited for
            log.warning("pass on devices: abandoned; workers that hosted rows have gone")
            return
        super()._adopt_if_servers_answer()

    def finish(self) -> None:
        self._leave()
        super().finish()

    def _leave(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None


def _check_alike(bodies: Sequence[dict[str, Any]]) -> None:
    """Raises BadRequest, at all workers: they begin different things."""
    if len(kinds := {str(body["kind"]) for body in bodies}) > 1:
        raise BadRequest(
            f"begin_pass: expected all workers to begin the same, found {sorted(kinds)}"
        )
    if len({bool(body["follows"]) for body in bodies}) > 1:
        have = [rank for rank, body in enumerate(bodies) if body["follows"]]
        raise BadRequest(
            "begin_pass: expected data that follows at all workers or at none, found it at workers"
            f" {have} of {len(bodies)}: give `following` everywhere; a worker without data in the"
            " next pass has an empty one"
        )


def _meet(cluster: Cluster, device: torch.device, num_steps: int) -> tuple[Exchange, int]:
    """Wait for all workers, and connect to them; returns also the most steps that one of them has
    made. num_steps: made by this worker. Raises as `WorkerGroup` and `passes.meet_in_pass`.
    """
    steps = [num_steps]

    def at_coordinator(place: list[Any]) -> list[Any]:
        bodies = passes.meet_in_pass(cluster.client, {"place": place, "num_steps": num_steps})
        steps.extend(int(body["num_steps"]) for body in bodies)
        address: list[Any] = bodies[0]["place"]
        return address

    silent, lost = ways_to_find(cluster)
    group = WorkerGroup(
        cluster, device, "pass on devices", find_silent=silent, find_lost=lost, meet=at_coordinator
    )
    group.note_thread(is_scripts=True)
    return Exchange(group, cluster.worker, cluster.num_workers), max(steps)


class JointEnd:
    """The end of a pass of all workers: one import, to which each sends its rows. Worker 0 makes
    it, with the dense blocks, and asks the coordinator, whose decision is that of all workers.
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
