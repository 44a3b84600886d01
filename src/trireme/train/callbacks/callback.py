"""The protocol of callbacks, and what they see of a fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trireme.train.checkpointing.checkpoints import CheckpointAtStop, Checkpoints
from trireme.train.checkpointing.random_state import RandomState
from trireme.train.loop.scoring import Scored
from trireme.train.loop.tally import Tally

if TYPE_CHECKING:
    from trireme.train.trainer import Trainer


class FitState:
    """What a callback sees of a fit.

    Attributes:
        trainer: that fits.
        epoch: the number of the epoch under way, or that has just ended, from 1; epochs of earlier
            fits and of a resumed checkpoint count.
        end: the number of the last epoch.
        resumes: the fit continues an earlier one: `resume=True`, or after Trainer.resume.
        valid: what Trainer.evaluate returned for `valid` after this epoch; empty: there is none.
        is_repeated: this epoch's figures were told before, to the predecessor of this worker, which
            was killed.
        random: the random numbers that checkpoints hold.
        checkpoints: that `fit` was asked for.
    """

    def __init__(
        self,
        trainer: Trainer,
        random: RandomState,
        end: int,
        resumes: bool,
        checkpoints: Checkpoints | CheckpointAtStop | None,
    ) -> None:
        self.trainer, self.random, self.end, self.resumes = trainer, random, end, resumes
        self.checkpoints = checkpoints
        self.epoch, self.is_repeated, self.wants_stop = trainer.num_epochs, False, False
        self.valid: Mapping[str, float] = {}
        self._figures: Mapping[str, float] = {}
        self._scored: Scored | None = None
        self._tally: Tally | None = None

    @property
    def step(self) -> int:
        """Steps made: by this worker, in sync by the job."""
        return self.trainer.optimizer.num_steps

    @property
    def loss(self) -> float:
        """In `step`: of this batch. Reading it waits for a GPU, so read it only every few steps."""
        loss = None if self._scored is None else self._scored.loss
        return float("nan") if loss is None else float(loss.detach())

    @property
    def figures(self) -> Mapping[str, float]:
        """In `epoch`: what `fit` returns of this epoch, without those of `valid`; the same on all
        workers. In `step`: loss and metrics of this worker's batches of the epoch so far, computed
        when they are read.
        """
        return self._figures if self._tally is None else self._tally.figures()

    @property
    def examples(self) -> int:
        """In `step`: that this worker has trained on in this epoch."""
        return 0 if self._tally is None else self._tally.num_examples

    @property
    def rates(self) -> dict[str, float]:
        """The learning rates: of tables by their names, of the dense parameters "dense", or with
        several param groups "dense.0", "dense.1", ...
        """
        groups = self.trainer.optimizer.param_groups
        num_dense, rates = sum("table" not in group for group in groups), {}
        for index, group in enumerate(groups):
            name = "dense" if num_dense == 1 else f"dense.{index}"
            if "lr" in group:
                rates[group["table"].name if "table" in group else name] = float(group["lr"])
        return rates

    def stop(self) -> None:
        """End the fit after this epoch, on all workers. `fit` returns as after its last epoch."""
        self.wants_stop = True

    def see_step(self, scored: Scored, tally: Tally) -> None:
        """A step was made."""
        self._scored, self._tally = scored, tally

    def see_epoch(self, figures: Mapping[str, float], valid: Mapping[str, float]) -> None:
        """An epoch has ended."""
        self._scored = self._tally = None
        self._figures, self.valid = figures, valid


class Callback:
    """Called by Trainer.fit. A subclass overrides what it needs; here they do nothing.

    Only worker 0 has its callbacks called, unless a class says `on_all_workers = True`, as it must
    to call what all workers call together, such as Trainer.save or evaluate. An exception ends the
    training, with its traceback.
    """

    on_all_workers = False

    def begin_fit(self, fit: FitState) -> None:
        """The first epoch is about to begin; of a run that is repeated after its last, none is."""

    def resume(self, fit: FitState, state: Mapping[str, Any]) -> None:
        """After `begin_fit`, of a fit that continues with a checkpoint: what `state_dict` returned
        when the checkpoint was taken.
        """

    def step(self, fit: FitState) -> None:
        """A step was made; its push may be on its way. With `threads`, in the thread that made it,
        one at a time. Training waits for it.
        """

    def epoch(self, fit: FitState) -> None:
        """An epoch has ended and the validation data was scored."""

    def end_fit(self, fit: FitState, error: BaseException | None) -> None:
        """The fit has ended; called once for each `begin_fit`. error: why, if not by its last epoch
        or `fit.stop()`; Stopped after SIGTERM or Ctrl-C.
        """

    def state_dict(self) -> dict[str, Any]:
        """JSON values that checkpoints of the fit keep of this callback, for `resume`."""
        return {}
