"""What Trainer.fit does: epochs, validation, checkpoints, callbacks, and a common end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from trireme.train import row_life
from trireme.train.callbacks.callback import FitState
from trireme.train.callbacks.callback_calls import CallbackCalls
from trireme.train.checkpointing.checkpoints import CheckpointAtStop, Checkpoints
from trireme.train.checkpointing.fit_progress import FitProgress
from trireme.train.checkpointing.savers import Saver, saving
from trireme.train.dump import Dump, dumping
from trireme.train.epochs import Epochs, stop_if_asked
from trireme.train.loop.data_pass import PassOptions
from trireme.train.loop.reporting import Report
from trireme.train.loop.scoring import ExampleIds
from trireme.train.loop.worker_batches import cut_of
from trireme.train.predecessor import remaining_dump
from trireme.train.stopping import stopping_on_signals
from trireme.train.trainer_checks import check_checkpoints, check_epochs, check_not_in_autocast

if TYPE_CHECKING:
    from trireme.train.trainer import Trainer

TrainEpoch: TypeAlias = Callable[[str, Any, PassOptions, Saver | None], dict[str, float]]
"""Takes a title, the data, what to do besides, and who takes checkpoints; returns the figures."""


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """The arguments of Trainer.fit."""

    dataset: Any
    valid: Any
    epochs: int
    checkpoints: Checkpoints | CheckpointAtStop | None
    resume: bool
    report: Report
    dump: Dump | None
    check_nan: bool


def fit(
    trainer: Trainer, state: Epochs, request: FitRequest, train: TrainEpoch
) -> dict[str, float]:
    """See Trainer.fit."""
    epochs, dataset, optimizer = request.epochs, request.dataset, trainer.optimizer
    cluster, script = trainer.cluster, trainer.cluster.client.script
    optimizer.check_newest()
    check_not_in_autocast("fit")
    check_epochs(dataset, request.valid, epochs)
    check_checkpoints(request.checkpoints)
    if request.checkpoints is not None or request.resume:
        optimizer.mode.check_between_passes("fit with checkpoints")
    before = state.resumed
    progress = FitProgress(state.num_epochs, figures={} if before is None else before.figures)
    if request.resume:
        progress = state.resume_fit(request.checkpoints, epochs)
    progress.cut = cut_of(dataset).text
    end = progress.begun_at + epochs
    states, state.callbacks = state.callbacks, None
    resumes = request.resume or states is not None
    seen = FitState(trainer, state.random, end, resumes, request.checkpoints)
    calls = CallbackCalls(trainer.callbacks, seen)
    if state.num_epochs == end:  # an earlier run made all epochs: callbacks find what it kept
        with script.section(), calls.running(states):
            return progress.figures
    left = remaining_dump(request.dump, cluster, end - state.num_epochs)
    with (
        stopping_on_signals(cluster),
        script.section(),
        row_life.at_data_time(dataset, optimizer, trains=True),
        dumping(left, dataset, trainer.model, cluster) as file,
        saving(request.checkpoints, optimizer, state.random, progress.to_json) as saver,
        calls.running(states),
    ):
        ids = ExampleIds(dataset) if request.check_nan else None
        options = PassOptions(request.report, file, ids, calls.after_step)
        progress.callbacks = calls.states()
        while state.num_epochs < end and not calls.agree_to_stop(saver):
            epoch = state.num_epochs - progress.begun_at
            title = "train" if epochs == 1 else f"train {epoch + 1}/{epochs}"
            progress.num_epochs, progress.is_under_way = state.num_epochs, True
            progress.dealt = state.dealt
            seen.epoch, seen.valid = state.num_epochs + 1, {}
            with script.section():
                figures = train(title, dataset, options, saver)
                stop_if_asked(cluster, saver)
                valid = _validate(trainer, request)
            progress.figures = figures | {f"valid_{name}": valid[name] for name in valid}
            state.num_epochs += 1
            calls.after_epoch(figures, valid)
            progress.num_epochs, progress.is_under_way = state.num_epochs, False
            progress.dealt = state.dealt = None
            progress.callbacks = calls.states()
        if request.valid is not None or trainer.callbacks:  # which take time after the last step
            stop_if_asked(cluster, saver)
    return progress.figures


def _validate(trainer: Trainer, request: FitRequest) -> dict[str, float]:
    if request.valid is None:
        return {}
    return trainer.evaluate(request.valid, check_nan=request.check_nan)
