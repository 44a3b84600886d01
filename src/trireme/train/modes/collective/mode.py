"""Mode collective: sync's promise in a job without servers of its own.

Each worker's process hosts the server of its share of the buckets and blocks. What sync sends to
servers, keys, rows, gradients and dense weights, the workers exchange by all-to-all; the servers
apply it as in sync, so the bits, marks and files are the same. For the dense part that is a
reduce-scatter of gradients, a step of the optimizer on each worker's blocks, and an all-gather of
weights. What is not a step of training goes to the servers as in any job: it needs no other worker.
"""

import logging
from collections import deque

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trireme.errors import BadRequest
from trireme.train.modes.collective.byte_exchange import ByteExchange
from trireme.train.modes.collective.calls_together import CallsTogether, IdleWorker
from trireme.train.modes.setup import TrainingSetup, WorkerStep
from trireme.train.modes.sync import Sync
from trireme.train.modes.worker_group import WorkerGroup, device_of, ways_to_find
from trireme.train.predecessor import PredecessorProgress
from trireme.worker.gradients import KeysByClass
from trireme.worker.pull import FollowingPull, Pulled
from trireme.worker.transport import LockedTransport

log = logging.getLogger("trireme.train")


class Collective(Sync):
    """A single worker has nobody to exchange with: it is sync with its own server."""

    deals_streams = True

    def __init__(self, setup: TrainingSetup) -> None:
        super().__init__(setup)
        if setup.cluster.host is None:
            raise BadRequest(
                "DistributedOptimizer: expected a job whose workers hold the rows in mode"
                " 'collective' (torchrun, or trireme launch --server_num 0), found one with servers"
                f" {', '.join(self.client.servers.endpoints)}"
            )
        self._together: LockedTransport | None = None
        self._idle: IdleWorker | None = None
        self._group: WorkerGroup | None = None
        self._planned: deque[KeysByClass] = deque()  # the keys of batches that are not pulled yet
        self._following: FollowingPull | None = None  # the pull that followed the last push

    def open(self) -> None:
        super().open()
        if self.cluster.num_workers == 1:
            return
        _leave_sums_to_steps(self.setup.replica.model)
        cluster, host = self.cluster, self.cluster.host
        assert host is not None
        # Where the parameters are: the exchange uses what is made for it.
        device = device_of(self.setup.replica.dense, "collective: expected parameters")
        silent, lost = ways_to_find(cluster)
        group = WorkerGroup(cluster, device, "collective", find_silent=silent, find_lost=lost)
        group.note_thread(is_scripts=True)
        self._group = group
        calls = CallsTogether(
            ByteExchange(group, cluster.worker, cluster.num_workers),
            self.client.servers.endpoints,
            cluster.worker,
            host.handlers,
            cluster.metrics.calls.observe,
        )
        self._together, self._idle = LockedTransport(calls), IdleWorker(calls)
        self.stream.via = self._together

    # ---- what all workers do together ----

    def begin_run(self) -> None:
        self._planned.clear()
        super().begin_run()

    def plan(self, keys: KeysByClass | None) -> None:
        if keys is not None and self._together is not None:
            self._planned.append(keys)

    def following(self, step: WorkerStep) -> FollowingPull | None:
        """The pull of the next batch, if that is planned already."""
        self._following = None
        if self._planned and not self.waits_for_norm:
            time = self.setup.pull_time()
            self._following = FollowingPull(self._planned[0], blocks=True, time=time)
        return self._following

    def pull_after_steps(self, keys: KeysByClass, *, blocks: bool) -> Pulled:
        following, self._following = self._following, None
        if self._planned and _are_same(keys, self._planned[0]):
            self._planned.popleft()
        if (
            following is not None
            and following.pulled is not None
            and following.time == self.setup.pull_time()
            and _are_same(keys, following.keys)
        ):
            return self.note_pulled(following.pulled)
        return self.pull_staged(keys, blocks=blocks, via=self._together)

    def wait_for_step(self) -> None:
        self.setup.replica.install(self.pull_after_steps({}, blocks=True))

    def flush(self) -> None:
        super().flush()
        if self._idle is not None:
            self._idle.calls.check_whole()

    def refresh(self) -> None:
        self._following = None
        self.flush()
        # Others of the pass wait in an exchange until the last step has been applied.
        waits = self._first_step is not None and self._pulled != self._staged
        via = self._together if waits else None
        self.setup.replica.install(self.pull_staged({}, blocks=True, via=via))

    # ---- the pass ----

    def begin_pass(self) -> PredecessorProgress:
        if self.passes.entered is None:
            self._end_idle()
        return super().begin_pass()

    def leave_pass(self) -> None:
        """Leave the pass; from then on a thread takes part in the exchanges of the others."""
        is_in_pass = self._first_step is not None
        super().leave_pass()
        if self._idle is not None and self._group is not None and is_in_pass:
            self._group.note_thread(is_scripts=False)
            self._idle.begin()

    def finish(self) -> None:
        super().finish()
        self._end_idle()

    def _end_idle(self) -> None:
        if self._idle is not None and self._group is not None:
            self._idle.end()
            self._group.note_thread(is_scripts=True)


def _are_same(keys: KeysByClass, others: KeysByClass) -> bool:
    """Whether they are of the same batch."""
    return keys.keys() == others.keys() and all(keys[c] is others[c] for c in keys)


def _leave_sums_to_steps(model: nn.Module) -> None:
    """Turn off the all-reduce of models that are wrapped for it: the step sums gradients, weighted
    by examples, also where a worker has no batch to take part with.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            module.require_backward_grad_sync = module.require_forward_param_sync = False
            log.info("collective: steps sum the gradients; DistributedDataParallel does not")
