"""DistributedStrategy: Fleet's switches. Each has a meaning here or is refused by name."""

import logging
from collections.abc import Mapping
from typing import Any, NoReturn

from trireme.errors import Absent, BadRequest, check_counts, check_kind
from trireme.job.default import default, is_default_set
from trireme.label import is_label
from trireme.strategy import Strategy

log = logging.getLogger("trireme")

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
GUARD = "heter_worker_device_guard"
# Attributes of Fleet's strategy that are set elsewhere here, or not supported.
_ELSEWHERE = {
    "trainer_desc_configs": "give train_from_dataset dump=trireme.Dump(path=dump_fields_path,"
    " fields=dump_fields, params=dump_param), and stat_var_names",
    "sparse_table_configs fleet_desc_configs": "a table says its rule, policy and admission where"
    " it is declared, in fleet.sparse_embedding or trireme.Table",
    "fs_client_param": "give fit, save and load storage_options, for fsspec",
    "is_fl_ps_mode": "federated training is not supported",
    "with_coordinator is_with_coordinator": "federated training is not supported; server 0"
    " coordinates",
    "split_data": "a dataset gives each worker its stream",
    "gradient_merge gradient_merge_configs": "give a trireme.Trainer accumulate=k_steps",
    "amp amp_configs": "give a trireme.Trainer autocast=torch.bfloat16",
    "recompute recompute_configs": "use torch.utils.checkpoint in the model's forward",
    "slice_var_up min_block_size split_method": "give a fleet.DistributeTranspilerConfig, or"
    " trireme.Blocks to a Trainer",
    "localsgd adaptive_localsgd": "a_sync with k_steps > 0 is mode geo",
    "dgc": "gradients are not compressed",
    "lars lamb": "servers run the optimizers of torch.optim that work element by element",
    "asp": "pruning is not supported",
}
ELSEWHERE = {name: why for names, why in _ELSEWHERE.items() for name in names.split()}


