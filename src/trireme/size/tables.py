"""The tables of an estimate: described by options, or those of a configuration's model."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trireme import _core, optim, policy
from trireme.config import Config
from trireme.errors import BadRequest, check_choice
from trireme.nn import Planner
from trireme.run.model import create_recipe
from trireme.run.settings import Settings
from trireme.table import Table

T = TypeVar("T")

OPTIMIZERS: dict[str, Callable[[], optim.Rule]] = {
    "adagrad": lambda: optim.Adagrad(),
    "adagrad_shared": lambda: optim.Adagrad(shared=True),
    "adam": lambda: optim.Adam(),
    "adam_shared": lambda: optim.Adam(shared=True),
    "fleet_adagrad": lambda: optim.FleetAdagrad(),
    "fleet_adagrad_v2": lambda: optim.FleetAdagradV2(),
    "fleet_adam": lambda: optim.FleetAdam(),
    "fleet_sgd": lambda: optim.FleetSGD(),
    "fleet_shared_adam": lambda: optim.FleetSharedAdam(),
    "fleet_std_adagrad": lambda: optim.FleetAdagrad(shared=False),
    "ftrl": lambda: optim.FTRL(),
    "momentum": lambda: optim.SGD(lr=0.1, momentum=0.9),
    "sgd": lambda: optim.SGD(lr=0.1),
}
POLICIES: dict[str, Callable[[], policy.Policy]] = {
    "CtrCommonAccessor": policy.CtrCommonAccessor,
    "CtrDoubleAccessor": policy.CtrDoubleAccessor,
    "SparseAccessor": policy.SparseAccessor,
    "plain": policy.Policy,
    "score": policy.ScorePolicy,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """A table as options describe it. None: not given.

    dims: pairs of a dim and the share of the rows that have it, in place of `dim`.
    """

    dim: int | None = None
    dims: Sequence[tuple[int, float]] | None = None
    optimizer: str | None = None
    policy: str | None = None
    dtype: str | None = None
    count_filter: int | None = None
    sketch_bytes: int | None = None

    def flags(self) -> list[str]:
        """The command-line flags of the options that are given."""
        return [f"--{name}" for name in self.__slots__ if getattr(self, name) is not None]


def described_table(options: TableOptions, *, num_pending: int) -> Table:
    """Raises BadRequest: options that are missing or contradict each other."""
    if options.dim is None and options.dims is None:
        raise BadRequest("size: expected --dim D, --dims D=P ... or -m config.yaml, found none")
    dims = options.dims
    if dims is not None:
        _check_dims(dims)
    admit = None
    if options.count_filter is not None:
        admit = policy.CountFilter(options.count_filter, sketch_bytes=options.sketch_bytes)
    elif options.sketch_bytes is not None or num_pending:
        raise BadRequest(
            "size: expected --sketch_bytes and --pending_keys with --count_filter N, found none"
        )
    return Table(
        "table",
        dim=options.dim,
        dims=None if dims is None else {str(dim): dim for dim, _ in dims},
        salt=dims is not None,
        optimizer=_named("optimizer", options.optimizer or "adagrad", OPTIMIZERS)(),
        policy=_named("policy", options.policy or "plain", POLICIES)(),
        admit=admit,
        dtype=options.dtype or "float32",
    )


def _named(option: str, name: str, choices: Mapping[str, T]) -> T:
    check_choice("size", choices, **{f"--{option}": name})
    return choices[name]


def _check_dims(dims: Sequence[tuple[int, float]]) -> None:
    if not math.isclose(sum(share for _, share in dims), 1.0):
        shares = {dim: f"{100 * share:g} %" for dim, share in dims}
        raise BadRequest(f"size: expected --dims with 100 per cent in all, found {shares}")
    if len({dim for dim, _ in dims}) < len(dims):
        raise BadRequest(f"size: expected each dim once, found {dims}")


def tables_of_model(path: Path, overrides: list[str]) -> list[Table]:
    config = Config.load(path, overrides)
    model = create_recipe(config, Settings.read(config)).model
    return list(Planner(model, pool=_core.Pool(1)).tables)
