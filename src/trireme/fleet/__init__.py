"""Fleet's names for Trireme, for scripts that were written for Paddle's parameter server.

import trireme.fleet as fleet

fleet.init(fleet.PaddleCloudRoleMaker())
...                                     # the model
optimizer = fleet.distributed_optimizer(dense_optimizer, strategy)
optimizer.minimize(fleet.Loss(model, loss_function, label="click"))
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

from typing import TYPE_CHECKING, Any

from trireme.lazy_names import lazy_names

if TYPE_CHECKING:
    from trireme.dense.adam_d2sum import AdamD2Sum
    from trireme.fleet import data_generator, dataset, metrics, paddle, static, util
    from trireme.fleet import role_makers as role_maker
    from trireme.fleet.calls import (
        barrier_worker,
        clear_grad,
        device,
        distributed_model,
        distributed_optimizer,
        get_log_level_code,
        get_log_level_name,
        get_lr,
        infer_from_dataset,
        init,
        init_server,
        init_worker,
        is_first_worker,
        is_heter_worker,
        is_server,
        is_worker,
        minimize,
        run_server,
        server_num,
        set_log_level,
        set_lr,
        set_state_dict,
        shrink,
        sparse_embedding,
        state_dict,
        step,
        stop_worker,
        train_from_dataset,
        worker_index,
        worker_num,
    )
    from trireme.fleet.calls import worker_index as rank
    from trireme.fleet.calls import worker_num as nranks
    from trireme.fleet.calls import worker_num as world_size
    from trireme.fleet.data_generator import MultiSlotDataGenerator, MultiSlotStringDataGenerator
    from trireme.fleet.dataset import DatasetFactory, InMemoryDataset, QueueDataset
    from trireme.fleet.distribute_transpiler import (
        DistributeTranspiler,
        memory_optimize,
        release_memory,
    )
    from trireme.fleet.distributed_strategy import DistributedStrategy, StrategyFactory
    from trireme.fleet.embedding_layers import (
        CountFilterEntry,
        ParamAttr,
        ProbabilityEntry,
        ShowClickEntry,
    )
    from trireme.fleet.executor import CPUPlace, CUDAPlace, Executor
    from trireme.fleet.fleet_optimizer import FleetOptimizer
    from trireme.fleet.grad_clip import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue
    from trireme.fleet.members import (
        is_coordinator,
        local_rank,
        node_num,
        server_endpoints,
        server_index,
        worker_endpoints,
    )
    from trireme.fleet.members import local_rank as rank_in_node
    from trireme.fleet.metrics import ctr_metric_bundle
    from trireme.fleet.parts import load_one_table, save_dense_params, save_one_table, set_date
    from trireme.fleet.program import Loss, Program
    from trireme.fleet.ps_gpu import PSGPU
    from trireme.fleet.role_makers import PaddleCloudRoleMaker, Role, UserDefinedRoleMaker
    from trireme.fleet.saving import (
        load_inference_model,
        load_model,
        save,
        save_inference_model,
        save_persistables,
    )
    from trireme.fleet.transpiler import DistributeTranspilerConfig, HashName, RoundRobin
    from trireme.fleet.util import all_reduce

__all__ = [
    "AdamD2Sum",
    "CPUPlace",
    "CUDAPlace",
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "CountFilterEntry",
    "DatasetFactory",
    "DistributeTranspiler",
    "DistributeTranspilerConfig",
    "DistributedStrategy",
    "Executor",
    "FleetOptimizer",
    "HashName",
    "InMemoryDataset",
    "Loss",
    "MultiSlotDataGenerator",
    "MultiSlotStringDataGenerator",
    "PSGPU",
    "PaddleCloudRoleMaker",
    "ParamAttr",
    "ProbabilityEntry",
    "Program",
    "QueueDataset",
    "Role",
    "RoundRobin",
    "ShowClickEntry",
    "StrategyFactory",
    "UserDefinedRoleMaker",
    "all_reduce",
    "barrier_worker",
    "clear_grad",
    "ctr_metric_bundle",
    "data_generator",
    "dataset",
    "device",
    "distributed_model",
    "distributed_optimizer",
    "get_log_level_code",
    "get_log_level_name",
    "get_lr",
    "infer_from_dataset",
    "init",
    "init_server",
    "init_worker",
    "is_coordinator",
    "is_first_worker",
    "is_heter_worker",
    "is_server",
    "is_worker",
    "load_inference_model",
    "load_model",
    "load_one_table",
    "local_rank",
    "memory_optimize",
    "metrics",
    "minimize",
    "node_num",
    "nranks",
    "paddle",
    "rank",
    "rank_in_node",
    "release_memory",
    "role_maker",
    "run_server",
    "save",
    "save_dense_params",
    "save_inference_model",
    "save_one_table",
    "save_persistables",
    "server_endpoints",
    "server_index",
    "server_num",
    "set_date",
    "set_log_level",
    "set_lr",
    "set_state_dict",
    "shrink",
    "sparse_embedding",
    "state_dict",
    "static",
    "step",
    "stop_worker",
    "train_from_dataset",
    "util",
    "worker_endpoints",
    "worker_index",
    "worker_num",
    "world_size",
]

_lazy, __dir__ = lazy_names(__name__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        from trireme.fleet.absent import check_absent

        check_absent(name)
    return _lazy(name)
