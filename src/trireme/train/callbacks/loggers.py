"""Loggers: figures of a fit to TensorBoard, Weights & Biases, or MLflow, by worker 0."""

from __future__ import annotations

import datetime
import importlib
import logging
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

from trireme.errors import BadRequest, Stopped, check_counts, check_flags, writing
from trireme.rpc.notices import Notices
from trireme.train.callbacks.callback import Callback, FitState

log = logging.getLogger("trireme.train")

EVERY_STEPS = 50
"""Steps from one line of figures to the next, unless said otherwise."""


class _Logger(Callback):
    """Figures at the names that TensorBoard's docstring gives, for `_write`. After an error it is
    not asked for anything more in this fit.
    """

    _BOUND: ClassVar[str]
    """What ends a wait for the library's server."""

    def __init__(self, module: str, extra: str, every_steps: int, required: bool) -> None:
        who = type(self).__name__
        check_counts(who, every_steps=every_steps)
        check_flags(who, required=required)
        try:
            self._library: Any = importlib.import_module(module)
        except ImportError as error:
            raise BadRequest(
                f"{who}: expected its library, found that {error}: pip install trireme-ps[{extra}]"
            ) from error
        self.every_steps, self._required = every_steps, required
        self._is_open = False
        self._last = (0, 0, 0.0)  # epoch, examples and time of the last line

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Calls of the library that may wait for a server, which is logged ever more seldom."""
        is_over = threading.Event()
        thread = threading.Thread(target=self._tell, args=(is_over,), daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            self._is_open = False
            if self._required or not isinstance(error, Exception):
                raise
            who = type(self).__name__
            log.warning(
                "%s: logs no more of this fit, which goes on (required=False): %s", who, error
            )
        finally:
            is_over.set()
            thread.join()

    def _tell(self, is_over: threading.Event) -> None:
        start = time.monotonic()
        notices = Notices(start)
        while not is_over.wait(notices.next_at - time.monotonic()):
            notices.take_due(now := time.monotonic())
            who, waited_s = type(self).__name__, now - start
            log.warning("%s: no answer for %.0f s; fit waits: %s", who, waited_s, self._BOUND)

    @abstractmethod
    def _begin(self, fit: FitState) -> None: ...

    @abstractmethod
    def _write(self, values: Mapping[str, float], step: int) -> None: ...

    @abstractmethod
    def _end(self, error: BaseException | None) -> None: ...

    def begin_fit(self, fit: FitState) -> None:
        self._last = (0, 0, time.monotonic())
        self._is_open = True
        with self._asking():
            self._begin(fit)

    def end_fit(self, fit: FitState, error: BaseException | None) -> None:
        if self._is_open:
            self._is_open = False
            with self._asking():
                self._end(error)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        if self._is_open:
            with self._asking():
                self._write(values, step)

    def step(self, fit: FitState) -> None:
        if fit.step % self.every_steps:
            return
        (epoch, examples, before_s), now_s = self._last, time.monotonic()
        self._last = (fit.epoch, fit.examples, now_s)
        values = {f"step/lr/{name}": rate for name, rate in fit.rates.items()}
        values["step/loss"] = fit.loss
        if epoch == fit.epoch:
            values["step/examples_per_s"] = (fit.examples - examples) / max(now_s - before_s, 1e-9)
        self._log(values, fit.step)

    def epoch(self, fit: FitState) -> None:
        if fit.is_repeated:
            return
        values = {f"train/{name}": value for name, value in fit.figures.items()}
        values |= {f"valid/{name}": value for name, value in fit.valid.items()}
        self._log({**values, "epoch": fit.epoch}, fit.step)


class TensorBoard(_Logger):
    """Writes event files that TensorBoard shows.

    A fit that resumes hides what the earlier one wrote of steps after its checkpoint.

    Args:
        folder: of this run, made if absent.
        every_steps: see "step/..." below.
        required: whether an error of the library ends the fit. If not, it is logged once, and the
            fit goes on without this logger.

    Tags: every `every_steps` steps "step/loss" (of that batch), "step/examples_per_s" (of worker 0)
    and "step/lr/NAME" of tables and dense parameters; after each epoch "train/NAME" and
    "valid/NAME" for each figure, and "epoch"; all by step.

    Raises BadRequest: TensorBoard is not installed; every_steps < 1; from a fit: a folder that
    cannot be written. ResourceExhausted: from a fit: its disk is full.
    """

    _BOUND = "the disk of its folder is slow"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every_steps: int = EVERY_STEPS,
        required: bool = True,
    ) -> None:
        super().__init__("torch.utils.tensorboard", "tensorboard", every_steps, required)
        self.folder = folder
        self._writer: Any = None

    def _begin(self, fit: FitState) -> None:
        self._writer = None
        purged = fit.step + 1 if fit.resumes else None
        with self._writing():
            self._writer = self._library.SummaryWriter(os.fspath(self.folder), purge_step=purged)

    def _writing(self) -> AbstractContextManager[None]:
        return writing(f"TensorBoard: cannot write {os.fspath(self.folder)}")

    def _write(self, values: Mapping[str, float], step: int) -> None:
        with self._writing():
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            if "epoch" in values:
                self._writer.flush()

    def end_fit(self, fit: FitState, error: BaseException | None) -> None:
        self._is_open = self._writer is not None  # after an error too: it has a thread and a file
        super().end_fit(fit, error)

    def _end(self, error: BaseException | None) -> None:
        with self._writing():
            self._writer.close()


class WandB(_Logger):
    """A run of Weights & Biases for each fit, with the names of TensorBoard.

    Args:
        every_steps, required: see TensorBoard.
        options: of `wandb.init`: project, name, config, dir, mode="offline", ...; with id and
            resume="allow" a fit that resumes continues the run.

    Attributes:
        run: of the fit under way, or of the last.

    A fit that ends by an error or is stopped ends the run with exit code 1.

    Raises BadRequest: wandb is not installed; every_steps < 1.
    """

    _BOUND = "wandb.Settings(init_timeout=, finish_timeout=) bounds it, mode='offline' avoids it"

    def __init__(
        self, *, every_steps: int = EVERY_STEPS, required: bool = True, **options: Any
    ) -> None:
        super().__init__("wandb", "wandb", every_steps, required)
        self._options = options
        self.run: Any = None

    def _begin(self, fit: FitState) -> None:
        self.run = None
        self.run = self._library.init(**self._options)

    def _write(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def _end(self, error: BaseException | None) -> None:
        self.run.finish(exit_code=0 if error is None else 1)


class MLflow(_Logger):
    """A run of MLflow for each fit, with the names of TensorBoard.

    Args:
        experiment: name, made if absent.
        tracking_uri: of the server or store; None: as MLflow finds it, from MLFLOW_TRACKING_URI.
        run_name: None: MLflow makes one.
        run_id: of a run to go on with, for a fit that resumes.
        params: hyperparameters to note.
        every_steps, required: see TensorBoard.

    Attributes:
        run_id: of the fit under way, or of the last; None: before the first.

    The run ends as FINISHED, after SIGTERM or Ctrl-C as KILLED, after an error as FAILED.

    Raises BadRequest: MLflow is not installed; every_steps < 1.
    """

    _BOUND = "MLFLOW_HTTP_REQUEST_TIMEOUT and MLFLOW_HTTP_REQUEST_MAX_RETRIES bound it"

    def __init__(
        self,
        experiment: str = "Default",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
        params: Mapping[str, Any] | None = None,
        every_steps: int = EVERY_STEPS,
        required: bool = True,
    ) -> None:
        super().__init__("mlflow", "mlflow", every_steps, required)
        self.experiment, self.tracking_uri, self.run_name = experiment, tracking_uri, run_name
        self.params, self.run_id, self._continued = dict(params or {}), run_id, run_id
        self._client: Any = None

    def _begin(self, fit: FitState) -> None:
        # The client, because `mlflow.log_metrics` knows the run in one thread only.
        self._client = self._library.MlflowClient(tracking_uri=self.tracking_uri)
        if self._continued is None:
            self.run_id = self._begin_run()
        else:
            self._client.update_run(self._continued, status="RUNNING")
        for name, value in self.params.items():
            self._client.log_param(self.run_id, name, value)

    def _begin_run(self) -> str:
        known = self._client.get_experiment_by_name(self.experiment)
        number = known.experiment_id if known else self._client.create_experiment(self.experiment)
        run_id: str = self._client.create_run(number, run_name=self.run_name).info.run_id
        return run_id

    def _write(self, values: Mapping[str, float], step: int) -> None:
        metric = self._library.entities.Metric
        now_ms = int(1000 * datetime.datetime.now(datetime.timezone.utc).timestamp())
        metrics = [metric(name, float(value), now_ms, step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def _end(self, error: BaseException | None) -> None:
        stopped = isinstance(error, (Stopped, KeyboardInterrupt))
        status = "FINISHED" if error is None else "KILLED" if stopped else "FAILED"
        self._client.set_terminated(self.run_id, status)
