"""Values of a running pass, by name: what `fetch_list` asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from trireme.data.batch import Ragged, Strings
from trireme.errors import BadRequest
from trireme.train.loop.scoring import Scored

VALUES_MAX = 8
"""How many values of a tensor a line shows."""


@dataclass(frozen=True)
class Fetch:
    """Which values to say, and how often.

    names: "loss" (of the batch), names of metrics (so far, of this worker), of the model's outputs,
        of columns of the batch, or of attributes of the model with dots: parameters, buffers,
        whatever is a tensor or a number.
    labels: what each is called in the line; the names themselves if empty.
    period: batches from one line to the next.
    """

    names: Sequence[str] = ()
    labels: Sequence[str] = ()
    period: int = 100

    def __post_init__(self) -> None:
        for option, given in (("fetch_list", self.names), ("fetch_info", self.labels)):
            if isinstance(given, str) or not all(isinstance(name, str) for name in given):
                raise BadRequest(f"Trainer: expected {option} as a list of names, found {given!r}")
        if self.labels and len(self.labels) != len(self.names):
            raise BadRequest(
                f"Trainer: expected one text in fetch_info for each of the {len(self.names)} names"
                f" in fetch_list, found {len(self.labels)}"
            )
        if self.period < 1:
            raise BadRequest(f"Trainer: expected print_period >= 1, found {self.period}")


class Fetcher:
    """Says the values of a Fetch.

    Args:
        figures: loss and metrics so far.
        say: takes a line; None: this worker says nothing, yet refuses unknown names like the first.
    """

    def __init__(
        self,
        fetch: Fetch,
        figures: Callable[[], Mapping[str, float]],
        say: Callable[[str], None] | None,
    ) -> None:
        self._fetch, self._figures, self._say = fetch, figures, say
        self._batches = 0

    def observe(self, model: nn.Module, scored: Scored) -> None:
        """Raises BadRequest: the first batch has no such name; the message lists what there is."""
        self._batches += 1
        is_due = self._say is not None and self._batches % self._fetch.period == 0
        if not self._fetch.names or not (is_due or self._batches == 1):
            return
        values = _Values(model, scored, self._figures())
        found = [values[name] for name in self._fetch.names]
        if is_due and self._say is not None:
            labels = self._fetch.labels or self._fetch.names
            said = (f"{label} {_text(v)}" for label, v in zip(labels, found, strict=True))
            self._say(f"batch {self._batches}: {', '.join(said)}")


class _Values:
    def __init__(self, model: nn.Module, scored: Scored, figures: Mapping[str, float]) -> None:
        self._model, self._batch, self._outputs = model, scored.batch, scored.outputs
        self._figures = dict(figures)
        if scored.loss is not None:
            self._figures["loss"] = float(scored.loss.detach())

    def __getitem__(self, name: str) -> Any:
        if name in self._figures:
            return self._figures[name]
        if name in self._outputs:
            return self._outputs[name]
        if name in self._batch:
            return self._batch[name]
        try:
            value = attrgetter(name)(self._model)
        except AttributeError:
            raise self._unknown(name, "nothing of that name") from None
        if not isinstance(value, (Tensor, bool, int, float)):
            raise self._unknown(name, f"a {type(value).__name__}")
        return value

    def _unknown(self, name: str, found: str) -> BadRequest:
        of_model = [name for name, _ in self._model.named_parameters()]
        of_model += [name for name, _ in self._model.named_buffers()]
        return BadRequest(
            f"Trainer: expected fetch_list to name values, found {found} for {name!r}; there are"
            f" the figures {', '.join(self._figures)}; the outputs {', '.join(self._outputs)};"
            f" the columns {', '.join(self._batch.keys())}; and of the model"
            f" {', '.join(of_model) or 'no parameter'}"
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
    count = 1
    for size in shape:
        count *= size
    more = " ..." if count > len(texts) else ""
    return f"[{' '.join(texts)}{more}] of shape {shape}"
