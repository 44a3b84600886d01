"""The dense gradients of a step: each worker sums a part of them in the order of the workers, and
gives the sum to all. So every worker has the bits that servers would have.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trireme.errors import TriremeError
from trireme.train.modes.device_ranks.exchange import Exchange
from trireme.worker.dense_parameters import DenseParameters


class SummedDense:
    """sizes: (size,) how many numbers each worker sums."""

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
