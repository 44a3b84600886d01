"""Initial weights of rows: functions of (table seed, key), with the same bits on every machine."""

from dataclasses import dataclass
from typing import ClassVar

from trireme.errors import BadRequest


@dataclass(frozen=True)
class Uniform:
    """Each weight is uniform in [low, high)."""

    kind: ClassVar[str] = "uniform"
    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            name = type(self).__name__
            raise BadRequest(f"{name}: expected low <= high, found {self.low} and {self.high}")

    def spec(self) -> tuple[str, float, float]:
        return (self.kind, self.low, self.high)


@dataclass(frozen=True)
class Normal:
    """Each weight is normal with this mean and standard deviation."""

    mean: float = 0.0
    std: float = 0.01

    def __post_init__(self) -> None:
        if not self.std >= 0:
            raise BadRequest(f"Normal: expected std >= 0, found {self.std}")

    def spec(self) -> tuple[str, float, float]:
        return ("normal", self.mean, self.std)


@dataclass(frozen=True)
class Constant:
    """Every weight is `value`."""

    value: float = 0.0

    def spec(self) -> tuple[str, float, float]:
        return ("constant", self.value, 0.0)


@dataclass(frozen=True)
class TailUniform(Uniform):
    """The first weight is 0, the others are uniform in [low, high), as in Fleet."""

    kind: ClassVar[str] = "tail_uniform"
    low: float = -1e-4
    high: float = 1e-4


Initializer = Uniform | Normal | Constant
INITIALIZERS = (Uniform, Normal, Constant)
