"""The base of the modes that keep rows on servers: a step reaches the servers as a push."""

from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch

from trireme.blocks import Blocks
from trireme.dense.optimizers import GroupValues, group_values, optimizer_spec
from trireme.errors import BadRequest
from trireme.train.clipping import clip_gradients
from trireme.train.modes.base import BeginPull, CompletePull, Mode
from trireme.train.modes.device_pass.pass_mode import DevicePass, check_pass
from trireme.train.modes.device_ranks.mode import SharedDevicePass
from trireme.train.modes.on_servers.pull_ahead import PullAhead
from trireme.train.modes.on_servers.push_stream import PushStream
from trireme.train.modes.setup import TableGradients, TrainingSetup, WorkerStep
from trireme.train.pass_data import PassData, WindowSize
from trireme.train.predecessor import PredecessorProgress, check_loop
from trireme.train.stream_checks import agree_on_model, check_own_stream
from trireme.worker import passes
from trireme.worker.client import StreamPosition, WorkerClient
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.gradients import DenseGradient, KeysByClass, PushHeader
from trireme.worker.passes import EnteredPass, PassNote
from trireme.worker.pull import FollowingPull, Pulled


class PassState:
    """The pass of a worker, which a predecessor may have begun."""

    def __init__(self, client: WorkerClient, stream: PushStream) -> None:
        self._client, self._stream = client, stream
        self.entered: EnteredPass | None = None  # None: between passes
        # A loop that begins no pass would repeat what a predecessor has pushed.
        self.is_repeating = False
        self._is_new = client.script.is_successor

    def begin_script(self) -> None:
        """Compare the start of the script with where the servers stand."""
        self.is_repeating = self._is_new and self._stream.sequence > 0

    def begin(
        self, note: PassNote, *, together: bool = False, staged: bool = False
    ) -> tuple[EnteredPass, PredecessorProgress]:
        """Enter the next pass, and set the stream to where it began and to what a predecessor has
        pushed since. together, staged: see passes.begin_pass.
        """
        entered = passes.begin_pass(self._client, note, together=together, staged=staged)
        progress = PredecessorProgress.from_entered(entered, self._stream.sequence)
        if not progress.is_over:
            self._stream.sequence = entered.note.sequence + progress.num_pushes
        self.entered, self.is_repeating = entered, False
        return entered, progress

    def enter_shared(self, num_steps: int) -> EnteredPass:
        """Enter the next pass of shared streams. A late worker counts on from the others' steps."""
        entered = passes.enter(self._client, num_steps)
        if self._is_new:
            num_steps = max(num_steps, entered.num_steps)
            self._is_new = entered.is_over
        self.entered = replace(entered, num_steps=num_steps)
        return self.entered