class _Configs(dict[str, Any]):
    """A copy of a_sync_configs, to read: a change of it would have no effect, and is refused."""

    def _refuse(self, *arguments: Any, **named: Any) -> NoReturn:
        raise BadRequest(
            "DistributedStrategy: expected a_sync_configs to be set as a whole, found a change of"
            f" what it returned: strategy.a_sync_configs = {{**{dict(self)}, ...}}"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


class DistributedStrategy:
    """Fleet's switches. One that has no counterpart here is refused by name.

    a_sync: True, the default: async, or with a_sync_configs k_steps > 0 mode geo; False: sync.
    a_sync_configs: k_steps; 0 and -1 (in Fleet: automatic) have no effect. use_ps_gpu: mode sync,
        in a collective job collective, with either a_sync; data is trained in passes of PSGPU.
        heter_worker_device_guard: label of the compute workers that the job must have, except cpu,
        which the workers themselves have.
    adam_d2sum: train the dense part by AdamD2Sum in place of the Adam that is passed.
    """

    __slots__ = ("_configs", "_is_chosen", "a_sync", "adam_d2sum")

    a_sync: bool
    adam_d2sum: bool
    _configs: dict[str, Any]

    def __init__(self) -> None:
        self.a_sync, self.adam_d2sum, self._configs = True, False, {}
        self._is_chosen = False  # whether the user has set a_sync

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ELSEWHERE or not hasattr(type(self), name):
            why = ELSEWHERE.get(name, "a_sync, a_sync_configs and adam_d2sum have one")
            raise Absent(f"DistributedStrategy: {name} has no place here, found {value!r}; {why}")
        if name in ("a_sync", "adam_d2sum") and not isinstance(value, bool):
            raise BadRequest(f"DistributedStrategy: expected {name} as a bool, found {value!r}")
        object.__setattr__(self, name, value)
        if name == "a_sync":
            object.__setattr__(self, "_is_chosen", True)

    @property
    def a_sync_configs(self) -> Mapping[str, object]:
        return _Configs(self._configs)

    @a_sync_configs.setter
    def a_sync_configs(self, configs: Mapping[str, object]) -> None:
        what = 'a dict, such as {"k_steps": 0}'
        check_kind("DistributedStrategy", "a_sync_configs", configs, Mapping, what)
        if nothing := [key for key in configs if key in WITHOUT_EFFECT]:
            raise BadRequest(
                f"DistributedStrategy: {', '.join(nothing)} had no effect in Fleet and has none"
                " here; remove it"
            )
        for key, value in configs.items():
            _check_config(key, value)
        self._configs = dict(configs)

    def blocks(self) -> None:
        """The default cut into blocks; DistributeTranspilerConfig can set another."""

    def strategy(self, *, is_collective: bool = False) -> Strategy:
        """The equivalent Strategy.

        is_collective: of the job. Raises BadRequest: k_steps > 0 without a_sync, or in mode
        collective; a_sync True in a collective job; compute workers, but none of the label of
        heter_worker_device_guard.
        """
        if GUARD in self._configs:
            _check_guard(str(self._configs[GUARD]))
        k = self._configs.get("k_steps", 0)
        uses_gpus = bool(self._configs.get("use_ps_gpu"))
        if is_collective or uses_gpus:
            if k > 0 or (self.a_sync and self._is_chosen and not uses_gpus):
                raise BadRequest(
                    "DistributedStrategy: expected a_sync False and no k_steps where every step is"
                    " one of all workers (is_collective, use_ps_gpu), found a_sync"
                    f" {self.a_sync}, k_steps {k}"
                )
            return Strategy("collective" if is_collective else "sync")
        if k > 0 and not self.a_sync:
            raise BadRequest(
                "DistributedStrategy: expected a_sync True with k_steps > 0, which is mode geo,"
                f" found a_sync False and k_steps {k}"
            )
        if k > 0:
            return Strategy("geo", k=k)
        return Strategy("async" if self.a_sync else "sync")


def _check_guard(label: str) -> None:
    """Check that the job has compute workers of the label. In Fleet they have what is computed
    below `device_guard`, here the whole model, or the stages of their label.
    """
    if label == "cpu" or not is_default_set() or default().place is not None:
        return
    labels = {name for name, _ in default().heter}
    if not labels:
        log.warning(
            "DistributedStrategy: %s=%s has no effect: the job has no compute workers, and workers"
            " run their models themselves",
            GUARD,
            label,
        )
    elif label not in labels:
        raise BadRequest(
            f"DistributedStrategy: expected {GUARD} to be a label of the job's compute workers,"
            f" {', '.join(sorted(labels))}, found {label!r}"
        )


def _check_config(key: str, value: object) -> None:
    expected = "DistributedStrategy: expected"
    if key == "k_steps":
        check_counts("DistributedStrategy", low=-1, k_steps=value)
    elif key == "use_ps_gpu":
        check_kind("DistributedStrategy", key, value, bool, "a bool")
    elif key == GUARD:
        if not isinstance(value, str) or not is_label(value):
            raise BadRequest(f"{expected} {GUARD} as a label such as gpu, found {value!r}")
    elif key != "launch_barrier":
        raise BadRequest(
            f"{expected} k_steps, use_ps_gpu, {GUARD} or launch_barrier, found {key!r}"
        )
    elif value not in (True, 1):
        raise BadRequest(f"{expected} {key} True, found {value!r}: workers always wait for servers")


class StrategyFactory:
    """Makes a strategy for `fleet.distributed_optimizer`."""

    @staticmethod
    def create_sync_strategy() -> DistributedStrategy:
        strategy = DistributedStrategy()
        strategy.a_sync = False
        return strategy

    @staticmethod
    def create_async_strategy() -> DistributedStrategy:
        strategy = DistributedStrategy()
        strategy.a_sync = True
        return strategy

    @staticmethod
    def create_geo_strategy(update_frequency: int = 100) -> DistributedStrategy:
        """update_frequency: steps between two exchanges. Raises BadRequest: less than 1."""
        check_counts("StrategyFactory", update_frequency=update_frequency)
        strategy = StrategyFactory.create_async_strategy()
        strategy.a_sync_configs = {"k_steps": update_frequency}
        return strategy

    @staticmethod
    def create_half_async_strategy() -> NoReturn:
        raise BadRequest(
            "StrategyFactory.create_half_async_strategy: there are no threads that share a worker's"
            " push; use create_sync_strategy or create_async_strategy"
        )
