"""Fleet's names over Trireme: for scripts that were written for Paddle's parameter server.

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

Names are loaded on first use: a reader script, which a data pipe starts again and again, wants
`fleet.MultiSlotDataGenerator` and not torch.
"""

from __future__ import annotations

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
# Where names come from that do not come from trireme.fleet.calls.
_HOMES = {
    "AdamD2Sum": "trireme.protocol.adam_d2sum",
    "ClipGradByGlobalNorm": "trireme.fleet.grad_clip",
    "ClipGradByNorm": "trireme.fleet.grad_clip",
    "ClipGradByValue": "trireme.fleet.grad_clip",
    "CountFilterEntry": "trireme.fleet.embedding_layers",
    "DistributeTranspilerConfig": "trireme.fleet.transpiler",
    "DistributedStrategy": "trireme.fleet.distributed_strategy",
    "HashName": "trireme.fleet.transpiler",
    "InMemoryDataset": "trireme.fleet.dataset",
    "MultiSlotDataGenerator": "trireme.fleet.generator",
    "MultiSlotStringDataGenerator": "trireme.fleet.generator",
    "PaddleCloudRoleMaker": "trireme.fleet.role_makers",
    "ParamAttr": "trireme.fleet.embedding_layers",
    "QueueDataset": "trireme.fleet.dataset",
    "ProbabilityEntry": "trireme.fleet.embedding_layers",
    "Role": "trireme.fleet.role_makers",
    "RoundRobin": "trireme.fleet.transpiler",
    "ShowClickEntry": "trireme.fleet.embedding_layers",
    "UserDefinedRoleMaker": "trireme.fleet.role_makers",
    "ctr_metric_bundle": "trireme.fleet.metrics",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'trireme.fleet' has no attribute {name!r}")
    if name in _MODULES:
        value: Any = importlib.import_module(f"trireme.fleet.{name}")
    else:
        home = _HOMES.get(name, "trireme.fleet.calls")
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
