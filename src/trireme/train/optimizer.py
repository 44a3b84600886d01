"""The distributed optimizer: `step()` makes a step of this worker, as the mode says.

It is a real torch.optim.Optimizer. Its param groups are those of the optimizer that it wraps, for
the dense parameters, and one per table, whose tensors are the rows of the step. So any scheduler
drives both, and all group values travel with each push. Where servers have the dense parameters
they run the class of the wrapped optimizer, which itself never steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from trireme.blocks import Blocks
from trireme.dense.optimizers import check_rates, needs_whole
from trireme.errors import BadRequest, NotFinite, Superseded, check_flags, check_kind
from trireme.job.cluster import Cluster
from trireme.job.default import default
from trireme.nn import Planner
from trireme.nn.session import CLOSED, session_of, why_lost
from trireme.nn.stages import place_stages
from trireme.strategy import Strategy
from trireme.train.clipping import make_clip
from trireme.train.data_time import DataTime, seconds_of
from trireme.train.earlier_models import DENSE, TWO_MODELS, Marks, earlier_models
from trireme.train.finite import check_finite_step, drop_step
from trireme.train.loop.replica import Replica
from trireme.train.loop.timing import Timing
from trireme.train.loop.worker_batches import cut_of
from trireme.train.modes import mode_class
from trireme.train.modes.setup import TrainingSetup, WorkerStep
from trireme.train.param_groups import (
    PendingRows,
    check_blocks,
    dense_groups_of,
    named_parameters,
    row_gradients,
    saved_values,
    table_group,
    unscale,
    values_to_save,
    warn_of_frozen,
)
from trireme.train.predecessor import PredecessorProgress
from trireme.train.stopping import first_reason
from trireme.train.stream_checks import check_own_stream
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.gradients import KeysByClass
from trireme.worker.pull import Pulled
from trireme.worker.script import DataCut


def check_parts(subject: str, model: Any, strategy: Any, blocks: Any, cluster: Any) -> None:
    """Raises BadRequest: a name, a class or something else in place of the object."""
    check_kind(subject, "model", model, nn.Module, "a torch.nn.Module")
    if strategy is not None:
        example = "a Strategy, such as tr.Strategy('sync')"
        check_kind(subject, "strategy", strategy, Strategy, example)
    if blocks is not None:
        check_kind(subject, "blocks", blocks, Blocks, "tr.Blocks(...)")
    if cluster is not None:
        check_kind(subject, "cluster", cluster, Cluster, "what tr.init() returns")


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps the optimizer of the dense parameters and drives the tables of the model.

    Every worker creates one, which creates tables and blocks on the servers with worker 0's
    weights.

    Args:
        optimizer: of the dense parameters, of a class that docs/optimizers.md lists; None for a
            model without any.
        model: its embedding modules say which tables there are.
        strategy: the consistency mode; all workers must choose the same.
        blocks: how dense parameters are cut and placed, in modes that have them on the servers.
        clip_norm: gradients are scaled so that the norm of a step, over parameters and rows
            together, is at most this.
        clip_value: each element of a gradient is clipped to at most this and at least minus this.
            In sync both are of the sum over the workers, else of a worker's own gradient.
        skip_not_finite: a step whose gradients have NaN or infinity is skipped, logged and counted
            (trireme_worker_skipped_steps_total), as one that a GradScaler skips. Otherwise it
            raises NotFinite.
        fresh: whether to begin anew: without rows and optimizer state of tables and parameters of
            these names, which are dropped. Dense weights are the modules'. None: in an embedded
            process over new modules whose names another model has trained (docs/notebooks.md). All
            workers must say the same.
        cluster: default the one that `trireme.init()` made.

    Attributes:
        mode: what differs between strategies; within a pass on a device, that pass.

    Raises:
        BadRequest: the class of an optimizer in place of one, one that cannot run on blocks, one
            that leaves out parameters of the model, or a model that the mode cannot train; a pass
            on a device is under way.
        SchemaMismatch: the servers have a table of that name with another schema.
    """

    _step_supports_amp_scaling = True  # of torch.amp.GradScaler: see PendingRows

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        model: nn.Module,
        *,
        strategy: Strategy | None = None,
        blocks: Blocks | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        skip_not_finite: bool = False,
        fresh: bool | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        check_parts("DistributedOptimizer", model, strategy, blocks, cluster)
        check_flags("DistributedOptimizer", skip_not_finite=skip_not_finite, fresh=fresh)
        self.cluster = default() if cluster is None else cluster
        if (place := self.cluster.place) is not None:
            raise BadRequest(
                f"DistributedOptimizer: expected a Trainer in {place.name}, which runs the model of"
                " the workers' Trainers, found a loop of the script's own"
            )
        before = _predecessor(self.cluster)
        self._session, self._is_retired, self._has_stepped = session_of(self.cluster), False, False
        self.strategy = Strategy() if strategy is None else strategy
        self.model = model
        place_stages(model, self.cluster)
        self.tables = Planner(model, pool=self.cluster.pool).tables
        clip = make_clip(clip_norm, clip_value, self.tables)
        dense_groups = dense_groups_of(optimizer)
        self._table_groups = [table_group(table) for table in self.tables]
        if not dense_groups and not self._table_groups:
            raise _nothing_to_train(optimizer)
        super().__init__(
            [*dense_groups, *self._table_groups],
            {} if optimizer is None else dict(optimizer.defaults),
        )
        is_whole = optimizer is not None and needs_whole(optimizer)
        parameters = named_parameters(model, dense_groups)
        dense = DenseParameters(parameters, (blocks or Blocks()).size, shaped=is_whole)
        self.replica = Replica(model, dense, self._session.pending)
        for group in self._table_groups:
            group["params"] = PendingRows(group["table"], lambda: self.replica.pending)
        self.dense_class = type(optimizer).__name__
        self.num_threads = 1  # that train now, each on a replica
        self.timing = Timing()
        self.data_time = DataTime()
        setup = TrainingSetup(
            strategy=self.strategy,
            cluster=self.cluster,
            tables=self.tables,
            replica=self.replica,
            optimizer=optimizer,
            clip=clip,
            drop=partial(drop_step, skips=skip_not_finite, metrics=self.cluster.metrics),
            blocks=blocks,
            data_time=self.data_time,
            timing=self.timing,
        )
        self._drop = setup.drop
        self.mode = mode_class(self.strategy.mode)(setup)
        check_blocks(blocks, optimizer)
        if before is not None:
            before.refresh_before_end()
            before.finish()  # its pushes come before those of this one, in the same stream
            self.cluster.take_back(before.finish)
            if self.cluster.worker == 0:
                before.mode.publish()
        self.steps_before = self._begin(setup, before, fresh)
        self._session.train_with(self)
        self.cluster.on_close(self.finish)

    def _begin(
        self, setup: TrainingSetup, before: DistributedOptimizer | None, fresh: bool | None
    ) -> int:
        """Open the mode, after what must not be found was dropped; returns the steps before."""
        earlier, steps = earlier_models(self.cluster), 0 if before is None else before.num_steps
        if before is not None:
            before.retire(self)
            if self.cluster.is_only_worker:  # who stopped the training before does not stop this
                self.cluster.stop_request.reason = ""
        steps = earlier.begin(setup, self.model, fresh, steps)
        self.mode.open()
        if steps:
            self.mode.set_num_steps(steps)
        return steps

    def retire(self, newer: DistributedOptimizer) -> None:
        """A newer optimizer of the cluster has the dense weights on the servers. Those of this
        model stay as they are.
        """
        own, others = self.replica.dense.parameters, newer.replica.dense.parameters
        if self.cluster.is_embedded and not any(others.get(n) is p for n, p in own.items()):
            self._is_retired = bool(own)

    def check_alone(self, called: str) -> None:
        """Raises BadRequest: other threads train, on weights and a pass that the call changes."""
        if self.num_threads > 1:
            raise BadRequest(
                f"{called}: expected threads=1 in a callback's step, found {self.num_threads},"
                " which train meanwhile: call it in `epoch`, or give Trainer(threads=1)"
            )

    def check_has_rows(self) -> None:
        """Raises Superseded: another model of this process has dropped the rows of this one, or
        their cluster is closed.
        """
        if self.cluster.is_closed:
            raise Superseded(f"{type(self.model).__name__}: expected {CLOSED}")
        if why := why_lost(self.model.modules()):
            raise Superseded(why)

    @property
    def dense_parameters(self) -> Iterable[torch.Tensor]:
        """The weights of the model that are trained, without rows."""
        return self.replica.dense.parameters.values()

    # ---- where the worker stands ----

    @property
    def num_steps(self) -> int:
        """Steps made by this worker; in sync by the job."""
        return self.mode.num_steps

    @property
    def sequence(self) -> int:
        """The number of this worker's last push."""
        return self.mode.last_push.sequence

    def set_time(self, time: float | Callable[[], float]) -> None:
        """Data time that pushes carry from now on; see Trainer.set_time."""
        seconds_of(time)
        self.data_time.source = time

    def pull_rows(self, keys: KeysByClass, *, training: bool) -> Pulled:
        """Rows of a forward pass without a pipeline."""
        return self.mode.pull(keys, blocks=False) if training else self.mode.read(keys)

    # ---- the pass ----

    def begin_pass(self, dataset: Iterable[Any] | None = None) -> PredecessorProgress:
        """Enter the next pass, in sync and bounded together with all other workers, unless this
        worker is in a pass that it has not left. Returns what a predecessor, which was killed, has
        made of it: the caller must leave it out. dataset: that all workers divide. Raises
        BadRequest: another worker, or a predecessor, has begun the pass with other data.
        """
        check_own_stream("DistributedOptimizer.begin_pass", self.cluster)
        self.check_newest()
        self._check_unfinished()
        script = self.cluster.client.script
        script.data = cut_of(dataset)
        progress = self.mode.begin_pass()
        script.data = DataCut()  # within a pass on a device no other begins
        return progress

    def end_pass(self) -> None:
        """Leave the pass: this worker has no more batches. Then the parameters are current."""
        self.check_alone("DistributedOptimizer.end_pass")
        self.mode.end_pass()

    def agree_to_stop(self, wants: bool) -> bool:
        """Whether any worker wants to stop: all get the same answer, so that all leave a loop of
        their own together. Every worker calls it equally often, best between two passes.

        Before it is True, `end_pass` is called: a worker that left a pass of sync or bounded alone
        without it would keep the others waiting.
        """
        reason = "a loop stops" if wants else self.cluster.stop_request.reason
        replies = self.cluster.client.coordinator.gather(
            {"stops": reason}, [], purpose="agree_to_stop", patient=True
        )
        stops = bool(first_reason(reply for reply, _ in replies))
        if stops:
            self.end_pass()
        return stops

    # ---- the step ----

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        examples: int | None = None,
        position: tuple[int, ...] = (),
    ) -> Any:
        """Make a step of the gradients of all dense parameters and of the rows looked up since the
        last step.

        Args:
            closure: computes the loss and its gradients, once, before the step; its value is
                returned.
            examples: of the batch, which weigh it in sync; default what the forward passes saw.
            position: of the stream after this batch, for a successor; `tr.prefetch` counts itself.

        In async it returns when the push is on its way; errors of earlier pushes are raised here.
        In sync it returns when the push is staged on every server. Without `tr.prefetch` or a
        Trainer it then also waits for the servers and refreshes the dense parameters.

        Raises NotFinite: a gradient of this worker has NaN or infinity. Nothing was pushed, the
        gradients are gone, and the next batch may follow.

        A torch.amp.GradScaler may call it. If the scaler found a gradient that is not finite, the
        push has none: nothing changes, and in sync the batch has no weight among the others'.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        is_skipped = not unscale(self)
        if position and self._session.position:
            raise BadRequest(
                f"DistributedOptimizer.step: expected no position in tr.prefetch, found {position}"
            )
        self.step_of(
            self.replica,
            examples=0 if is_skipped else examples,
            position=position or self._session.position,
            in_background=self._session.is_prefetching,
            is_skipped=is_skipped,
        )
        if not self._session.is_prefetching:
            self.mode.wait_for_step()
        return loss

    def step_of(
        self,
        replica: Replica,
        *,
        examples: int | None = None,
        position: tuple[int, ...] = (),
        in_background: bool = False,
        is_skipped: bool = False,
        stops: str = "",
    ) -> None:
        """Make a step of one of several replicas of the model; one thread at a time.

        Args:
            in_background: the step may be on its way when this returns, where the mode allows it.
            is_skipped: the replica has no gradients, and the batch counts no examples.
            stops: why this worker was asked to stop; empty: it was not.
        """
        self._opt_called = True  # torch's schedulers look for it before their first step
        self.check_newest()
        self._check_unfinished()
        try:
            lookups = replica.pending.take()
            if not self._has_stepped:
                warn_of_frozen(self.model, lookups.tables_with_gradients())
                self._has_stepped = True
            check_rates(self.param_groups)
            num_steps = self.mode.begin_step()
            rows = row_gradients(
                lookups,
                self._table_groups,
                num_steps,
                self.cluster.pool,
                on_host=not self.mode.trains_rows_on_device,
            )
            check_finite_step(f"gradients in step {num_steps}", rows, replica.dense.gradients())
            tables = self.mode.clip(rows, replica.dense)
        except NotFinite as error:
            replica.dense.take_gradients()
            self._drop(error)
            tables, examples, is_skipped = {}, 0, True
        except BaseException:
            replica.dense.take_gradients()  # else the next step would contain them
            raise
        step = WorkerStep(
            tables=tables,
            dense=replica.dense,
            push_counts=lookups.push_counts,
            examples=lookups.examples if examples is None else examples,
            position=position,
            stops=stops,
            in_background=in_background,
            is_skipped=is_skipped,
        )
        try:
            self.mode.step(step)
        except KeyboardInterrupt as error:
            self.mode.note_interrupt(error)
            raise
        self.mode.num_steps = num_steps  # now: a push that was refused is none
        self.cluster.metrics.count_step(step.examples)

    def run_step_hooks(self) -> None:
        """Call the hooks that torch calls after `step`, which a Trainer does not call."""
        for hook in list(self._optimizer_step_post_hooks.values()):
            hook(self, (), {})

    def check_newest(self) -> None:
        """Raises BadRequest: another model trains on this cluster. Or as `check_has_rows`."""
        self.check_has_rows()
        if self._session.row_source() is not self:
            raise BadRequest(
                "DistributedOptimizer: expected the newest optimizer of this cluster, found an"
                " older one; a worker has one stream of pushes: train one model at a time, with a"
                " new Trainer, or both in one nn.ModuleList under one optimizer, or each on a"
                " cluster of its own: Trainer(..., cluster=tr.embedded())"
            )

    @property
    def parts(self) -> list[str]:
        """What checkpoints hold of the model: the names of its tables, and DENSE."""
        return [*(table.name for table in self.tables), DENSE]

    @property
    def half_loaded(self) -> Marks:
        """What of this cluster loads have left half done."""
        return earlier_models(self.cluster).half_loaded

    @property
    def unfinished(self) -> Marks:
        """What of this cluster was loaded to continue its epoch, until that goes on."""
        return earlier_models(self.cluster).unfinished

    def check_loaded(self) -> None:
        """Raises BadRequest: a load of this model, or of one before it, has ended half way."""
        if path := self.half_loaded.path(self.parts):
            raise BadRequest(
                f"DistributedOptimizer: expected a load that went through, found that the one of"
                f" {path} ended half way: rows, weights and streams are in part those of before;"
                " load again"
            )

    def _check_unfinished(self) -> None:
        self.check_loaded()
        if path := self.unfinished.path(self.parts):
            raise BadRequest(
                f"DistributedOptimizer: expected Trainer.fit to continue the epoch of {path}, which"
                " was saved while it trained, found another loop: some rows have seen pushes that"
                " others still need; Trainer.load() takes it, and begins the epoch again"
            )

    def flush(self) -> None:
        """Wait until the servers have every step; raises the error of one that failed."""
        self.check_has_rows()
        self.check_loaded()
        self.mode.flush()

    def refresh(self) -> None:
        """Flush, and bring the dense parameters to the servers' weights (hybrid has them).
        Raises BadRequest: other threads train on them.
        """
        self.check_alone("DistributedOptimizer.refresh")
        self.check_has_rows()
        self.check_loaded()
        if not self._is_retired:  # else they are another model's
            self.mode.refresh()

    def check_saves(self) -> None:
        """Raises Superseded: the servers have the dense weights of another model."""
        self.check_has_rows()
        if self._is_retired:
            raise Superseded(
                "save: expected the newest model of this cluster, found one before it, whose dense"
                f" weights the servers lack; make a new Trainer over it first; {TWO_MODELS}"
            )

    def refresh_before_end(self) -> None:
        """Bring the dense parameters up to date, if a loop was left early, before a newer optimizer
        may drop the servers' values.
        """
        is_half = self.half_loaded.path(self.parts) or why_lost(self.model.modules())
        if self.cluster.is_embedded and not is_half:
            self.refresh()

    def finish(self) -> None:
        """Push what is in flight and leave the pass."""
        self.mode.finish()

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Group values and step count. The optimizer's state lives on the servers: save it with a
        checkpoint.
        """
        groups = [values_to_save(group) for group in self.param_groups]
        return {"num_steps": self.num_steps, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`. Raises BadRequest when the number of groups differs."""
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise BadRequest(
                f"DistributedOptimizer.load_state_dict: expected {len(self.param_groups)} groups,"
                f" found {len(groups)}"
            )
        self.mode.set_num_steps(int(state_dict["num_steps"]))
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update(saved_values(group, saved))


def _predecessor(cluster: Cluster) -> DistributedOptimizer | None:
    """The optimizer that a new one follows. Raises BadRequest: it is in a pass on a device."""
    before = newest_optimizer(cluster)
    if before is not None:
        before.mode.check_between_passes("DistributedOptimizer")
    return before


def newest_optimizer(cluster: Cluster) -> DistributedOptimizer | None:
    """The optimizer that training on this cluster uses; None: there is none yet."""
    source = session_of(cluster).row_source()
    return source if isinstance(source, DistributedOptimizer) else None


def _nothing_to_train(optimizer: torch.optim.Optimizer | None) -> BadRequest:
    return BadRequest(
        "DistributedOptimizer: expected a model with tables or an optimizer of parameters, found"
        f" neither: optimizer={optimizer and type(optimizer).__name__}"
    )
