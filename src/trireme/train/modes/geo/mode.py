"""Mode geo: the worker's part of it, over the window that it trains in."""

import logging

from trireme.errors import NotFinite
from trireme.protocol.routing import Keys
from trireme.protocol.wire import DIFFERENCE
from trireme.train.finite import check_finite_step
from trireme.train.modes.base import BeginPull
from trireme.train.modes.geo.window import Window
from trireme.train.modes.on_servers.mode import OnServers
from trireme.train.modes.on_servers.worker_trained_dense import WorkerTrainedDense
from trireme.train.modes.setup import TrainingSetup, WorkerStep
from trireme.train.predecessor import PredecessorProgress
from trireme.worker.gradients import KeysByClass, PushHeader
from trireme.worker.pull import Pulled

log = logging.getLogger("trireme.train")


class Geo(OnServers):
    """A push carries what a window of steps has changed."""

    trains_in_threads = False
    has_device_passes = False
    why_not_shared = (
        "a worker that leaves would lose its unexchanged steps, and others would repeat those"
        " batches from different weights"
    )

    def __init__(self, setup: TrainingSetup) -> None:
        super().__init__(setup)
        strategy, dense = setup.strategy, setup.replica.dense
        self.steps_per_push = strategy.k
        self.window = Window(
            self.client,
            setup.tables,
            dense,
            setup.optimizer,
            pool=self.cluster.pool,
            k=strategy.k,
            cache_bytes=strategy.cache_bytes,
        )
        self._worker_dense = WorkerTrainedDense(self.client, dense, setup.optimizer)
        self._position: tuple[int, ...] = ()  # of the stream, after the last step
        self._num_lost_reported = 0

    # ---- rows ----

    def pull_ahead(self, *, steps: bool) -> BeginPull | None:
        """Rows come from the cache, after the step before. Ahead is what the cache lacks, where
        windows have a batch to fetch for meanwhile.
        """
        return None if self.setup.strategy.k == 1 else self._fetch

    def _fetch(self, keys: KeysByClass, *_: object) -> None:
        self.window.fetch(keys, self.setup.data_time.seconds())

    def lacking(self, keys: KeysByClass) -> KeysByClass:
        return self.window.lacking(keys)

    def pull(self, keys: KeysByClass, *, blocks: bool, number: int | None = None) -> Pulled:
        self._touch(keys)
        return self.window.read(keys)

    def _touch(self, keys: KeysByClass) -> None:
        while not self.window.touch(keys, self.setup.data_time.seconds()):
            self._exchange()

    def forget(self, table: str, keys: Keys) -> None:
        for class_id, rows in self.window.cache.tables.items():
            if class_id.table == table:
                rows.reset_state(keys)

    # ---- the step ----

    def step(self, step: WorkerStep) -> None:
        """Train on the cache, and exchange if the window has had all its steps."""
        window = self.window
        if window.has_ended or not step.push_counts:  # since the forward passes, or before
            self._touch({name: gradient.keys for name, gradient in step.tables.items()})
        window.step(step.tables, step.examples)
        self._position = step.position
        if window.is_due:
            self._exchange()
        window.has_ended = False

    def note_interrupt(self, error: KeyboardInterrupt) -> None:
        super().note_interrupt(error)
        self.window.forget()

    def wait_for_step(self) -> None:
        """The next forward pass reads the cache."""

    def _exchange(self) -> None:
        """Push what the window has changed, and begin another one. Differences that are not finite
        are not pushed: the worker continues with the servers' weights.
        """
        window = self.window
        tables, dense = window.differences(self.group_values())
        what = f"differences of {window.num_steps} steps"
        try:
            check_finite_step(what, tables, {} if dense is None else dense.gradients)
        except NotFinite as error:
            window.forget()
            self.setup.drop(error)
            return
        header = PushHeader(
            sequence=self.stream.sequence + 1,
            step=0,
            push_counts=window.push_counts,
            examples=window.num_examples,
            position=self._position,
            time=self.setup.data_time.seconds(),
        )
        self.stream.push(header, tables, dense, kind=DIFFERENCE)
        window.end()

    def flush(self) -> None:
        super().flush()
        if self.window.num_steps:
            self.stream.check_usable()
            self._exchange()

    def refresh(self) -> None:
        super().refresh()
        self.window.rebase()  # which may be open, as a batch is pulled before its step

    # ---- the pass ----

    def begin_pass(self) -> PredecessorProgress:
        progress = super().begin_pass()
        # Each push counts as a whole window; one that ended early had fewer steps.
        self.num_steps += progress.num_pushes * (self.setup.strategy.k - 1)
        return progress

    def end_pass(self) -> None:
        self.flush()
        self._report_lost()
        super().end_pass()

    def _report_lost(self) -> None:
        lost = self.window.cache.num_lost - self._num_lost_reported
        self._num_lost_reported += lost
        if lost:
            log.warning(
                "geo: %d rows left the cache of %d bytes, and their optimizer state is lost; it is"
                " kept with a larger one, Strategy('geo', cache_bytes=...)",
                lost,
                self.window.cache.budget,
            )

    def finish(self) -> None:
        self.flush()
        super().finish()

    # ---- checkpoints ----

    def resume(self, steps_before: int | None = None) -> None:
        """Pushes do not count: each is of several steps."""
        self.window.forget()
        super().resume()

    def publish(self) -> None:
        """Optimizer state; exchanges bring the weights."""
        self._worker_dense.publish(weights=False)

    def adopt(self) -> None:
        self._worker_dense.adopt()
        self.refresh()

    def counters(self) -> dict[str, int]:
        """Rows in the cache, rows that have left it, and optimizer states lost with them."""
        cache = self.window.cache
        num_rows = sum(rows.num_rows for rows in cache.tables.values())
        return {"rows": num_rows, "evicted": cache.num_evicted, "states_lost": cache.num_lost}
