"""Dense parameters that every worker holds and steps alike.

Each step makes one all-reduce: of every gradient times the batch's examples, of a flag for each
parameter that has a gradient, of the examples, of the number of workers that still have data, and
of a flag of worker 0, which saves after the step: the others wait for that before the next one.
All workers divide the same sums and run the same optimizer from the same weights, so their weights
are equal bit for bit. A worker whose data has ended takes part with zeros until all have ended.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from trireme.checkpoint.worker_side.server_operations import SAVE_TIMEOUT_S
from trireme.errors import BadRequest, NotFinite
from trireme.train.clipping import clip_gradients
from trireme.train.finite import check_finite_step
from trireme.train.modes.setup import TrainingSetup
from trireme.train.modes.worker_group import WorkerGroup, device_of


class ReplicatedDense:
    """The dense parameters of one worker, all on one device; the setup's optimizer steps them,
    after its clip has clipped the gradients by value.
    """

    def __init__(self, setup: TrainingSetup) -> None:
        cluster, self._dense, self._optimizer = setup.cluster, setup.replica.dense, setup.optimizer
        self._clip, self._drop = setup.clip, setup.drop
        self._cluster, self._parameters = cluster, self._dense.parameters
        self._device = device_of(self._dense, "hybrid: expected all parameters")
        self._workers = (
            WorkerGroup(cluster, self._device, "hybrid") if cluster.num_workers > 1 else None
        )
        if self._workers is not None:
            self._workers.note_thread(is_scripts=True)
        self._is_running = False
        self.saves_next = False  # after the next step
        self._is_held = False  # worker 0 saves after the last step
        self.num_pushes = 0  # of all workers, since the streams began; worker 0 knows it

    def begin(self) -> None:
        """Meet all workers before the first step: some need longer until they have data."""
        if not self._is_running and self._workers is not None:
            if self._cluster.worker == 0:  # nobody pushes before the meeting
                streams = self._cluster.client.stream_positions(range(self._cluster.num_workers))
                self.num_pushes = sum(stream.sequence for stream in streams)
            self._cluster.client.coordinator.gather(
                {}, [], purpose="begin hybrid training", patient=True
            )
        self._is_running = True

    def end(self) -> None:
        """Take part in the others' steps, without data, until no worker has any."""
        self.saves_next = False
        if self._is_running and self._workers is not None:
            self.wait_for_save()
            while self._reduce_and_step(0, is_active=False):
                self.wait_for_save()
        self._is_running = False

    def wait_for_save(self) -> None:
        """Before the next push: wait for the save, if worker 0 makes one after the last step."""
        if self._is_held:
            self._is_held = False
            self._cluster.client.coordinator.gather(
                {}, [], purpose="end of a save", patient=True, timeout_s=SAVE_TIMEOUT_S
            )

    def step(self, examples: int, *, is_skipped: bool = False) -> None:
        """Make one step of all workers with the parameters' gradients; leaves none. is_skipped:
        this worker has no gradients and no examples in it. Raises BadRequest: no examples.
        DeadlineExceeded, Unavailable: another worker is missing.
        """
        if self._workers is None:
            self._step()
            return
        if examples < 1 and not is_skipped:
            raise BadRequest(
                "DistributedOptimizer.step: expected the batch's examples, which weigh its gradient"
                f" among the workers', found {examples}; give step(examples=...)"
            )
        self.begin()
        self._reduce_and_step(examples, is_active=True)

    def _step(self) -> None:
        clip_gradients(self._clip, {}, self._parameters.values())
        if self._optimizer is not None:
            self._optimizer.step()
        self._dense.take_gradients(trained=True)

    def _step_if_finite(self) -> None:
        """All workers decide alike: they have the same sum, which may be too large for a float."""
        try:
            check_finite_step("sums of the workers' gradients", {}, self._dense.gradients())
        except NotFinite as error:
            self._dense.take_gradients()
            self._drop(error)
        else:
            self._step()

    def _reduce_and_step(self, examples: int, *, is_active: bool) -> bool:
        """Returns whether any worker still had data."""
        assert self._workers is not None
        gradients: Mapping[str, Tensor | None] = self._dense.take_gradients()
        if not is_active:
            gradients = dict.fromkeys(gradients)
        flat = self._flat(gradients, examples, is_active=is_active)
        self._workers.sum(flat)
        num_parameters = len(self._parameters)
        present = flat[-num_parameters - 3 : -3].tolist() if num_parameters else []
        total, num_active, is_held = flat[-3:].tolist()
        self._is_held, self.saves_next = is_held > 0, False
        self.num_pushes += int(num_active)
        if total > 0:
            self._give_gradients(flat / total, present)
            self._step_if_finite()
        return bool(num_active > 0)

    def _flat(
        self, gradients: Mapping[str, Tensor | None], examples: int, *, is_active: bool
    ) -> Tensor:
        """Gradients times examples, a flag per parameter that has one, examples, flags for the
        worker and for a save.
        """
        parts = [
            torch.zeros(p.numel(), device=self._device)
            if (gradient := gradients[name]) is None
            else gradient.reshape(-1) * examples
            for name, p in self._parameters.items()
        ]
        flags = [gradient is not None for gradient in gradients.values()]
        numbers = [*flags, examples, is_active, self.saves_next]
        return torch.cat([*parts, torch.tensor(numbers, dtype=torch.float32, device=self._device)])

    def _give_gradients(self, flat: Tensor, present: list[float]) -> None:
        begin = 0
        for parameter, workers in zip(self._parameters.values(), present, strict=True):
            end = begin + parameter.numel()
            parameter.grad = flat[begin:end].view_as(parameter) if workers else None
            begin = end
