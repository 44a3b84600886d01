"""The distributed optimizer: `step()` is the one push of a step.

It is a real torch.optim.Optimizer. Its param groups are those of the optimizer it wraps, for the
dense parameters, and one per table, whose tensors are the rows of the step; so any scheduler drives
both, and all group values travel with each push. The wrapped optimizer itself never
steps here: the servers run its class on their blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trireme.blocks import Blocks
from trireme.errors import BadRequest, NotFinite
from trireme.job.cluster import Cluster
from trireme.job.default import default
from trireme.nn import Planner
from trireme.protocol.dense_optimizers import GroupValues, group_values, needs_whole, optimizer_spec
from trireme.protocol.gradients import DenseGradient, Step, TableGradient
from trireme.protocol.membership import Pace
from trireme.protocol.routing import Keys
from trireme.strategy import Strategy
from trireme.train.checks import check_blocks, check_scales, named_parameters, table_group
from trireme.train.clipping import Clipping
from trireme.train.loop.pusher import Pusher
from trireme.train.loop.replica import Replica
from trireme.train.loop.row_gradients import row_gradients
from trireme.train.loop.timing import Timing
from trireme.train.loss_scaling import PendingRows, unscale
from trireme.train.modes.geo import Geo
from trireme.train.modes.hybrid import Hybrid
from trireme.train.modes.local_dense import LocalDense
from trireme.train.shared_pass import agree_on_model, check_own_stream, check_sharing
from trireme.train.stopping import is_told_to_stop
from trireme.train.succession import Inherited, check_hybrid, check_loop, inherited
from trireme.worker.client import Pulled, StreamPosition
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.lookups import PendingLookups
from trireme.worker.script import Entered


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps the optimizer of the dense parameters and drives the tables of the model. Every worker
    creates one, which creates tables and blocks on the servers with worker 0's weights.

    Args:
        optimizer: of the dense parameters, of a class that docs/optimizers.md lists; None for a
            model without any.
        model: its embedding modules say which tables there are.
        strategy: the consistency mode; all workers must choose the same.
        blocks: how dense parameters are cut and placed, in modes that have them on the servers.
        clip_norm: at most this norm has the gradient of a step, of parameters and rows together.
        clip_value: at most this, or at least minus this, is each element of it. In sync both are of
            the sum over the workers, else of a worker's own gradient.
        cluster: default the one that `trireme.init()` made.

    Raises:
        BadRequest: an optimizer that cannot run on blocks, or one that leaves out parameters of the
            model.
        SchemaMismatch: the servers have a table of that name with another schema.
    """

    _step_supports_amp_scaling = True  # of torch.amp.GradScaler: see scaling.py

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        model: nn.Module,
        *,
        strategy: Strategy | None = None,
        blocks: Blocks | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self.cluster = default() if cluster is None else cluster
        self.strategy = Strategy() if strategy is None else strategy
        self.model = model
        self.tables = Planner(model, pool=self.cluster.pool).tables
        check_scales(self.tables, self.strategy, self.cluster)
        check_sharing(self.strategy, self.cluster)
        self.clipping = Clipping(
            clip_norm, clip_value, self.strategy, self.cluster.num_workers, self.tables
        )
        dense_groups = [] if optimizer is None else optimizer.param_groups
        table_groups = [table_group(table) for table in self.tables]
        if not dense_groups and not table_groups:
            raise BadRequest("DistributedOptimizer: the model has neither parameters nor tables")
        self.local = optimizer
        super().__init__(
            [*dense_groups, *table_groups], {} if optimizer is None else dict(optimizer.defaults)
        )
        self._num_dense_groups = len(dense_groups)
        self.blocks = Blocks() if blocks is None else blocks
        check_blocks(blocks, self.strategy, optimizer)
        is_whole = optimizer is not None and needs_whole(optimizer)
        parameters = named_parameters(model, dense_groups)
        dense = DenseParameters(parameters, self.blocks.size, shaped=is_whole)
        self.replica = Replica(model, dense, self.cluster.pending)
        for group in self.param_groups[self._num_dense_groups :]:
            group["params"] = PendingRows(group["table"], lambda: self.replica.pending)
        self.timing = Timing()
        self._pusher: Pusher | None = None
        self._entered: Entered | None = None  # the pass that this worker is in
        self._first_step: int | None = None
        self._failed_push: BaseException | None = None
        self._staged = 0
        self._last_step = 0
        self.is_stopped = False  # sync: no worker makes another step of the pass
        self._local_position: tuple[int, ...] = ()
        self.time: float | Callable[[], float] = 0
        self.num_steps = 0
        # Sync: num_steps at step 0 of the passes, the same on all workers; their own counts differ
        # after streams of unequal lengths.
        self._steps_before: int | None = None
        if isinstance(before := self.cluster.row_source, DistributedOptimizer):
            before.finish()  # its pushes come before those of this one, in the same stream
        self.geo = self._make_geo() if self.strategy.mode == "geo" else None
        self._create(optimizer)
        self.hybrid = self._make_hybrid() if self.strategy.mode == "hybrid" else None
        self._local_dense: LocalDense | None = None
        if self.strategy.mode in ("geo", "hybrid"):
            self._local_dense = LocalDense(self.cluster.client, dense, self.local)
        # What a predecessor has pushed, which a loop that begins no pass would push again.
        client = self.cluster.client
        self._is_inherited = client.script.is_successor and self.sequence > 0
        self._is_new = client.script.is_successor  # where streams are shared out
        self.cluster.row_source = self
        self.cluster.on_close(self.finish)

    def _create(self, optimizer: torch.optim.Optimizer | None) -> None:
        client = self.cluster.client
        client.agree("strategy", repr(self.strategy))
        kind = "no optimizer" if optimizer is None else type(optimizer).__name__
        agree_on_model(self.cluster, self.tables, self.replica.dense, kind)
        for table in self.tables:
            self.cluster.ensure_table(table)
        if optimizer is not None:
            client.agree("blocks", repr(self.blocks))
            spec, values = optimizer_spec(optimizer), self._dense_group_values()
            names = [block.param for block in self.replica.dense.specs]
            client.create_blocks(
                spec, values, self.replica.dense, lambda servers: self.blocks.owners(names, servers)
            )
        self.resume()
        self.replica.install(client.pull({}, blocks=True))

    def _make_hybrid(self) -> Hybrid:
        check_hybrid(self.cluster)
        clip = self.clipping.of_dense
        return Hybrid(self.cluster, self.replica.dense, self.local, clip)

    def _make_geo(self) -> Geo:
        return Geo(
            self.cluster.client,
            self.tables,
            self.replica.dense,
            self.local,
            pool=self.cluster.pool,
            k=self.strategy.k,
            cache_bytes=self.strategy.cache_bytes,
        )

    # ---- where the stream stands ----

    def resume(self) -> None:
        """Go on where the servers stand with this worker's stream: after a start, a load, a
        predecessor.
        """
        if self.geo is not None:
            self.geo.forget()
        # A stream that workers share out says itself where it stands.
        is_own = not self.cluster.num_streams
        self.stand_at(self.cluster.client.stream_position() if is_own else StreamPosition())

    def stand_at(self, at: StreamPosition) -> None:
        """The next push is of the batch behind this position."""
        self.sequence, self.position, self._failed_push = at.sequence, at.position, None

    def enter(self, entered: Entered, num_steps: int) -> None:
        """This worker has come to a pass whose streams are shared out. num_steps: of workers that
        were there from the beginning; one that was not goes on counting there.
        """
        self._entered = entered
        if self._is_new:
            self.num_steps, self._is_new = max(self.num_steps, num_steps), entered.is_over

    def refresh(self) -> None:
        """Fetch the dense parameters, unless the workers have them (hybrid)."""
        self.flush()
        if self.hybrid is None:
            self.replica.install(self._fetch({}, blocks=True))

    def _fetch(self, keys: Mapping[str, Keys], *, blocks: bool, pace: Pace | None = None) -> Pulled:
        pulled = self.cluster.client.pull(
            keys,
            blocks=blocks,
            staged=self._staged,
            clipped=self.clipping.on_servers,
            pace=pace,
            time=self.data_time(),
        )
        self.is_stopped = is_told_to_stop(pulled, self._last_step, self.cluster)
        return pulled

    def publish(self) -> None:
        """Have the servers know what of the dense part only workers have: before a save or an
        export, one worker calls it.
        """
        if self._local_dense is not None:
            self._local_dense.publish(weights=self.hybrid is not None)

    def adopt(self) -> None:
        """Go on with what the servers have got by a load or an import."""
        if self._local_dense is not None:
            self._local_dense.adopt()
        self.refresh()

    @property
    def is_sync(self) -> bool:
        return self.strategy.mode == "sync"

    @property
    def counts_its_steps(self) -> bool:
        """Whether this worker's steps are as many as its pushes: not in sync, where all workers
        count the job's, nor in geo, where a push has several.
        """
        return self.strategy.mode not in ("sync", "geo")

    @property
    def has_passes(self) -> bool:
        """Whether streams advance together, from a step on that all know."""
        return self.strategy.mode in ("sync", "bounded")

    def pull(self, keys: Mapping[str, Keys], *, blocks: bool, number: int | None = None) -> Pulled:
        """Rows for training, and dense weights if asked; begins a pass if none is running.

        number: of the batch in the run (`begin_run`), if each batch makes a step; else None.
        """
        if self.geo is not None:
            self._touch(self.geo, keys)
            return self.geo.read(keys)
        self._join_pass()
        blocks = blocks and self.hybrid is None
        pace = None
        if self.strategy.mode == "bounded":
            done = self._last_step
            self.flush()
            step = self._next_step() if number is None else self._run_from + number
            pace = Pace(step, min(done, step - 1), self.strategy.staleness)
        return self._fetch(keys, blocks=blocks, pace=pace)

    def pull_rows(self, keys: Mapping[str, Keys], *, training: bool) -> Pulled:
        """Rows of a forward pass without a pipeline."""
        if training:
            return self.pull(keys, blocks=False)
        return self.cluster.client.pull(keys, time=self.data_time())

    def _touch(self, geo: Geo, keys: Mapping[str, Keys]) -> None:
        while not geo.touch(keys, self.data_time()):
            self._exchange(geo)

    def may_pull_ahead(self, *, steps: bool) -> bool:
        """Whether rows may be pulled while the batch before is trained on.

        steps: whether each batch makes a step, so that it is known which one the rows are for.
        """
        return {"sync": False, "geo": False, "bounded": steps}.get(self.strategy.mode, True)

    def begin_run(self) -> None:
        """Batches that come from now on are numbered from 0."""
        self._join_pass()
        if self.has_passes:
            self._run_from = self._next_step()

    def set_time(self, time: float | Callable[[], float]) -> None:
        """Data time that pushes carry from now on; see Trainer.set_time."""
        self.time = time
        self.data_time()

    def data_time(self) -> int:
        """Data time in whole seconds, 0 for none. Raises BadRequest for one that pushes cannot
        carry.
        """
        time = self.time() if callable(self.time) else self.time
        if isinstance(time, bool) or not 0 <= time < 2**32:
            raise BadRequest(f"set_time: expected seconds from 0 to {2**32 - 1}, found {time!r}")
        return int(time)

    def begin_pass(self) -> Inherited:
        """Enter the next pass, in sync and bounded with all other workers, unless this one is in a
        pass that it has not left.

        Returns:
            What a predecessor, which was killed, has made of it: whoever calls this leaves it out.
        """
        check_own_stream("DistributedOptimizer.begin_pass", self.cluster)
        if self.hybrid is not None:
            self.hybrid.begin()
        if self._entered is not None and self.has_passes:
            return Inherited()
        self.flush()  # what is on its way belongs to the passes before
        counts = [] if self._steps_before is None else [self._steps_before]
        note = [self.sequence, self.num_steps, *counts]
        entered = self.cluster.client.begin_pass(
            note, together=self.has_passes, staged=self.is_sync
        )
        self._entered, self._is_inherited = entered, False
        found = inherited(entered, self.sequence)
        if not found.is_over:
            self._go_on(entered, found, note if entered.note is None else entered.note)
        return found

    def _go_on(self, entered: Entered, found: Inherited, note: Sequence[int]) -> None:
        """Count on from where the pass began, and from what has been made of it."""
        begun_at, self.num_steps, *counts = note
        self.sequence = begun_at + found.num_pushes
        if self.geo is not None:  # a window that ended early had fewer
            self.num_steps += found.num_pushes * self.strategy.k
        elif not self.is_sync:
            self.num_steps += found.num_pushes
        if not self.has_passes:
            return
        self._first_step, self._first_sequence = entered.first_step, begun_at + 1
        self._last_step = self._next_step() - 1
        if self.is_sync:
            self._steps_before = counts[0] if counts else self.num_steps - (self._first_step - 1)
            self.num_steps = self._steps_before + self._last_step
            if found.has_left:
                self._staged = self._last_step

    def _join_pass(self) -> None:
        """Enter the next pass for a loop that does not ask what is left to do in it."""
        if self._entered is not None:
            if self.hybrid is not None:
                self.hybrid.begin()
        elif self.has_passes or self.hybrid is not None:
            check_loop(self.begin_pass())
        elif self._is_inherited:
            check_loop(Inherited(num_pushes=self.sequence))

    def end_pass(self) -> None:
        """Leave the pass: this worker has no more batches. The parameters are current when it
        returns.
        """
        self.flush()
        if self.geo is not None:
            self.geo.report()
        if self.hybrid is not None:
            self.hybrid.end()
        if self._first_step is not None:
            self.cluster.client.leave(self._next_step(), staged=self.is_sync)
            self._first_step = None
        self._entered = None
        self.refresh()

    def _next_step(self) -> int:
        assert self._first_step is not None
        return self._first_step + self.sequence + 1 - self._first_sequence

    # ---- the step ----

    def step(  # type: ignore[override]  # torch's closure form is refused, see below
        self,
        closure: Callable[[], Any] | None = None,
        *,
        examples: int | None = None,
        position: tuple[int, ...] = (),
    ) -> None:
        """Push the gradients of this step: of all dense parameters and of the rows looked up since
        the last one.

        Args:
            closure: refused: servers step once per push.
            examples: of the batch, which weigh it in sync; default what the forward passes saw.
            position: of the stream after this batch, kept by the servers for a successor.

        In async it returns when the push is on its way; errors of earlier pushes are raised here.
        In sync it returns when the push is staged on every server. Without `tr.prefetch` or a
        Trainer it then also waits for the servers and refreshes the dense parameters.

        A torch.amp.GradScaler may call it. If that has found a gradient which is not finite, the
        push has none: nothing changes, and in sync the batch has no weight among the others'.
        """
        if closure is not None:
            raise BadRequest("DistributedOptimizer.step: a closure cannot run on the servers")
        self._join_pass()
        is_skipped = not unscale(self)
        behind = self.cluster.is_prefetching and not self.is_sync
        self.step_of(
            self.replica,
            examples=0 if is_skipped else examples,
            position=position,
            behind=behind,
            is_skipped=is_skipped,
        )
        if not self.cluster.is_prefetching and self.geo is None:
            self.flush()
            self.refresh()

    def step_of(
        self,
        replica: Replica,
        *,
        examples: int | None = None,
        position: tuple[int, ...] = (),
        behind: bool = False,
        is_skipped: bool = False,
        stops: str = "",
    ) -> None:
        """Push the gradients of one of several replicas of the model; one thread at a time.

        Args:
            behind: return when the push is on its way, not when it has been applied or staged.
            is_skipped: there are no gradients in it, and no examples.
            stops: sync: why all workers are to stop behind the step; empty: they are not.
        """
        self._opt_called = True  # what torch's schedulers ask after before their first step
        self._check_usable()
        lookups = replica.pending.take()
        num_examples = lookups.examples if examples is None else examples
        before, number = self.num_steps, self._count_step()
        try:
            tables = self.clipping.apply(self._row_gradients(lookups), replica.dense)
        except NotFinite:  # a step that was not made
            replica.dense.take_gradients()
            self.num_steps = before
            raise
        if self.geo is not None:
            if self.geo.has_ended or not lookups.versions:  # since the forward passes, or before
                self._touch(self.geo, {part: gradient.keys for part, gradient in tables.items()})
            self.geo.step(tables, num_examples)
            self.cluster.metrics.count_step(num_examples)
            self._local_position = position
            if self.geo.is_due:
                self._exchange(self.geo)
            self.geo.has_ended = False
            return
        step = Step(
            sequence=self.sequence + 1,
            step=number,
            versions=lookups.versions,
            examples=num_examples,
            position=position,
            time=self.data_time(),
            clip=self.clipping.of_push,
            stops=stops if self.is_sync else "",
        )
        dense = None if self.hybrid is not None else self._dense_gradient(replica.dense)
        if behind:
            self._submit(step, tables, dense)
        else:
            self.flush()
            self._push(step, tables, dense)
        self.sequence += 1
        self.position = position
        if self.hybrid is not None:  # while the rows are on their way
            self.hybrid.step(num_examples, is_skipped=is_skipped)
        self.cluster.metrics.count_step(num_examples)
        self._last_step = step.step
        if self.is_sync:
            self._staged = step.step

    def run_step_hooks(self) -> None:
        """Call what torch calls after `step`: after the steps of a Trainer, which are others."""
        for hook in list(self._optimizer_step_post_hooks.values()):
            hook(self, (), {})

    def _check_usable(self) -> None:
        if self.cluster.row_source is not self:
            raise BadRequest(
                "DistributedOptimizer.step: expected the newest optimizer of this cluster, found an"
                " older one; a worker has one stream of pushes: train one model at a time, or both"
                " in one nn.ModuleList under one optimizer"
            )
        if self._entered is not None and self._entered.is_over:
            check_loop(Inherited(is_over=True))
        if self._entered is None:
            check_own_stream("DistributedOptimizer.step", self.cluster)
        if self._failed_push is not None:
            raise BadRequest(
                f"DistributedOptimizer.step: expected push {self.sequence + 1} to be repeated,"
                " found another batch: some servers may have applied it before it failed; load a"
                " checkpoint, or start this worker again"
            ) from self._failed_push

    def _exchange(self, geo: Geo) -> None:
        """Push what geo's window has changed, and begin another one."""
        step = Step(
            sequence=self.sequence + 1,
            step=0,
            versions=geo.versions,
            examples=geo.num_examples,
            position=self._local_position,
            time=self.data_time(),
        )
        self._push(step, *geo.differences(self._dense_group_values()), kind="delta")
        geo.end_window()
        self.sequence += 1
        self.position = self._local_position

    def _push(
        self,
        step: Step,
        tables: dict[str, TableGradient],
        dense: DenseGradient | None,
        kind: str = "gradient",
    ) -> None:
        try:
            self.cluster.client.push(step, tables, dense, staged=self.is_sync, kind=kind)
        except BaseException as error:
            self._failed_push = error
            raise

    def _count_step(self) -> int:
        """Advance `num_steps`; returns the number of this step in the pass, 0 without passes."""
        if not self.is_sync:
            self.num_steps += 1
            return self._next_step() if self.has_passes else 0
        step = self._next_step()
        assert self._steps_before is not None
        self.num_steps = self._steps_before + step
        return step

    def _submit(
        self, step: Step, tables: dict[str, TableGradient], dense: DenseGradient | None
    ) -> None:
        if self._pusher is None:
            self._pusher = Pusher(self.cluster.client, self.timing.behind)
            self.cluster.add_running(self._pusher.stop)
            self.cluster.metrics.queues["pushes"] = self._pusher.depth
        self._pusher.submit(step, tables, dense)

    def _row_gradients(self, lookups: PendingLookups) -> dict[str, TableGradient]:
        groups = self.param_groups[self._num_dense_groups :]
        return row_gradients(lookups, groups, self.num_steps, self.cluster.pool)

    def _dense_gradient(self, dense: DenseParameters) -> DenseGradient | None:
        if len(dense) == 0:
            return None
        return DenseGradient(dense.take_gradients(), self._dense_group_values())

    def _dense_group_values(self) -> list[GroupValues]:
        groups = self.param_groups[: self._num_dense_groups]
        return [group_values(group, self.defaults) for group in groups]

    # ---- end ----

    def flush(self) -> None:
        """Wait until every push has been applied or staged; raises the error of one that failed."""
        if self._pusher is not None:
            self._pusher.flush()
        if self.geo is not None and self.geo.num_steps:
            self._check_usable()
            self._exchange(self.geo)

    def finish(self) -> None:
        """Push what is in flight and leave the pass."""
        if self.geo is not None:
            self.flush()
        if self._first_step is not None:
            self.end_pass()
        if self.hybrid is not None:
            self.hybrid.end()
        if self._pusher is not None:
            self._pusher.close()
            self.cluster.remove_running(self._pusher.stop)
            self._pusher = None

    def state_dict(self) -> dict[str, Any]:
        """Group values and step count. The optimizer's state lives on the servers: save it with a
        checkpoint.
        """
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "table")}
            for group in self.param_groups
        ]
        return {"num_steps": self.num_steps, "param_groups": groups}

    def set_num_steps(self, num_steps: int) -> None:
        """Go on counting steps from here: after a load."""
        self.num_steps, self._steps_before = num_steps, None
        if self._first_step is not None:
            self._steps_before = num_steps - (self._next_step() - 1)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`. Raises BadRequest when the number of groups differs."""
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise BadRequest(
                f"DistributedOptimizer.load_state_dict: expected {len(self.param_groups)} groups,"
                f" found {len(groups)}"
            )
        self.set_num_steps(int(state_dict["num_steps"]))
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
