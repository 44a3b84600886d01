"""Calls the callbacks of a fit: on worker 0 or on all, with the same figures everywhere."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from trireme.errors import BadRequest, check_kind
from trireme.train.callbacks.callback import Callback, FitState
from trireme.train.checkpointing.savers import Saver
from trireme.train.epochs import stop_if_asked
from trireme.train.first_worker import let_first_worker
from trireme.train.loop.scoring import Scored
from trireme.train.loop.tally import Tally
from trireme.train.predecessor import STEPS

log = logging.getLogger("trireme.train")


def checked_callbacks(callbacks: Sequence[Callback]) -> tuple[Callback, ...]:
    """Raises BadRequest: something else than a Callback, such as a class."""
    expected = "a list of objects of tr.Callback's subclasses"
    check_kind("Trainer", "callbacks", callbacks, Iterable, expected)
    listed = tuple(callbacks)
    for callback in listed:
        check_kind("Trainer", "callbacks", callback, Callback, expected)
        if sum(callback is other for other in listed) > 1:
            raise BadRequest(
                f"Trainer: expected each callback once, found {callback!r} twice: make two of them"
            )
    return listed


class CallbackCalls:
    """Calls those callbacks that are called at this worker."""

    def __init__(self, callbacks: Sequence[Callback], fit: FitState) -> None:
        self._all, self._fit, self._cluster = callbacks, fit, fit.trainer.cluster
        is_first = self._cluster.worker == 0
        names = _names(callbacks)
        self._called = {n: c for n, c in names.items() if is_first or c.on_all_workers}
        self._of_steps = [c for c in self._called.values() if type(c).step is not Callback.step]

    @contextmanager
    def running(self, resumed: Mapping[str, Any] | None) -> Iterator[None]:
        """Between begin_fit and end_fit. resumed: states of a checkpoint that the fit continues."""
        with ExitStack() as stack:
            for name, callback in self._called.items():
                stack.push(self._end_of(callback))
                callback.begin_fit(self._fit)
                if resumed is not None and name in resumed:
                    callback.resume(self._fit, resumed[name])
                elif resumed is not None and callback.state_dict():
                    log.warning("%s: the checkpoint has no state of it: it begins anew", name)
            yield

    def _end_of(self, callback: Callback) -> Callable[..., None]:
        def end(
            _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
        ) -> None:
            callback.end_fit(self._fit, error)

        return end

    @property
    def after_step(self) -> Callable[[Scored, Tally], None] | None:
        """To be called after each step; None: no callback is."""
        return self._after_step if self._of_steps else None

    def _after_step(self, scored: Scored, tally: Tally) -> None:
        self._fit.see_step(scored, tally)
        script = self._cluster.client.script
        with script.section(STEPS), script.section(str(self._fit.step)):
            for callback in self._of_steps:
                callback.step(self._fit)

    def after_epoch(self, figures: Mapping[str, float], valid: Mapping[str, float]) -> None:
        """Every worker calls it; callbacks get the figures of worker 0, of which some may not be
        of all workers (see Report), also where this worker was restarted.
        """
        if not self._all:
            return
        fit, script = self._fit, self._cluster.client.script
        with script.section("callbacks"):
            fit.is_repeated = script.has_attended_next()
            agreed = let_first_worker(
                self._cluster,
                "an epoch's figures",
                lambda: {"figures": dict(figures), "valid": dict(valid)},
            )
            fit.see_epoch(agreed["figures"], agreed["valid"])
            for name, callback in self._called.items():
                with script.section(name):  # meetings of two callbacks have names of their own
                    callback.epoch(fit)

    def agree_to_stop(self, saver: Saver | None) -> bool:
        """Whether a callback of any worker ends the fit; every worker calls it. Raises Stopped if
        one was asked to stop meanwhile.
        """
        if not self._all or not self._fit.trainer.optimizer.agree_to_stop(self._fit.wants_stop):
            return False
        stop_if_asked(self._cluster, saver)
        return True

    def states(self) -> dict[str, Any]:
        """What a checkpoint keeps of the callbacks, by name. Raises BadRequest: not JSON values."""
        states = {name: callback.state_dict() for name, callback in self._called.items()}
        for name, state in states.items():
            try:
                json.dumps(state, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise BadRequest(
                    f"{name}.state_dict: expected JSON values, found {state!r:.200}: {error}"
                    " (infinity, NaN and other values go as text, such as str(x))"
                ) from error
        return {name: state for name, state in states.items() if state}


def _names(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """By class, and for further ones of a class with a number: EarlyStopping, EarlyStopping 2."""
    names: dict[str, Callback] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        number = sum(type(other).__name__ == kind for other in names.values()) + 1
        names[kind if number == 1 else f"{kind} {number}"] = callback
    return names
