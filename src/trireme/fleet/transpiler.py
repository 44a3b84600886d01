"""DistributeTranspilerConfig: how the oldest generation of Fleet cut dense parameters and chose a
mode. Its fields keep their names and defaults; one without a counterpart is refused by name.
"""

from typing import Any

from trireme.blocks import HASH, ROUND_ROBIN, Blocks, Placement
from trireme.errors import BadRequest, check_choice
from trireme.strategy import Strategy


class RoundRobin:
    """For `split_method`: blocks are placed on the servers in turn."""


class HashName:
    """For `split_method`: the name of a block decides its server."""


PLACES: dict[Any, str] = {RoundRobin: ROUND_ROBIN, HashName: HASH}
MODES = ("pserver", "nccl2")
DEFAULTS: dict[str, Any] = {
    "mode": "pserver",
    "slice_var_up": True,
    "min_block_size": 8192,
    "split_method": RoundRobin,
    "sync_mode": True,
    "geo_sgd_mode": False,
    "geo_sgd_need_push_nums": 100,
}
_COLLECTIVE = (
    *("nccl_comm_num", "use_hierarchical_allreduce", "collective_mode"),
    *("hierarchical_allreduce_inter_nranks", "hierarchical_allreduce_exter_nranks"),
)
# Other fields: why they have no counterpart.
ELSEWHERE = {
    "enable_dc_asgd": "async with compensated delay is not supported; use Strategy('bounded')",
    "half_async": "there are no threads that share a worker's push; use sync_mode",
    "completely_not_async": "use sync_mode",
    "runtime_split_send_recv": "it says how Fleet moves blocks, which has no counterpart",
    "print_log": "the logger 'trireme' says what happens",
    "wait_port": "workers always wait for the servers",
    **dict.fromkeys(_COLLECTIVE, "gloo and NCCL choose how they reduce"),
}


class DistributeTranspilerConfig:
    """A strategy for `fleet.distributed_optimizer`, in place of DistributedStrategy.

    mode: "pserver", or "nccl2", a job without servers, which is mode collective.
    slice_var_up: whether dense parameters are cut.
    min_block_size: elements per block, a multiple of 64; the last of a parameter may have fewer.
        (In Fleet the number of servers decides too; here the cut does not depend on it.)
    split_method: RoundRobin, HashName or, for a class with `dispatch`, a function as `place`
        of trireme.Blocks.
    sync_mode: sync or async. geo_sgd_mode: geo, with windows of geo_sgd_need_push_nums steps.
    """

    mode: str
    slice_var_up: bool
    min_block_size: int
    split_method: type[RoundRobin] | type[HashName] | Placement
    sync_mode: bool
    geo_sgd_mode: bool
    geo_sgd_need_push_nums: int

    _assigned: set[str]

    def __init__(self) -> None:
        for name, value in DEFAULTS.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_assigned", set())

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ELSEWHERE:
            raise BadRequest(
                f"DistributeTranspilerConfig: {name} has no place here, found {value!r};"
                f" {ELSEWHERE[name]}"
            )
        check_choice("DistributeTranspilerConfig", DEFAULTS, attribute=name)
        if not _fits(name, value):
            what = {bool: "a bool", int: "an integer >= 1"}
            what[type] = "RoundRobin, HashName or a function (name of a parameter, number of the"
            what[type] += " block in it, number of servers) -> index of a server"
            what[str] = f"one of {', '.join(MODES)}"
            raise BadRequest(
                f"DistributeTranspilerConfig: expected {name} as {what[type(DEFAULTS[name])]},"
                f" found {value!r}"
            )
        object.__setattr__(self, name, value)
        self._assigned.add(name)

    @property
    def is_collective(self) -> bool:
        return self.mode != "pserver"

    def strategy(self, *, is_collective: bool = False) -> Strategy:
        """The equivalent Strategy. is_collective: of the job. Raises BadRequest: geo_sgd_mode with
        sync_mode, or its number of steps without it; a mode that the job has not, or knobs that a
        collective one has not.
        """
        if is_collective != self.is_collective:
            job = "without servers" if is_collective else "with servers (fleet.init())"
            raise BadRequest(
                f"DistributeTranspilerConfig: expected a mode for a job {job}, found {self.mode!r}"
            )
        if self.is_collective:
            if not self.sync_mode or self.geo_sgd_mode:
                raise BadRequest(
                    f"DistributeTranspilerConfig: expected sync_mode True and geo_sgd_mode False in"
                    f" mode {self.mode!r}, found {self.sync_mode} and {self.geo_sgd_mode}"
                )
            return Strategy("collective")
        if not self.geo_sgd_mode:
            self._check_effect("geo_sgd_need_push_nums", "geo_sgd_mode True")
            return Strategy("sync" if self.sync_mode else "async")
        if self.sync_mode:
            raise BadRequest(
                "DistributeTranspilerConfig: expected sync_mode False with geo_sgd_mode, found True"
            )
        return Strategy("geo", k=self.geo_sgd_need_push_nums)

    def blocks(self) -> Blocks:
        """The equivalent Blocks. Raises BadRequest: a block size without slice_var_up."""
        if not self.slice_var_up:
            self._check_effect("min_block_size", "slice_var_up True")
        size = self.min_block_size if self.slice_var_up else None
        place: Any = self.split_method
        return Blocks(size, place=PLACES.get(place, place))

    def _check_effect(self, name: str, needed: str) -> None:
        if name in self._assigned:
            raise BadRequest(
                f"DistributeTranspilerConfig: expected {needed} with {name}, which has no effect"
                f" without it, found {name} {getattr(self, name)!r}"
            )


def _fits(name: str, value: Any) -> bool:
    default = DEFAULTS[name]
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, str):
        return value in MODES
    if isinstance(default, int):
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return value in PLACES if isinstance(value, type) else callable(value)
