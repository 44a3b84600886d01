"""What a worker asks of a compute worker and what that answers, as messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trireme.data.batch import Bags, Batch, Column, Ragged, Strings
from trireme.errors import BadRequest
from trireme.nn.lookup import Lookup
from trireme.protocol.wire import need, need_list
from trireme.train.compute.tensors import Array, pack, unpack

METHOD = "compute.run"
DIGEST_CHARS_MAX = 64
_NONE = -1  # in place of a tensor's number
_TENSOR, _BAGS, _STRINGS = "tensor", "bags", "strings"


@dataclass(kw_only=True, eq=False)
class ComputeRequest:
    """Forward of a batch, and backward in training.

    model: digest of the model's description.
    scores: whether to compute the loss.
    batch: with the lookups of its plan.
    state: weights and buffers, as `state_of`; None: those named `state_id`, which the compute
        worker had last.
    state_id: digest of the state; "": it has no name.
    frozen: which parameters do not learn.
    random: torch's state of random numbers; None: there is a seed in its place.
    """

    model: str
    training: bool
    scores: bool
    batch: Batch
    state: list[Tensor] | None
    state_id: str = ""
    frozen: list[int] = field(default_factory=list)
    random: Tensor | None = None
    seed: int = 0

    def to_wire(self) -> tuple[dict[str, Any], list[Array]]:
        numbers = TensorNumbers()
        return numbers.message(
            {
                "model": self.model,
                "training": self.training,
                "scores": self.scores,
                **batch_to_wire(self.batch, numbers),
                "state": None if self.state is None else numbers.all_of(self.state),
                "state_id": self.state_id,
                "frozen": self.frozen,
                "random": numbers.of(self.random),
                "seed": self.seed,
            }
        )

    @staticmethod
    def from_wire(body: Mapping[str, Any], tensors: Sequence[Tensor]) -> ComputeRequest:
        """tensors: as `unpack` gives them. Raises BadRequest, naming the field."""
        by_number = NumberedTensors(tensors)
        state = None if body.get("state") is None else need_list(body, "state", int)
        return ComputeRequest(
            model=need(body, "model", str),
            training=need(body, "training", bool),
            scores=need(body, "scores", bool),
            batch=batch_from_wire(body, by_number),
            state=None if state is None else list(map(by_number.one, state)),
            state_id=need(body, "state_id", str)[:DIGEST_CHARS_MAX],
            frozen=need_list(body, "frozen", int),
            random=by_number.maybe(need(body, "random", int)),
            seed=need(body, "seed", int),
        )


@dataclass(kw_only=True, eq=False)
class ComputeAnswer:
    """What became of a request for the whole model, or for some stages of it.

    outputs: by name. learned: of stages before the last one, the outputs that have a gradient.
    loss: scalar.
    inputs: gradient of each input that returns one: of the rows of a batch, in the order of
        `leaves_of`, or of the learned boundary tensors. parameters: gradient of each parameter; of
        stages, of each that learns. None: the outputs did not depend on it. Both are empty before
        backward.
    buffers: those that have changed, by their order.
    random: torch's state of random numbers after, if the request had one.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    learned: list[str] = field(default_factory=list)
    loss: Tensor | None = None
    inputs: list[Tensor | None] = field(default_factory=list)
    parameters: list[Tensor | None] = field(default_factory=list)
    buffers: dict[int, Tensor] = field(default_factory=dict)
    random: Tensor | None = None

    def to_wire(self) -> tuple[dict[str, Any], list[Array]]:
        numbers = TensorNumbers()
        return numbers.message(
            {
                "outputs": numbers.by_key(self.outputs),
                "learned": self.learned,
                "loss": numbers.of(self.loss),
                "inputs": numbers.all_of(self.inputs),
                "parameters": numbers.all_of(self.parameters),
                "buffers": numbers.by_key(self.buffers),
                "random": numbers.of(self.random),
            }
        )

    @staticmethod
    def from_wire(body: Mapping[str, Any], arrays: Sequence[Array]) -> ComputeAnswer:
        """Raises BadRequest, naming the field."""
        by_number = NumberedTensors(unpack(body.get("tensors"), arrays))
        return ComputeAnswer(
            outputs=by_number.by_key(body, "outputs", str),
            learned=need_list(body, "learned", str),
            loss=by_number.maybe(need(body, "loss", int)),
            inputs=by_number.list_of(body, "inputs"),
            parameters=by_number.list_of(body, "parameters"),
            buffers=by_number.by_key(body, "buffers", int),
            random=by_number.maybe(need(body, "random", int)),
        )


def leaves_of(batch: Batch) -> list[Tensor]:
    """The rows of the lookups, each once."""
    return list({id(lookup.rows): lookup.rows for lookup in batch.lookups.values()}.values())


