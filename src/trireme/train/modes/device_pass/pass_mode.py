"""A pass on a device, in the place of the mode that it interrupts.

Until its `end` this worker trains rows in blocks and the dense parameters with a twin of the user's
optimizer, and the servers learn nothing. `end` gives them rows, dense weights and optimizer state
as one import, which all servers install or none. So whatever dies meanwhile, they have the state
of the beginning or that of the end.

It is one of the passes that the coordinator numbers, and it decides on one import for each. So a
worker that is restarted leaves out what has ended and repeats the pass that has not; and a process
that was taken for dead, and has a successor, cannot end a pass.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from trireme.errors import BadRequest, NotReady, TriremeError
from trireme.protocol.block_messages import BlockTensors
from trireme.protocol.pass_lease import PassLease
from trireme.protocol.routing import Keys
from trireme.table import RowClassId
from trireme.train.clipping import clip_gradients
from trireme.train.modes.base import BeginPull, Mode
from trireme.train.modes.device_pass.block_of_keys import check_schema
from trireme.train.modes.device_pass.dense_steps import DenseSteps
from trireme.train.modes.device_pass.key_slots import ABSENT
from trireme.train.modes.device_pass.pass_rows import PassRows
from trireme.train.modes.device_pass.rows_on_device import RowsOnDevice
from trireme.train.modes.device_pass.window_rows import RowsInWindow
from trireme.train.modes.on_servers.worker_trained_dense import WorkerTrainedDense
from trireme.train.modes.setup import TableGradients, TrainingSetup, WorkerStep
from trireme.train.pass_data import PassData, WindowSize
from trireme.train.predecessor import PredecessorProgress, check_loop, warn_of_lost_buffers
from trireme.worker import passes
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.gradients import KeysByClass
from trireme.worker.passes import PassNote
from trireme.worker.pull import Pulled

log = logging.getLogger("trireme.train")

ATTEMPTS = 3
"""To end a pass, while servers are killed and restarted."""


class DevicePass(Mode):
    """Each step uses the weights of the step before, whatever the interrupted mode is.

    Args:
        outside: the mode between passes.
        source: the data that it trains on; or the size of a window over data that is not known.
        device: where the rows are.
        before: the last pass; it may have rows that both need, and have read others for this one.
        following: the data of the next pass, which a thread reads.

    Raises as PassRows or RowsInWindow; the servers have not changed.
    """

    trains_in_threads = False
    saves_between_steps = False
    trains_rows_on_device = True

    def __init__(
        self,
        setup: TrainingSetup,
        outside: Mode,
        source: PassData | WindowSize,
        device: torch.device,
        before: DevicePass | None,
        following: PassData | None = None,
    ) -> None:
        self._setup, self._outside, self._client = setup, outside, setup.cluster.client
        self._import_id = ""  # of the last attempt to end
        self._has_trained = self._is_ending = False
        self.last_push = outside.last_push
        self.rows: RowsOnDevice | None = None
        self._lease: PassLease | None = None
        self._enter()
        self._steps = None if setup.optimizer is None else DenseSteps(setup.optimizer)
        twin = None if self._steps is None else self._steps.twin
        self._dense = WorkerTrainedDense(self._client, setup.replica.dense, twin)
        try:
            self._bring_rows(source, device, before)
            self._dense.adopt()
        except BaseException:
            self._close()
            raise
        if following is not None:
            self._read_ahead(following)

    def _enter(self) -> None:
        note = PassNote(self.last_push.sequence, self._outside.num_steps)
        entered = passes.begin_pass(self._client, note, together=False)
        script = self._client.script
        has_ended = script.number == script.trained
        self._is_over = entered.is_over or has_ended  # a predecessor has done it
        self.num_steps = entered.note.num_steps
        if has_ended:
            self.num_steps = script.trained_steps
        elif script.has_begun and not self._is_over:
            worker = self._setup.cluster.worker
            log.info(
                "train: worker %d was restarted: pass %d on a device begins again",
                *(worker, script.number),
            )
            warn_of_lost_buffers(self._setup.replica.model, worker)

    def _bring_rows(
        self, source: PassData | WindowSize, device: torch.device, before: DevicePass | None
    ) -> None:
        """Have the servers keep the rows as they are for this pass, and begin to read them."""
        rows_before = None if before is None else before.rows
        if self._is_over:
            if not isinstance(source, WindowSize):
                source.keys()  # reading may draw random numbers, as it did for the predecessor
            return
        lease = self._take_lease()
        if isinstance(source, WindowSize):
            if rows_before is not None:
                rows_before.close()
            self.rows = RowsInWindow(self._setup, source, device, lease)
        else:
            self.rows = PassRows(self._setup, source, device, rows_before, lease)

    def _take_lease(self) -> PassLease:
        self._lease = lease = passes.lease_of(self._client)
        passes.take_lease(self._client, lease)
        return lease

    def _read_ahead(self, following: PassData) -> None:
        if self.rows is not None:
            self.rows.read_ahead(following)

    def check_device_pass(self) -> None:
        raise _within_pass("begin_pass")

    def check_between_passes(self, what: str) -> None:
        raise _within_pass(what)

    # ---- its end ----

    def end_device_pass(self) -> Mode:
        """Raises as `importing`; the rows stay, untrained, and the call may be repeated."""
        self._is_ending = True
        for attempt in range(ATTEMPTS):
            try:
                self._give()
                break
            except NotReady as error:  # a server was restarted before it had all
                can_repeat = self.rows is not None and self.rows.can_give_again
                if attempt == ATTEMPTS - 1 or not can_repeat:
                    raise
                log.warning("pass on a device: its end is repeated: %s", error)
        if self.rows is not None:
            self._note_end(self.rows)
        self._outside.set_num_steps(self.num_steps)
        self._outside.adopt()
        return self._outside

    def _note_end(self, rows: RowsOnDevice) -> None:
        """The servers have the rows."""
        rows.note_end()

    def _give(self) -> None:
        """Bring to the servers what the pass has trained, unless they have it."""
        if self.rows is None or not self._has_trained:
            self._release()
            return
        if self._has_ended():
            return
        self.rows.check_unchanged()

        def decide(id: str) -> bool:
            return passes.end_device_pass(self._client, id, self.num_steps)

        self._import_id = id = self.rows.import_id()
        with self.rows.ending(id, self._blocks(), decide):
            self.rows.send(id)

    def _has_ended(self) -> bool:
        """Whether the last attempt to end has taken place, or else never does."""
        last, timeout_s = self._import_id, self._client.timeout_s
        finish = self._client.servers.finish
        return bool(last) and finish("import", last, commit=False, timeout_s=timeout_s)

    def _blocks(self) -> BlockTensors:
        """The dense weights, and the state of their optimizer."""
        return self._dense.blocks(weights=True) if len(self._setup.replica.dense) else {}

    def _release(self) -> None:
        """Give the lease up, where no import ends it."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            self._client.release(lease)
        except TriremeError as error:  # it ends with the worker's next push, or its process
            log.warning("pass on a device: a server may keep the lease of %s: %s", lease, error)

    def abandon_device_pass(self) -> Mode:
        """Raises BadRequest: an end that raised has taken place. Unavailable: nobody knows yet."""
        if self._has_ended():
            raise BadRequest(
                "abandon_pass: expected a pass without an end, found that the servers have its rows"
                " since the end_pass that failed: call end_pass again, which finds them there"
            )
        self._close()
        self._adopt_if_servers_answer()
        return self._outside

    def _adopt_if_servers_answer(self) -> None:
        """Have the dense weights of the beginning again."""
        try:
            self._outside.adopt()
        except TriremeError as error:  # the caller must see what ended the pass
            log.warning("pass on a device: abandoned, and servers do not answer: %s", error)

    def finish(self) -> None:
        """The script has ended in a pass: as `abandon_device_pass`."""
        if self._has_trained:
            log.warning(
                "pass on a device: expected end_pass before the script ends, found none: what the"
                " pass has trained is forgotten; the servers have the state of its beginning"
            )
        self._close()
        self._outside.finish()

    def _close(self) -> None:
        if self.rows is not None:
            self.rows.close()
            self.rows = None
        self._release()

    def open(self) -> None:
        """Nothing: the mode between passes has."""

    # ---- rows ----

    def pull_ahead(self, *, steps: bool) -> BeginPull | None:
        return None

    def lacking(self, keys: KeysByClass) -> KeysByClass:
        return {class_id: keys_K[:0] for class_id, keys_K in keys.items()}

    def lookahead(self) -> int:
        return 0 if self.rows is None else self.rows.lookahead

    def plan(self, keys: KeysByClass | None) -> None:
        if self.rows is not None:
            self.rows.plan(keys)

    def begin_run(self) -> None:
        if self.rows is not None:
            self.rows.begin_run()

    def pull(self, keys: KeysByClass, *, blocks: bool, number: int | None = None) -> Pulled:
        held = self._open_rows()
        held.bring(keys)
        rows = {c: held.blocks[c].weights(keys_K) for c, keys_K in keys.items() if len(keys_K)}
        return self._pulled(keys, rows)

    def _open_rows(self) -> RowsOnDevice:
        if self._is_over:
            check_loop(PredecessorProgress(is_over=True))
        if self._is_ending:
            raise BadRequest(
                "pass on a device: expected no training after end_pass, which has failed but may"
                " have taken place, found some: call end_pass again, or abandon_pass"
            )
        assert self.rows is not None
        return self.rows

    def read(self, keys: KeysByClass) -> Pulled:
        """Of keys that are not on the device, the servers' rows."""
        held = {} if self.rows is None else self.rows.blocks
        rows = {}
        for class_id, keys_K in keys.items():
            block = held.get(class_id)
            if block is None or (slots := block.slots.find(keys_K)).min(initial=0) == ABSENT:
                rows[class_id] = self._elsewhere(class_id, keys_K)
                if block is not None:
                    own = torch.from_numpy(slots != ABSENT)
                    rows[class_id][own] = block.weights_at(slots[slots != ABSENT]).cpu()
            else:
                rows[class_id] = block.weights_at(slots)
        return self._pulled(keys, rows)

    def _elsewhere(self, class_id: RowClassId, keys_K: Keys) -> Tensor:
        weights = None if self.rows is None else self.rows.weights_elsewhere(class_id, keys_K)
        if weights is None:
            return self._outside.read({class_id: keys_K}).rows[class_id]
        return weights

    def _pulled(self, keys: KeysByClass, rows: dict[RowClassId, Tensor]) -> Pulled:
        dims = {part.class_id: part.dim for table in self._setup.tables for part in table.parts}
        all_rows = {c: rows[c] if c in rows else torch.empty(0, dims[c]) for c in keys}
        return Pulled(all_rows, None, [], dict.fromkeys(keys, 0))

    # ---- the step ----

    def begin_step(self) -> int:
        self._open_rows()
        return self.num_steps + 1

    def clip(self, tables: TableGradients, dense: DenseParameters) -> TableGradients:
        return clip_gradients(self._setup.clip, tables, dense.parameters.values())

    def step(self, step: WorkerStep) -> None:
        self._has_trained = True
        time, blocks = self._setup.data_time.seconds(), self._open_rows().blocks
        for class_id, gradient in step.tables.items():
            blocks[class_id].update(gradient, step.examples, time)
        if self._steps is not None:
            self._steps.step()
        step.dense.take_gradients(trained=True)

    def wait_for_step(self) -> None:
        """Nothing: the step is made."""

    def flush(self) -> None:
        """Nothing: no step leaves this worker before the end."""

    def refresh(self) -> None:
        """Nothing: the parameters are here."""

    def has_stopped(self, reason: str = "") -> bool:
        return bool(reason)

    # ---- passes over data within ----

    def begin_pass(self) -> PredecessorProgress:
        return PredecessorProgress(is_over=self._is_over)

    def end_pass(self) -> None:
        """Nothing: the pass on the device may have several epochs."""

    def leave_pass(self) -> None:
        raise _within_pass("load")

    # ---- checkpoints ----

    def resume(self, steps_before: int | None = None) -> None:
        raise _within_pass("load")

    def set_num_steps(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def publish(self) -> None:
        raise _within_pass("save")

    def adopt(self) -> None:
        raise _within_pass("load")


def _within_pass(what: str) -> BadRequest:
    return BadRequest(
        f"{what}: expected to be called between passes on a device, found it within one, whose rows"
        " the servers do not have yet: call it before begin_pass or after end_pass"
    )


def check_pass(setup: TrainingSetup, *, has_passes: bool, is_shared: bool) -> None:
    """Raises BadRequest: the job or the mode cannot train in such a pass on a device. is_shared:
    several workers may make one together.
    """
    cluster, mode = setup.cluster, setup.strategy.mode
    if not has_passes:
        raise BadRequest(
            "begin_pass: expected a mode whose rows and dense weights are on the servers between"
            f" steps, found {mode!r}"
        )
    if cluster.num_streams:
        raise BadRequest(
            "begin_pass: expected workers with streams of their own, found"
            f" {cluster.num_streams} shared streams: rows in a block are not shared"
        )
    if cluster.num_workers > 1 and not is_shared:
        raise BadRequest(
            f"begin_pass: in a job of {cluster.num_workers} workers, which make each step of a pass"
            f" on devices together, expected mode 'sync' or 'collective', found {mode!r}"
        )
    for table in setup.tables:
        check_schema(table.schema)
