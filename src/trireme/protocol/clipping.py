"""Clipping of a step's gradient, as torch.nn.utils does it.

The norm of a gradient on several servers is the root of a sum of squares. Each server's share of
the sum is an exact integer, so the norm depends neither on the number of servers nor on the cut of
blocks. A worker that clips its own gradients (train/clipping.py) has all of them, so it adds
squares in float64, which takes one pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trireme.errors import BadRequest, NotFinite
from trireme.protocol.routing import Floats

KINDS = ("norm", "value")
EPS = 1e-6  # of torch.nn.utils.clip_grad_norm_
# Squares of float32 are multiples of 2**-298, the square of the smallest one.
SQUARE_UNIT_LOG2 = -298
_CHUNK = 1 << 16
_INFINITE = 255  # the exponent of infinities and NaNs


@dataclass(frozen=True)
class Clip:
    """How a gradient is clipped."""

    kind: str  # "norm": scaled so that its norm is at most limit; "value": limits each element
    limit: float  # > 0

    def to_wire(self) -> list[Any]:
        return [self.kind, self.limit]

    @staticmethod
    def from_wire(body: Any) -> Clip | None:
        """None for nil. Raises BadRequest."""
        match body:
            case None:
                return None
            case [str(kind), float(limit)] if kind in KINDS and 0 < limit < math.inf:
                return Clip(kind, limit)
        raise BadRequest(f"push: expected clip [{' or '.join(KINDS)}, above 0], found {body!r}")

    def factor(self, norm: float) -> np.float32:
        """The factor for a gradient of this norm."""
        factor: np.float32 = np.float32(min(1.0, self.limit / (norm + EPS)))
        return factor

    def clipped(self, gradient: Floats, norm: float | None) -> Floats:
        """The gradient, or a clipped copy. norm: of the whole step, for kind "norm"."""
        if self.kind == "value":
            limit = np.float32(self.limit)
            return np.clip(gradient, -limit, limit)
        assert norm is not None
        factor = self.factor(norm)
        return gradient if factor == 1 else np.multiply(gradient, factor)


def square_sum(values: Floats) -> int | None:
    """The exact sum of squares in units of 2**-298; None if a value is not finite."""
    total = 0
    bits_N = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    for start in range(0, len(bits_N), _CHUNK):
        bits = bits_N[start : start + _CHUNK] & np.uint32(0x7FFFFFFF)
        exponents = bits >> np.uint32(23)
        if np.any(exponents == _INFINITE):
            return None
        hidden = (exponents > 0).astype(np.uint64) << np.uint64(23)
        mantissas = (bits & np.uint32(0x7FFFFF)).astype(np.uint64) | hidden
        squares = mantissas * mantissas  # below 2**48: sums of either half are exact in float64
        exponents = np.maximum(exponents, 1).astype(np.int64)
        for half, shift in ((squares >> np.uint64(24), 24), (squares & np.uint64(0xFFFFFF), 0)):
            sums = np.bincount(exponents, weights=half)
            for exponent in np.flatnonzero(sums).tolist():
                total += int(sums[exponent]) << (shift + 2 * (exponent - 1))
    return total


def norm_of(total: int) -> float:
    """The norm for a sum of squares in the units of `square_sum`."""
    return math.sqrt(total) * 2.0 ** (SQUARE_UNIT_LOG2 // 2)


def norm_from_wire(body: Any) -> float | None:
    """None for nil. Raises BadRequest."""
    if body is not None and not (isinstance(body, float) and 0 <= body < math.inf):
        raise BadRequest(f"pull: expected norm as a number >= 0 or nil, found {body!r}")
    return body


@dataclass(frozen=True)
class NormReply:
    """A server's answer about the norm of a step."""

    total: int | None  # its share of the sum of squares; None: not finite, or the step is applied
    norm: float | None  # of the last step applied, if it was clipped by norm
    is_applied: bool  # whether the server has applied the step

    def to_wire(self) -> dict[str, Any]:
        size = 0 if self.total is None else (self.total.bit_length() + 7) // 8
        total = None if self.total is None else self.total.to_bytes(size, "big")
        return {"total": total, "norm": self.norm, "is_applied": self.is_applied}

    @staticmethod
    def from_wire(body: Mapping[str, Any]) -> NormReply:
        total = body["total"]
        number = None if total is None else int.from_bytes(total, "big")
        return NormReply(number, body["norm"], bool(body["is_applied"]))


def norm_of_step(step: int, replies: Sequence[NormReply]) -> float | None:
    """The norm of a step's gradient from the answers of all servers; None: all have applied it.
    Raises NotFinite: the gradient is not finite; no server has applied it.
    """
    for reply in replies:
        if reply.is_applied:  # with a norm that another worker sent
            return reply.norm
    totals = [reply.total for reply in replies if reply.total is not None]
    if len(totals) < len(replies):
        servers = [server for server, reply in enumerate(replies) if reply.total is None]
        raise NotFinite(
            f"pull: expected finite gradients in step {step}, found NaN or infinity on"
            f" servers {servers}; the step is not applied"
        )
    return norm_of(sum(totals))
