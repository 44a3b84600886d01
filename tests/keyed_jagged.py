"""A class with the methods of TorchRec's KeyedJaggedTensor, and TorchRec's own where installed.

The suite does not install TorchRec: it brings a dozen packages and seconds of imports.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor


class StandIn:
    """What TorchRec 1.8 documents of KeyedJaggedTensor, for features of the same stride."""

    def __init__(
        self, keys: list[str], values: Tensor, weights: Tensor | None = None, *, lengths: Tensor
    ) -> None:
        self._keys, self._values, self._weights, self._lengths = keys, values, weights, lengths

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths

    def offsets(self) -> Tensor:
        zero = torch.zeros(1, dtype=self._lengths.dtype)
        return torch.cat([zero, torch.cumsum(self._lengths, 0, dtype=self._lengths.dtype)])

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def variable_stride_per_key(self) -> bool:
        return False


KINDS: list[Any] = [StandIn]
if importlib.util.find_spec("torchrec") is not None:
    KINDS.append(importlib.import_module("torchrec.sparse.jagged_tensor").KeyedJaggedTensor)
