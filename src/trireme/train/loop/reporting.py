"""What worker 0 prints of a running pass: values by name."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from trireme.data.batch import Ragged, Strings
from trireme.errors import BadRequest, check_counts
from trireme.train.loop.scoring import Scored

VALUES_MAX = 8
"""How many values of a tensor a line shows."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What worker 0 prints during a pass, and which figures are of all workers.

    values: names of the values to print: "loss" (of the batch), a metric (so far, of this worker),
        an output of the model, a column of the batch, or an attribute of the model, with dots:
        any parameter, buffer or number.
    labels: how the line calls each value; empty: by its name.
    period: batches from one line to the next.
    timing: also print where the time goes, and at the end of training how stale pushes were.
    title: what the lines begin with, such as "epoch 0"; empty: nothing.
    speed: also print, of the batches since the last line, the examples per second of this worker
        (ips), and the seconds that each batch took and that it was waited for (reader_cost).
    merged: metrics whose figures are of all workers at the end; the others are of this worker.
        None: all are merged.
    """

    values: Sequence[str] = ()
    labels: Sequence[str] = ()
    period: int = 100
    timing: bool = False
    title: str = ""
    speed: bool = False
    merged: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_names("Report", values=self.values, labels=self.labels)
        if self.labels and len(self.labels) != len(self.values):
            raise BadRequest(
                f"Report: expected {len(self.values)} labels, one for each of values, found"
                f" {len(self.labels)}"
            )
        check_counts("Report", period=self.period)


def check_names(subject: str, **options: Sequence[str]) -> None:
    """Raises BadRequest: an option is not a list of names, for example a single string."""
    for option, names in options.items():
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise BadRequest(f"{subject}: expected {option} as a list of names, found {names!r}")


class Reporter:
    """Prints the values of a Report. figures: loss and metrics so far. say: prints a line; None on
    the other workers, which refuse unknown names like the first. waited_s: seconds that batches
    have been waited for so far.
    """

    def __init__(
        self,
        report: Report,
        figures: Callable[[], Mapping[str, float]],
        say: Callable[[str], None] | None,
        waited_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._report, self._figures, self._say = report, figures, say
        self._batches, self._examples = 0, 0
        self._waited_s, self._last = waited_s, (time.perf_counter(), waited_s())

    def observe(self, model: nn.Module, scored: Scored) -> None:
        """Raises BadRequest: the first batch has no value of that name; lists those it has."""
        self._batches += 1
        self._examples += scored.batch.num_examples
        names = self._report.values
        is_due = self._say is not None and self._batches % self._report.period == 0
        if not names or not (is_due or self._batches == 1):
            return
        figures = dict(self._figures())
        if scored.loss is not None:
            figures["loss"] = float(scored.loss.detach())
        values = [value_of(name, model, scored, figures) for name in names]
        if is_due and self._say is not None:
            pairs = zip(self._report.labels or names, values, strict=True)
            line = ", ".join(f"{label} {_text(value)}" for label, value in pairs)
            title = f"{self._report.title}, " if self._report.title else ""
            self._say(f"{title}batch {self._batches}: {line}{self._speed()}")

    def _speed(self) -> str:
        """Of the batches since the last line."""
        if not self._report.speed:
            return ""
        before_s, waited_before_s = self._last
        self._last = now_s, waited_s = time.perf_counter(), self._waited_s()
        examples, self._examples = self._examples, 0
        period, wall_s = self._report.period, max(now_s - before_s, 1e-9)
        return (
            f", reader_cost {(waited_s - waited_before_s) / period:.5f} s, batch_cost"
            f" {wall_s / period:.5f} s, ips {examples / wall_s:.1f} examples/s"
        )


def value_of(name: str, model: nn.Module, scored: Scored, figures: Mapping[str, float]) -> Any:
    """A figure, output, column or attribute of the model. Raises BadRequest: there is none."""
    for values in (figures, scored.outputs, scored.batch):
        if name in values:
            return values[name]
    try:
        value = attrgetter(name)(model)
        kind = f"a {type(value).__name__}"
    except AttributeError:
        value, kind = None, "nothing of that name"
    if isinstance(value, (Tensor, bool, int, float)):
        return value
    attributes = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    raise BadRequest(
        f"Trainer: expected names of values to print, found {kind} for {name!r}; there are"
        f" the figures {', '.join(figures)}; the outputs {', '.join(scored.outputs)};"
        f" the columns {', '.join(scored.batch.keys())}; and of the model"
        f" {', '.join(attributes) or 'no parameter'}"
    )


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        flat = value.detach().flatten()
        if len(flat) == 1:
            return _text(flat.item())
        return _list([_text(v) for v in flat[:VALUES_MAX].tolist()], tuple(value.shape))
    if isinstance(value, Ragged):
        begin, end = int(value.offsets[0]), int(value.offsets[-1])
        return _text(value.values[begin:end])
    if isinstance(value, Strings):
        return _list(value.decode()[:VALUES_MAX], (len(value.offsets) - 1,))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _list(texts: Sequence[str], shape: tuple[int, ...]) -> str:
    more = " ..." if math.prod(shape) > len(texts) else ""
    return f"[{' '.join(texts)}{more}] of shape {shape}"
