"""DistributedStrategy: Fleet's switches, each either meaning something here or refused by name."""

from __future__ import annotations

from collections.abc import Mapping

from trireme.errors import BadRequest
from trireme.strategy import Strategy

# Options that did nothing in Fleet 2.6 either.
WITHOUT_EFFECT = (
    "max_merge_var_num",
    "send_queue_size",
    "independent_recv_thread",
    "min_send_grad_num_before_recv",
    "thread_pool_size",
    "send_wait_times",
    "runtime_split_send_recv",
    "lr_decay_steps",
)


class DistributedStrategy:
    """Fleet's switches.

    a_sync: True for async (the default), False for sync; k_steps 0 is as good as none.
    adam_d2sum: whether the dense part, given as Adam, is trained by AdamD2Sum instead.
    """

    __slots__ = ("_a_sync", "_adam_d2sum", "_configs")

    def __init__(self) -> None:
        self._a_sync = True
        self._adam_d2sum = False
        self._configs: dict[str, object] = {}

    @property
    def a_sync(self) -> bool:
        return self._a_sync

    @a_sync.setter
    def a_sync(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise BadRequest(f"DistributedStrategy: expected a_sync as a bool, found {value!r}")
        self._a_sync = value

    @property
    def adam_d2sum(self) -> bool:
        return self._adam_d2sum

    @adam_d2sum.setter
    def adam_d2sum(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise BadRequest(f"DistributedStrategy: expected adam_d2sum as a bool, found {value!r}")
        self._adam_d2sum = value

    @property
    def a_sync_configs(self) -> Mapping[str, object]:
        return dict(self._configs)

    @a_sync_configs.setter
    def a_sync_configs(self, configs: Mapping[str, object]) -> None:
        for key, value in configs.items():
            if key == "k_steps":
                if value not in (0, -1):
                    raise BadRequest(
                        "DistributedStrategy: k_steps > 0 is mode geo, which this version lacks;"
                        f" expected 0, found {value!r}"
                    )
            elif key in WITHOUT_EFFECT:
                raise BadRequest(
                    f"DistributedStrategy: {key} had no effect in Fleet and has none here;"
                    " remove it"
                )
            elif key != "launch_barrier":  # workers always wait for servers
                raise BadRequest(
                    f"DistributedStrategy: expected k_steps or launch_barrier, found {key!r}"
                )
        self._configs = dict(configs)

    @property
    def trainer_desc_configs(self) -> Mapping[str, object]:
        return {}

    @trainer_desc_configs.setter
    def trainer_desc_configs(self, configs: Mapping[str, object]) -> None:
        raise BadRequest(
            f"DistributedStrategy: trainer_desc_configs has no place here, found {sorted(configs)};"
            " give train_from_dataset dump=trireme.Dump(path=dump_fields_path, fields=dump_fields,"
            " params=dump_param), and stat_var_names"
        )

    def mode(self) -> Strategy:
        """The same in Trireme's words."""
        return Strategy("async" if self._a_sync else "sync")
