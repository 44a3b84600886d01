"""Fleet's names for Trireme, for scripts that were written for Paddle's parameter server.

import trireme.fleet as fleet

fleet.init(fleet.PaddleCloudRoleMaker())
...                                     # the model
optimizer = fleet.distributed_optimizer(dense_optimizer, strategy, model=model)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    ...                                 # the loop; optimizer.step() is the push
    fleet.stop_worker()

Names are loaded on first use: a reader script, which a data pipe starts many times, needs
`fleet.MultiSlotDataGenerator` and not torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trireme.dense.adam_d2sum import AdamD2Sum
    from trireme.fleet import metrics, util
    from trireme.fleet.calls import (
        barrier_worker,
        device,
        distributed_optimizer,
        infer_from_dataset,
        init,
        init_server,
        init_worker,
        is_first_worker,
        is_heter_worker,
        is_server,
        is_worker,
        load_inference_model,
        load_model,
        run_server,
        save_inference_model,
        save_persistables,
        server_num,
        shrink,
        sparse_embedding,
        stop_worker,
        train_from_dataset,
        worker_index,
        worker_num,
    )
    from trireme.fleet.dataset import InMemoryDataset, QueueDataset
    from trireme.fleet.distribute_transpiler import (
        DistributeTranspiler,
        memory_optimize,
        release_memory,
    )
    from trireme.fleet.distributed_strategy import DistributedStrategy
    from trireme.fleet.embedding_layers import (
        CountFilterEntry,
        ParamAttr,
        ProbabilityEntry,
        ShowClickEntry,
    )
    from trireme.fleet.generator import MultiSlotDataGenerator, MultiSlotStringDataGenerator
    from trireme.fleet.grad_clip import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue
    from trireme.fleet.metrics import ctr_metric_bundle
    from trireme.fleet.ps_gpu import PSGPU
    from trireme.fleet.role_makers import PaddleCloudRoleMaker, Role, UserDefinedRoleMaker
    from trireme.fleet.transpiler import DistributeTranspilerConfig, HashName, RoundRobin

__all__ = [
    "AdamD2Sum",
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "CountFilterEntry",
    "DistributeTranspiler",
    "DistributeTranspilerConfig",
    "DistributedStrategy",
    "HashName",
    "InMemoryDataset",
    "MultiSlotDataGenerator",
    "MultiSlotStringDataGenerator",
    "PSGPU",
    "PaddleCloudRoleMaker",
    "ParamAttr",
    "ProbabilityEntry",
    "QueueDataset",
    "Role",
    "RoundRobin",
    "ShowClickEntry",
    "UserDefinedRoleMaker",
    "barrier_worker",
    "ctr_metric_bundle",
    "device",
    "distributed_optimizer",
    "infer_from_dataset",
    "init",
    "init_server",
    "init_worker",
    "is_first_worker",
    "is_heter_worker",
    "is_server",
    "is_worker",
    "load_inference_model",
    "load_model",
    "memory_optimize",
    "metrics",
    "release_memory",
    "run_server",
    "save_inference_model",
    "save_persistables",
    "server_num",
    "shrink",
    "sparse_embedding",
    "stop_worker",
    "train_from_dataset",
    "util",
    "worker_index",
    "worker_num",
]

_MODULES = ("metrics", "util")
# Module -> the names that it has; the others are in trireme.fleet.calls.
_HOMES = {
    "dataset": ("InMemoryDataset", "QueueDataset"),
    "distribute_transpiler": ("DistributeTranspiler", "memory_optimize", "release_memory"),
    "distributed_strategy": ("DistributedStrategy",),
    "embedding_layers": ("CountFilterEntry", "ParamAttr", "ProbabilityEntry", "ShowClickEntry"),
    "generator": ("MultiSlotDataGenerator", "MultiSlotStringDataGenerator"),
    "grad_clip": ("ClipGradByGlobalNorm", "ClipGradByNorm", "ClipGradByValue"),
    "metrics": ("ctr_metric_bundle",),
    "ps_gpu": ("PSGPU",),
    "role_makers": ("PaddleCloudRoleMaker", "Role", "UserDefinedRoleMaker"),
    "transpiler": ("DistributeTranspilerConfig", "HashName", "RoundRobin"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'trireme.fleet' has no attribute {name!r}")
    if name in _MODULES:
        return importlib.import_module(f"trireme.fleet.{name}")
    home = next((home for home, names in _HOMES.items() if name in names), "calls")
    value = getattr(importlib.import_module(f"trireme.fleet.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