def host_tensors(body: Mapping[str, Any]) -> set[int]:
    """The numbers of the tensors that stay on the CPU: of strings and of random numbers. Raises
    BadRequest.
    """
    columns = need_list(body, "columns", list)
    strings = [
        parts for column in columns for _, kind, parts in [_column(column)] if kind == _STRINGS
    ]
    return {need(body, "random", int), *(n for parts in strings for n in parts)}


class TensorNumbers:
    """Tensors in the order in which they were first asked for; each once."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def of(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return _NONE
        number = self._numbers.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return number

    def all_of(self, tensors: Iterable[Tensor | None]) -> list[int]:
        return list(map(self.of, tensors))

    def by_key(self, tensors: Mapping[Any, Tensor]) -> list[list[Any]]:
        return [[key, self.of(tensor)] for key, tensor in tensors.items()]

    def message(self, body: dict[str, Any]) -> tuple[dict[str, Any], list[Array]]:
        """The body, which has numbers of tensors, with what they are; and the tensors."""
        body["tensors"], arrays = pack(self.tensors)
        return body, arrays


class NumberedTensors:
    """The tensors of a message. All raise BadRequest for a number that none of them has."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def one(self, number: Any) -> Tensor:
        if type(number) is not int or not 0 <= number < len(self._tensors):
            raise BadRequest(
                f"compute workers: expected the number of one of {len(self._tensors)} tensors,"
                f" found {number!r}"
            )
        return self._tensors[number]

    def maybe(self, number: Any) -> Tensor | None:
        return None if number == _NONE else self.one(number)

    def bags(self, numbers: list[Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values, offsets, and weights if there are any."""
        values, offsets, weights = numbers
        return self.one(values), self.one(offsets), self.maybe(weights)

    def list_of(self, body: Mapping[str, Any], name: str) -> list[Tensor | None]:
        return list(map(self.maybe, need_list(body, name, int)))

    def by_key(self, body: Mapping[str, Any], name: str, kind: type) -> dict[Any, Tensor]:
        """A field of pairs of a key of that kind and a number."""
        pairs = need_list(body, name, list)
        for pair in pairs:
            if len(pair) != 2 or type(pair[0]) is not kind:
                raise BadRequest(
                    f"message: expected field {name!r} as pairs of {kind.__name__} and a number,"
                    f" found {pair!r}"
                )
        return {key: self.one(number) for key, number in pairs}


def batch_to_wire(batch: Batch, numbers: TensorNumbers) -> dict[str, Any]:
    columns = []
    for name, column in batch.columns.items():
        if isinstance(column, Tensor):
            columns.append([name, _TENSOR, [numbers.of(column)]])
        else:
            kind = _STRINGS if isinstance(column, Strings) else _BAGS
            columns.append([name, kind, [numbers.of(part) for part in column]])
    bags = batch.bags
    parts = () if bags is None else (bags.values, bags.offsets, bags.weights)
    return {
        "columns": columns,
        "bags": None if bags is None else [list(bags.names), numbers.all_of(parts)],
        "lookups": [[name, numbers.all_of(lookup)] for name, lookup in batch.lookups.items()],
    }


def batch_from_wire(body: Mapping[str, Any], by_number: NumberedTensors) -> Batch:
    columns: dict[str, Column] = {}
    for entry in need_list(body, "columns", list):
        name, kind, parts = _column(entry)
        if kind == _TENSOR:
            columns[name] = by_number.one(parts[0])
        elif kind == _STRINGS:
            columns[name] = Strings(by_number.one(parts[0]), by_number.one(parts[1]))
        else:
            columns[name] = Ragged(*by_number.bags(parts))
    bags = None
    if body.get("bags") is not None:
        names, parts = _named(need(body, "bags", list), list, 3)
        bags = Bags(tuple(names), *by_number.bags(parts))
    lookups = {}
    for entry in need_list(body, "lookups", list):
        name, parts = _named(entry, str, len(Lookup._fields))
        lookups[name] = Lookup(*map(by_number.one, parts))
    return Batch(columns, bags, lookups)


def _column(entry: list[Any]) -> tuple[str, str, list[Any]]:
    """(name, kind, numbers) of a column. Raises BadRequest."""
    sizes = {_TENSOR: 1, _STRINGS: 2, _BAGS: 3}
    kind = entry[1] if len(entry) == 3 else None
    if type(kind) is not str or kind not in sizes:
        raise BadRequest(f"compute workers: expected a column of {list(sizes)}, found {entry!r}")
    name, parts = _named([entry[0], entry[2]], str, sizes[kind])
    return name, kind, parts


def _named(entry: list[Any], kind: type, num: int) -> tuple[Any, list[Any]]:
    """(name or names, numbers). Raises BadRequest."""
    is_named = len(entry) == 2 and type(entry[0]) is kind and type(entry[1]) is list
    if not is_named or list(map(type, entry[1])) != [int] * num:
        raise BadRequest(
            f"compute workers: expected a name and the numbers of {num} tensors, found {entry!r}"
        )
    return entry[0], entry[1]