class OnServers(Mode):
    """Mode async, unless a method is overridden: each step is one push, which may be sent beside
    the training loop. Rows that it does not change are pulled before it, for the next batch.
    """

    trains_in_threads = True
    saves_between_steps = False
    has_device_passes: ClassVar[bool] = True  # rows and dense weights are on servers between steps
    shares_device_passes: ClassVar[bool] = False  # several workers make one together
    pulls_behind_pushes: ClassVar[bool] = True  # a pull waits for nothing but its worker's push
    pushes_dense: ClassVar[bool] = True  # pushes change dense weights, which pulls bring
    enters_passes: ClassVar[bool] = False  # also where the loop does not call begin_pass
    why_not_shared: ClassVar[str] = ""  # why workers that share streams cannot come and go

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup = setup
        self.cluster, self.client = setup.cluster, setup.cluster.client
        self.stream = PushStream(self.cluster, setup.timing.background)
        self.passes = PassState(self.client, self.stream)
        self.num_steps = 0
        self._ahead: PullAhead | None = None  # of the batch after the one under way
        self._last_device_pass: DevicePass | None = None
        if self.why_not_shared and (streams := self.cluster.num_streams):
            raise BadRequest(
                f"DistributedOptimizer: expected mode 'async' in a job whose workers share out"
                f" {streams} streams, found {setup.strategy.mode!r}, in which {self.why_not_shared}"
            )

    def open(self) -> None:
        self._create()
        self.resume()
        self.passes.begin_script()
        self.adopt()

    def _create(self) -> None:
        """Create the tables and blocks, with worker 0's weights. Every worker calls it. Raises
        SchemaMismatch: workers differ in the strategy, blocks or model, or the servers have another
        table of that name.
        """
        client, optimizer, dense = self.client, self.setup.optimizer, self.setup.replica.dense
        blocks = self.setup.blocks or Blocks()
        client.coordinator.agree("strategy", repr(self.setup.strategy))
        kind = "no optimizer" if optimizer is None else type(optimizer).__name__
        agree_on_model(self.cluster, self.setup.tables, dense, kind)
        for table in self.setup.tables:
            client.create_table(table.schema)
        if optimizer is not None:
            client.coordinator.agree("blocks", repr(blocks))
            names = [block.param for block in dense.specs]
            owners = partial(blocks.owners, names)
            client.create_blocks(optimizer_spec(optimizer), self.group_values(), dense, owners)

    # ---- rows and dense weights ----

    def pull_ahead(self, *, steps: bool) -> BeginPull | None:
        return self._begin_pull

    def _begin_pull(
        self, keys: KeysByClass, under_way: KeysByClass, number: int | None
    ) -> CompletePull:
        pull = partial(self.pull, number=number)
        blocks = self.pushes_dense and len(self.setup.replica.dense) > 0
        ahead = PullAhead(self.setup, self.stream, pull, keys, under_way, blocks=blocks)
        if self.pulls_behind_pushes:
            self._ahead = ahead
        return ahead.complete

    def following(self, step: WorkerStep) -> FollowingPull | None:
        """The pull to send right behind the push of a step; None: there is none, or it is not known
        yet what to pull.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None or not step.in_background:
            return None
        return ahead.following({class_id: part.keys for class_id, part in step.tables.items()})

    def lacking(self, keys: KeysByClass) -> KeysByClass:
        return keys

    def begin_run(self) -> None:
        self.join_pass()

    def pull(self, keys: KeysByClass, *, blocks: bool, number: int | None = None) -> Pulled:
        self.join_pass()
        self.flush()
        return self.pull_after_steps(keys, blocks=blocks and self.pushes_dense)

    def pull_after_steps(self, keys: KeysByClass, *, blocks: bool) -> Pulled:
        """Pull what includes the steps of this worker."""
        return self.client.pull(keys, blocks=blocks, time=self.setup.data_time.seconds())

    def read(self, keys: KeysByClass) -> Pulled:
        return self.client.pull(keys, time=self.setup.data_time.seconds())

    def forget_ahead(self) -> None:
        """What was pulled ahead is older than what is asked for now."""
        self._ahead = None
        self.stream.num_refreshes += 1

    def refresh(self) -> None:
        self.forget_ahead()
        self.flush()
        self.setup.replica.install(self.pull_after_steps({}, blocks=True))

    # ---- the step ----

    def begin_step(self) -> int:
        self.join_pass()
        if self.passes.entered is None:
            check_own_stream("DistributedOptimizer.step", self.cluster)
        elif self.passes.entered.is_over:
            check_loop(PredecessorProgress(is_over=True))
        self.stream.check_usable()
        return self.num_steps + 1

    def next_step(self) -> int:
        """The number of this worker's next step in the pass; 0 where steps have none."""
        return 0

    def clip(self, tables: TableGradients, dense: DenseParameters) -> TableGradients:
        return clip_gradients(self.setup.clip, tables, dense.parameters.values())

    def step(self, step: WorkerStep) -> None:
        header, dense = self.header(step), self.dense_gradient(step.dense)
        following = self.following(step)
        self.stream.push(
            header, step.tables, dense, in_background=step.in_background, following=following
        )

    def note_interrupt(self, error: KeyboardInterrupt) -> None:
        self.stream.fail(error)

    def header(self, step: WorkerStep) -> PushHeader:
        """The facts of the push of a step."""
        return PushHeader(
            sequence=self.stream.sequence + 1,
            step=self.next_step(),
            push_counts=step.push_counts,
            examples=step.examples,
            position=step.position,
            time=self.setup.data_time.seconds(),
        )

    def group_values(self) -> list[GroupValues]:
        """The values of the dense optimizer's groups as they are now."""
        optimizer = self.setup.optimizer
        if optimizer is None:
            return []
        return [group_values(group, optimizer.defaults) for group in optimizer.param_groups]

    def dense_gradient(self, dense: DenseParameters) -> DenseGradient | None:
        """Take the gradients of a replica's dense parameters away; None: it has none."""
        return DenseGradient(dense.take_gradients(), self.group_values()) if len(dense) else None

    def wait_for_step(self) -> None:
        self.refresh()

    def flush(self) -> None:
        self.stream.flush()

    def has_stopped(self, reason: str = "") -> bool:
        return bool(reason)

    # ---- the pass ----

    def join_pass(self) -> None:
        """Enter the next pass if the loop did not call begin_pass."""
        if self.enters_passes and self.passes.entered is None:
            check_loop(self.begin_pass())
        elif self.passes.is_repeating:
            check_loop(PredecessorProgress(num_pushes=self.stream.sequence))

    def begin_pass(self) -> PredecessorProgress:
        self.flush()  # pushes on their way belong to the pass before
        if self.cluster.num_streams:
            entered = self.passes.enter_shared(self.num_steps)
            self.num_steps = entered.num_steps
            return PredecessorProgress(is_over=entered.is_over)
        note = PassNote(self.stream.sequence, self.num_steps)
        entered, progress = self.passes.begin(note)
        self.num_steps = entered.note.num_steps + progress.num_pushes
        return progress

    def end_pass(self) -> None:
        self.flush()
        self.passes.entered = None
        self.refresh()

    def leave_pass(self) -> None:
        """Nothing: nobody waits for the steps of this worker."""

    def finish(self) -> None:
        self.stream.close()

    def check_device_pass(self) -> None:
        check_pass(
            self.setup, has_passes=self.has_device_passes, is_shared=self.shares_device_passes
        )

    def begin_device_pass(
        self, source: PassData | WindowSize, device: torch.device, following: PassData | None = None
    ) -> Mode:
        self.check_device_pass()
        if self.passes.entered is not None:  # a loop of the user's own may not have left it
            self.end_pass()
        self.flush()
        before, self._last_device_pass = self._last_device_pass, None
        kind = SharedDevicePass if self.cluster.num_workers > 1 else DevicePass
        self._last_device_pass = kind(self.setup, self, source, device, before, following)
        return self._last_device_pass

    # ---- checkpoints ----

    @property
    def last_push(self) -> StreamPosition:
        return StreamPosition(self.stream.sequence, self.stream.position)

    @last_push.setter
    def last_push(self, position: StreamPosition) -> None:
        self.stream.stand_at(position)

    def resume(self, steps_before: int | None = None) -> None:
        self.stream.resume()
        if steps_before is not None and self.stream.sequence:
            self.num_steps = steps_before + self.stream.sequence

    def set_num_steps(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def publish(self) -> None:
        """Nothing: servers have all."""

    def adopt(self) -> None:
        self.refresh()
