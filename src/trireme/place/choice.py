"""What is to be placed, and a placement of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import cached_property

from trireme.place.machine_types import MachineType


def exact(number: float) -> Fraction:
    """The decimal number as which Python writes it: 0.1 is a tenth."""
    return Fraction(Decimal(repr(number)))  # Fraction parses strings slowly


@dataclass(frozen=True, kw_only=True)
class StageChain:
    """What is to be placed. All numbers are per example, finite and >= 0.

    stages: their names, in order; the first reads.
    types: that may compute.
    seconds: name of a type -> of each stage.
    bytes_before: of each stage: what crosses the boundary before it, there and back. Before the
        first stage: between a worker that reads and the servers.
    bytes_sent_to: of each stage that is not in the first group: its weights, which it is sent too,
        and their gradients, which it sends back.
    num_first: how many stages the first group has at least.
    seconds_per_byte: name of a type -> what a byte that crosses between groups costs a worker,
        without the network.
    """

    stages: Sequence[str]
    types: Sequence[MachineType]
    seconds: Mapping[str, Sequence[float]]
    bytes_before: Sequence[float]
    bytes_sent_to: Sequence[float]
    num_first: int = 1
    seconds_per_byte: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """The workers that compute the stages from `begin` up to, not including, `end`. seconds: that
    one needs for an example.
    """

    begin: int
    end: int
    type: MachineType
    workers: int
    seconds: Fraction

    @property
    def cost(self) -> Fraction:
        """Per hour."""
        return self.workers * exact(self.type.price)

    @property
    def rate(self) -> float:
        """Examples per second; infinite if they take hardly any time."""
        try:
            return float(self.workers / self.seconds)
        except (ZeroDivisionError, OverflowError):
            return math.inf


@dataclass(frozen=True)
class Choice:
    """A placement of all stages."""

    groups: tuple[Group, ...]

    @cached_property
    def cost(self) -> Fraction:
        """Per hour."""
        return sum((group.cost for group in self.groups), Fraction())

    @property
    def workers(self) -> int:
        return sum(group.workers for group in self.groups)

    @property
    def slowest(self) -> Group:
        """The group that the others wait for."""
        return max(self.groups, key=lambda group: group.seconds / group.workers)

    @property
    def pace(self) -> Fraction:
        """Seconds per example of the whole job."""
        return self.slowest.seconds / self.slowest.workers

    @property
    def rate(self) -> float:
        """Examples per second that are expected."""
        return self.slowest.rate
