"""The random-number states of a process, so that another process can continue with them."""

import math
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trireme.errors import BadRequest, Corruption
from trireme.train.loop.worker_batches import samplers

_NOW, _EPOCH = "random/now", "random/epoch"
_PYTHON_VERSION = 3


class RandomState:
    """The global CPU generators of torch, Python and NumPy, and those that order a DataLoader: as
    they are now, and at the beginning of the epoch, where a dataset that cannot seek is read again.
    """

    def __init__(self) -> None:
        self._generators: list[torch.Generator] = []
        self._at_begin: dict[str, Tensor] = {}

    def begin_epoch(self, dataset: Iterable[Any]) -> None:
        """Record the states before the first batch is read."""
        self._generators = _generators_of(dataset)
        self._at_begin = self._capture(_EPOCH)

    def tensors(self) -> dict[str, Tensor]:
        """All states, by the names that `rewind` and `restore` expect."""
        return {**self._capture(_NOW), **self._at_begin}

    def rewind(self, tensors: Mapping[str, Tensor]) -> None:
        """Return to the beginning of the saved epoch, if `tensors` has it; after `begin_epoch`."""
        self._restore(_EPOCH, tensors)
        self._at_begin = self._capture(_EPOCH)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Return to the states at the save, if `tensors` has them."""
        self._restore(_NOW, tensors)

    def _capture(self, prefix: str) -> dict[str, Tensor]:
        _, words, python_gauss = random.getstate()
        kept_gauss = math.nan if python_gauss is None else python_gauss
        numpy_state: Any = np.random.get_state(legacy=True)
        kind, keys, place, has_gauss, gauss = numpy_state
        if kind != "MT19937":
            raise BadRequest(
                f"checkpoint: expected numpy.random's own generator MT19937, found {kind}"
            )
        states = {
            "torch": torch.get_rng_state(),
            "python": torch.tensor(words),
            "python.gauss": torch.tensor(kept_gauss, dtype=torch.float64),
            "numpy": torch.tensor([*keys.tolist(), place, has_gauss]),
            "numpy.gauss": torch.tensor(gauss, dtype=torch.float64),
        }
        for number, generator in enumerate(self._generators):
            states[f"generator.{number}"] = generator.get_state()
        return {f"{prefix}/{name}": state for name, state in states.items()}

    def _restore(self, prefix: str, tensors: Mapping[str, Tensor]) -> None:
        prefix += "/"
        states = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        if not states:
            return
        try:
            torch.set_rng_state(states["torch"])
            gauss = float(states["python.gauss"])
            words = tuple(states["python"].tolist())
            random.setstate((_PYTHON_VERSION, words, None if math.isnan(gauss) else gauss))
            *keys, place, has_gauss = states["numpy"].tolist()
            gauss = float(states["numpy.gauss"])
            np.random.set_state(("MT19937", np.array(keys, np.uint32), place, has_gauss, gauss))
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            message = f"checkpoint: expected states of random numbers, found {error}"
            raise Corruption(message) from error
        for number, generator in enumerate(self._generators):
            if (state := states.get(f"generator.{number}")) is not None:
                generator.set_state(state)


def _generators_of(dataset: Iterable[Any]) -> list[torch.Generator]:
    if not isinstance(dataset, DataLoader):
        return []
    owners = [dataset, *samplers(dataset)]
    generators = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in generators if isinstance(g, torch.Generator)}.values())
