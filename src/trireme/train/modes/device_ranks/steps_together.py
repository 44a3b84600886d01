"""A step of all workers: owners sum the gradients of their rows in the order of the workers, as
servers do in sync (server/step_gradient.py), and each worker does so for a part of the dense ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trireme.errors import BadRequest, NotFinite, TriremeError
from trireme.protocol.clipping import norm_of, square_sum
from trireme.protocol.columns import KeyColumns, merge_columns, no_columns
from trireme.protocol.routing import NO_KEYS, Keys
from trireme.table import RowClassId, TableSchema
from trireme.train.modes.device_pass.dense_steps import DenseSteps
from trireme.train.modes.device_ranks.asked_rows import Asked, AskedRows, counts_of
from trireme.train.modes.device_ranks.exchange import IDLE, Exchange, Message
from trireme.train.modes.device_ranks.owners import Owners, sizes_of
from trireme.train.modes.setup import TrainingSetup, WorkerStep
from trireme.worker.dense_parameters import DenseParameters
from trireme.worker.gradients import TableGradient


@dataclass(frozen=True)
class StepMade:
    """What all workers know of a step. stops: why they stop after it; empty: they do not."""

    stops: str


class StepsTogether:
    """rows: of this worker; where they are, gradients are summed."""

    def __init__(
        self,
        setup: TrainingSetup,
        exchange: Exchange,
        owners: Owners,
        rows: AskedRows,
        dense_steps: DenseSteps | None,
    ) -> None:
        self._exchange, self._owners, self._rows = exchange, owners, rows
        self._clip, self._pool = setup.clip, setup.cluster.pool
        self._schemas = {table.name: table.schema for table in setup.tables}
        self._steps, self._time = dense_steps, setup.data_time
        self._dense = SummedDense(setup.replica.dense, exchange)

    # ---- what a worker sends ----

    def step(self, step: WorkerStep) -> StepMade:
        """Make a step of this worker's gradients and the others'.

        Raises at all workers BadRequest: they disagree on rates or clipping. NotFinite: the
        gradient is not, and it is clipped by its norm.
        """
        body, arrays, gradients = self._table_parts(step)
        body |= {
            "examples": step.examples,
            "time": self._time.seconds(),
            "stops": step.stops,
            "clip": None if self._clip is None else self._clip.to_wire(),
            "groups": [] if self._steps is None else self._steps.values(),
            "absent": self._dense.absent(),
        }
        return self.answer(self._exchange.share("step", body, arrays), gradients)

    def _table_parts(
        self, step: WorkerStep
    ) -> tuple[dict[str, Any], list[list[Any]], list[list[Tensor]]]:
        """The fields of the message that are of tables; its arrays and the gradients, by owner."""
        size = self._exchange.size
        arrays: list[list[Any]] = [[] for _ in range(size)]
        gradients: list[list[Tensor]] = [[] for _ in range(size)]
        has_keys: list[bool | None] = []
        counts: list[list[int]] = []
        for class_id, _ in self._owners.classes:
            part = step.tables.get(class_id)
            if part is None:
                has_keys.append(None)
                counts.append([0] * size)
                continue
            split = self._owners.split(part.keys)
            has_keys.append(part.keys is not self._rows.own.get(class_id))
            counts.append(sizes_of(split).tolist())
            columns = [split.parts(part.columns[n]) for n in self._schemas[class_id.table].columns]
            sent = [split.parts(part.keys), *columns] if has_keys[-1] else columns
            for rank, grads in enumerate(torch.split(part.gradients, counts[-1])):
                arrays[rank] += [np.ascontiguousarray(one[rank]) for one in sent]
                gradients[rank].append(grads)
        values = {c.table: part.values for c, part in step.tables.items()}
        return {"has_keys": has_keys, "counts": counts, "values": values}, arrays, gradients

    # ---- what an owner does ----

    def answer(
        self, messages: Sequence[Message], gradients: Sequence[Sequence[Tensor]] | None = None
    ) -> StepMade:
        """Take part in a step of workers that have a batch. gradients: of this one, by owner."""
        _check_alike(messages)
        dims = np.array([dim for _, dim in self._owners.classes], np.int64)
        counts = counts_of(messages, len(dims))
        between = np.einsum("sco,c->so", counts, dims)
        is_active = [one.kind != IDLE for one in messages]
        own = gradients or [()] * len(messages)
        mine = self._dense.parts() if gradients is not None else [()] * len(messages)
        for rank in np.flatnonzero(is_active):
            between[rank] += self._dense.sizes
        received = self._exchange.numbers(
            [[*rows, *dense] for rows, dense in zip(own, mine, strict=True)], between
        )
        self._apply(_Pushes(messages, received, counts[:, :, self._exchange.rank]))
        stops = (str(m.body["stops"]) for m in messages if m.kind != IDLE and m.body["stops"])
        return StepMade(next(stops, ""))

    def _apply(self, pushes: _Pushes) -> None:
        failure: TriremeError | None = None
        sums: list[tuple[RowClassId, TableGradient]] = []
        for number, (class_id, dim) in enumerate(self._owners.classes):
            if (part := self._summed(pushes, number, class_id, dim)) is not None:
                sums.append((class_id, part))
        dense = self._dense.sum(pushes.rest())
        norm = self._norm([*(part.gradients for _, part in sums), dense])
        try:
            for class_id, part in sums:
                grads = self._clipped(part.gradients, norm)
                clipped = TableGradient(part.keys, grads, part.values, part.columns)
                self._rows.rows.blocks[class_id].update(clipped, pushes.examples, pushes.time)
        except TriremeError as error:
            failure = error
        self._dense.share(self._clipped(dense, norm), pushes.absent, failure)
        if self._steps is not None:
            self._steps.step(pushes.groups)
        self._dense.forget()

    def _summed(
        self, pushes: _Pushes, number: int, class_id: RowClassId, dim: int
    ) -> TableGradient | None:
        """The gradient of one class; None: nobody has one."""
        schema, asked = self._schemas[class_id.table], self._rows.asked.get(class_id)
        parts = pushes.of_class(number, dim, schema, asked)
        if not any(len(part.keys) for part in parts):
            return None
        if asked is None or not all(part.is_as_asked for part in parts):
            asked = Asked.of([part.keys for part in parts], self._pool)
        columns = merge_columns(
            [(index, part.columns) for index, part in zip(asked.places, parts, strict=True)],
            len(asked.keys),
        )
        grads = _sum(parts, asked, pushes.weights)
        return TableGradient(asked.keys, grads, pushes.values(class_id.table), columns)

    def _norm(self, parts: Sequence[Tensor]) -> float | None:
        """Of the gradient of the step, if it is clipped by it."""
        if self._clip is None or self._clip.kind != "norm":
            return None
        squares = [square_sum(part.cpu().numpy()) for part in parts]
        finite = [one for one in squares if one is not None]
        total = sum(finite)
        own = total.to_bytes((total.bit_length() + 7) // 8, "big")
        body = {"total": own if len(finite) == len(squares) else None}
        shares = [message.body["total"] for message in self._exchange.share("norm", body)]
        if None in shares:
            lost = [rank for rank, share in enumerate(shares) if share is None]
            raise NotFinite(
                "pass on devices: expected finite gradients, found NaN or infinity among those of"
                f" workers {lost}; the step is not made"
            )
        return norm_of(sum(int.from_bytes(share, "big") for share in shares))

    def _clipped(self, gradient: Tensor, norm: float | None) -> Tensor:
        """As `Clip.clipped`, on the device."""
        if self._clip is None:
            return gradient
        if norm is None:
            limit = float(np.float32(self._clip.limit))
            return gradient.clamp(-limit, limit)
        factor = self._clip.factor(norm)
        return gradient if factor == 1 else gradient * float(factor)


class _Part(NamedTuple):
    """What a worker has sent of one row class. is_as_asked: its keys are those that it has asked
    for last.
    """

    keys: Keys  # (K,)
    gradients: Tensor  # (K, D)
    columns: KeyColumns
    is_as_asked: bool


class _Pushes:
    """What the workers have sent to this owner in a step. counts: (size, classes)."""

    def __init__(
        self, messages: Sequence[Message], received: Sequence[Tensor], counts: np.ndarray[Any, Any]
    ) -> None:
        self._messages, self._received, self._counts = messages, received, counts
        self._taken = [0] * len(messages)
        self._arrays = [iter(one.arrays) for one in messages]
        active = [one.body for one in messages if one.kind != IDLE]
        self.examples = total = sum(int(body["examples"]) for body in active)
        self.weights = [
            0.0 if one.kind == IDLE else _weight(int(one.body["examples"]), total)
            for one in messages
        ]
        self.time = max(int(body["time"]) for body in active)
        self.groups: list[dict[str, Any]] = active[0]["groups"]
        self.absent = set.intersection(*(set(body["absent"]) for body in active))

    def values(self, table: str) -> dict[str, Any]:
        """Of the rule, as the first worker with a gradient has them."""
        bodies = (one.body for one in self._messages if one.kind != IDLE)
        values: dict[str, Any] = next(b["values"][table] for b in bodies if table in b["values"])
        return values

    def of_class(
        self, number: int, dim: int, schema: TableSchema, asked: Asked | None
    ) -> list[_Part]:
        """What each worker has sent of a class, in their order; call it once for each class, in
        order.
        """
        parts = []
        for rank, message in enumerate(self._messages):
            num = int(self._counts[rank, number])
            begin = self._taken[rank]
            self._taken[rank] = end = begin + num * dim
            grads = self._received[rank][begin:end].view(num, dim)
            own_asked = NO_KEYS if asked is None else asked.by_worker[rank]
            has_keys = None if message.kind == IDLE else message.body["has_keys"][number]
            if has_keys is None:
                is_as_asked = not len(own_asked)
                parts.append(_Part(NO_KEYS, grads, no_columns(schema.columns), is_as_asked))
                continue
            keys = next(self._arrays[rank]) if has_keys else own_asked
            columns = {name: next(self._arrays[rank]) for name in schema.columns}
            parts.append(_Part(keys, grads, columns, not has_keys))
        return parts

    def rest(self) -> list[tuple[Tensor, float]]:
        """What is left of the numbers of each worker with a batch: the dense gradients of this
        owner's part; and its weight.
        """
        return [
            (self._received[rank][self._taken[rank] :], self.weights[rank])
            for rank, message in enumerate(self._messages)
            if message.kind != IDLE
        ]


def _weight(examples: int, total: int) -> float:
    """Exact in float32."""
    return float(np.float32(examples / total if total else 1.0))


def _sum(parts: Sequence[_Part], asked: Asked, weights: Sequence[float]) -> Tensor:
    """(K, D): per key the weighted gradients, one worker's after the other's."""
    device, dim = parts[0].gradients.device, parts[0].gradients.shape[1]
    total = torch.zeros(len(asked.keys), dim, device=device)
    is_set = torch.zeros(len(asked.keys), 1, dtype=torch.bool, device=device)
    for part, index, weight in zip(parts, asked.places, weights, strict=True):
        if not len(index):
            continue
        rows = torch.from_numpy(index.astype(np.int64)).to(device)
        own = part.gradients * weight
        total[rows] = torch.where(is_set[rows], total[rows] + own, own)
        is_set[rows] = True
    return total


def _check_alike(messages: Sequence[Message]) -> None:
    """Raises BadRequest, at all workers: they have other values of rules, groups or clipping."""
    active = [(rank, one.body) for rank, one in enumerate(messages) if one.kind != IDLE]
    seen: dict[str, tuple[int, Any]] = {}
    for rank, body in active:
        facts = {f"table {name!r}": values for name, values in body["values"].items()}
        for what, value in {**facts, "groups": body["groups"], "clip": body["clip"]}.items():
            other, first = seen.setdefault(what, (rank, value))
            if first != value:
                raise BadRequest(
                    f"pass on devices: {what}: worker {other} has {first}, worker {rank} {value};"
                    " schedulers must agree"
                )


class SummedDense:
    """The dense gradients of a step: each worker sums a part of them in the order of the workers,
    and gives the sum to all. So every worker has the bits that servers would have.

    sizes: (size,) how many numbers each worker sums.
    """

    def __init__(self, dense: DenseParameters, exchange: Exchange) -> None:
        self._dense, self._exchange = dense, exchange
        num = sum(parameter.numel() for parameter in dense.parameters.values())
        ends = np.arange(exchange.size + 1, dtype=np.int64) * num // exchange.size
        self.sizes: npt.NDArray[np.int64] = np.diff(ends)

    def absent(self) -> list[str]:
        """The parameters without a gradient."""
        return [name for name, grad in self._dense.gradients().items() if grad is None]

    def parts(self) -> list[list[Tensor]]:
        """This worker's gradients, by the worker that sums them; zeros in the place of absent
        ones.
        """
        device = self._exchange.device
        flat = [
            torch.zeros(p.numel(), device=device)
            if p.grad is None
            else p.grad.detach().reshape(-1).to(device)
            for p in self._dense.parameters.values()
        ]
        whole = torch.cat(flat) if flat else torch.zeros(0, device=device)
        return [[part] for part in torch.split(whole, self.sizes.tolist())]

    def sum(self, parts: Sequence[tuple[Tensor, float]]) -> Tensor:
        """(n,) the weighted sum of this worker's parts, at least one, each with its weight."""
        (first, weight), *others = parts
        total = first * weight
        for part, weight in others:
            total = total + part * weight
        return total

    def share(
        self, own: Tensor, absent: Collection[str], failure: TriremeError | None = None
    ) -> None:
        """Give the parameters the sums of all workers, but for the absent ones. Raises at all
        workers the failure of one.
        """
        between = np.tile(self.sizes[:, None], (1, self._exchange.size))
        received = self._exchange.numbers([[own]] * self._exchange.size, between, failure)
        parameters = self._dense.parameters
        parts = torch.split(torch.cat(received), [p.numel() for p in parameters.values()])
        for (name, parameter), part in zip(parameters.items(), parts, strict=True):
            grad = part.view_as(parameter).to(parameter.device)
            parameter.grad = None if name in absent else grad

    def forget(self) -> None:
        """Leave no gradient."""
        self._dense.take_gradients()
