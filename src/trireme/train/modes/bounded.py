"""Mode bounded: as async, and no stream is more than `staleness` steps ahead of the slowest."""

from trireme.protocol.membership import Pace
from trireme.train.modes.base import BeginPull
from trireme.train.modes.on_servers.numbered_steps import NumberedSteps
from trireme.train.modes.setup import TrainingSetup, WorkerStep
from trireme.worker.gradients import KeysByClass
from trireme.worker.pull import Pulled


class Bounded(NumberedSteps):
    """A pull names the step that its rows are for; servers answer when the others are near it."""

    why_not_shared = "a stream that waits for a worker would hold up all others"
    is_staged = False
    pulls_behind_pushes = False  # a pull waits for other streams, which a push must not

    def __init__(self, setup: TrainingSetup) -> None:
        super().__init__(setup)
        self._run_from = 0  # the step of batch 0 of the run

    def pull_ahead(self, *, steps: bool) -> BeginPull | None:
        """Only if it is known which step the rows are for."""
        return super().pull_ahead(steps=steps) if steps else None

    def begin_run(self) -> None:
        super().begin_run()
        self._run_from = self.next_step()

    def pull(self, keys: KeysByClass, *, blocks: bool, number: int | None = None) -> Pulled:
        self.join_pass()
        done = self._last_step
        self.flush()
        step = self.next_step() if number is None else self._run_from + number
        pace = Pace(step, min(done, step - 1), self.setup.strategy.staleness)
        time = self.setup.data_time.seconds()
        return self.client.pull(keys, blocks=blocks, pace=pace, time=time)

    def step(self, step: WorkerStep) -> None:
        number = self.next_step()
        super().step(step)
        self._last_step = number
