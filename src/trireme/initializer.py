"""Initial weights of rows: functions of (table seed, key), with the same bits on every machine."""

from dataclasses import dataclass
from typing import ClassVar

from trireme.errors import check_kind, check_numbers, check_values

_FLOAT32_MAX = (2 - 2**-23) * 2**127


def _check_float32(kind: str, **values: float) -> None:
    for name, value in values.items():
        check_kind(kind, name, value, float, "a number")
        check_values(kind, **{name: (abs(value) <= _FLOAT32_MAX, "as a finite float32", value)})


@dataclass(frozen=True)
class Uniform:
    """Each weight is uniform in [low, high)."""

    kind: ClassVar[str] = "uniform"
    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        name, high = type(self).__name__, self.high
        _check_float32(name, low=self.low, high=high)
        check_values(name, low=(self.low <= high, f"<= high, which is {high}", self.low))

    def spec(self) -> tuple[str, float, float]:
        return (self.kind, self.low, self.high)


@dataclass(frozen=True)
class Normal:
    """Each weight is normal with this mean and standard deviation."""

    mean: float = 0.0
    std: float = 0.01

    def __post_init__(self) -> None:
        _check_float32("Normal", mean=self.mean, std=self.std)
        check_numbers("Normal", ">= 0", std=self.std)

    def spec(self) -> tuple[str, float, float]:
        return ("normal", self.mean, self.std)


@dataclass(frozen=True)
class Constant:
    """Every weight is `value`."""

    value: float = 0.0

    def __post_init__(self) -> None:
        _check_float32("Constant", value=self.value)

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
