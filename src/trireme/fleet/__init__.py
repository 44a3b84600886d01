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
    from trireme.fleet import metrics, util
    from trireme.fleet.calls import (
        barrier_worker,
        distributed_optimizer,
        infer_from_dataset,
        init,
        init_server,
        init_worker,
        is_first_worker,
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
    from trireme.fleet.role_makers import PaddleCloudRoleMaker, Role, UserDefinedRoleMaker
    from trireme.fleet.transpiler import DistributeTranspilerConfig, HashName, RoundRobin
    from trireme.protocol.adam_d2sum import AdamD2Sum

__all__ = [
    "AdamD2Sum",
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "CountFilterEntry",
    "DistributeTranspilerConfig",
    "DistributedStrategy",
    "HashName",
    "InMemoryDataset",
    "MultiSlotDataGenerator",
    "MultiSlotStringDataGenerator",
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
    "distributed_optimizer",
    "infer_from_dataset",
    "init",
    "init_server",
    "init_worker",
    "is_first_worker",
    "is_server",
    "is_worker",
    "load_inference_model",
    "load_model",
    "metrics",
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
# The modules that names are loaded from; others from trireme.fleet.calls.
_HOMES = {
    "ClipGradByGlobalNorm": "grad_clip",
    "ClipGradByNorm": "grad_clip",
    "ClipGradByValue": "grad_clip",
    "CountFilterEntry": "embedding_layers",
    "DistributeTranspilerConfig": "transpiler",
    "DistributedStrategy": "distributed_strategy",
    "HashName": "transpiler",
    "InMemoryDataset": "dataset",
    "MultiSlotDataGenerator": "generator",
    "MultiSlotStringDataGenerator": "generator",
    "PaddleCloudRoleMaker": "role_makers",
    "ParamAttr": "embedding_layers",
    "ProbabilityEntry": "embedding_layers",
    "QueueDataset": "dataset",
    "Role": "role_makers",
    "RoundRobin": "transpiler",
    "ShowClickEntry": "embedding_layers",
    "UserDefinedRoleMaker": "role_makers",
    "ctr_metric_bundle": "metrics",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'trireme.fleet' has no attribute {name!r}")
    home = name if name in _MODULES else _HOMES.get(name, "calls")
    module = importlib.import_module(f"trireme.fleet.{home}")
    globals()[name] = value = module if name in _MODULES else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
