"""The names of `paddle` itself that a script of the parameter server begins and ends with.

    import trireme.fleet.paddle as paddle           # was: import paddle
    import trireme.fleet as fleet                   # was: import paddle.distributed.fleet as fleet

The network, and the optimizer of its dense part, are torch's: other names of paddle are refused
with what to write.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from trireme import fleet
from trireme.fleet import distribute_transpiler, static, transpiler
from trireme.fleet.absent import refuse
from trireme.fleet.calls import job
from trireme.fleet.dataset import DatasetFactory, InMemoryDataset, QueueDataset
from trireme.fleet.embedding_layers import (
    CountFilterEntry,
    ParamAttr,
    ProbabilityEntry,
    ShowClickEntry,
)
from trireme.fleet.executor import CPUPlace, CUDAPlace
from trireme.fleet.ps_gpu import PSGPU
from trireme.fleet.role_makers import PaddleCloudRoleMaker

__all__ = [
    "CPUPlace",
    "CUDAPlace",
    "ParamAttr",
    "distributed",
    "enable_static",
    "fluid",
    "static",
    "to_tensor",
]

_TENSORS = "tensors are torch's: torch."
_NAMES = {
    "CompiledProgram": "give static.Executor the program itself; torch.compile compiles a model",
    "DataFeeder": "exe.run(program, feed={name: array}) takes columns as they are",
    "DataParallel": "trireme launch --gpus 0,1 starts a worker per device; leave the wrapper out",
    "Model": "trireme.Trainer(model, optimizer, loss=) has fit, evaluate and predict",
    "ParallelEnv": "fleet.worker_index(), fleet.worker_num()",
    "Program": "minimize(fleet.Loss(model, ...)) makes it of a torch.nn.Module",
    "add_n": f"{_TENSORS}stack(tensors).sum(0)",
    "all_reduce": "fleet.util.all_reduce",
    "base": "paddle.fluid has its names: DatasetFactory, Executor",
    "cast": "tensors are torch's: tensor.to(torch.float32)",
    "concat": f"{_TENSORS}cat",
    "create_parameter": "torch.nn.Parameter(torch.empty(shape)) in the module that uses it",
    "device_guard": "trireme.Stages has a module for each guard: docs/paddlerec.md",
    "divide": f"{_TENSORS}div",
    "embedding": "fleet.sparse_embedding, or trireme.nn.EmbeddingBag",
    "framework": "paddle.fluid.core.PSGPU() is that of paddle.framework.core",
    "gather": f"{_TENSORS}index_select(x, 0, index) picks rows, as paddle.gather does",
    "get_device": "fleet.device('gpu') or fleet.device('cpu') is that of this worker",
    "grad": "torch.autograd.grad",
    "in_dynamic_mode": "leave it out: torch runs eagerly",
    "init_parallel_env": "fleet.init(is_collective=True), then fleet.init_worker()",
    "is_compiled_with_cuda": "fleet.device('gpu') refuses where there is none",
    "jit": "fleet.save_inference_model exports a model",
    "load": "fleet.load_model(FOLDER) loads a checkpoint; torch.load a file of torch's",
    "metric": "trireme.metrics has the metrics: trireme.metrics.AUC()",
    "regularizer": "weight_decay of torch.optim, for the dense part; tables: docs/optimizers.md",
    "save": "fleet.save_persistables(dirname=FOLDER) saves tables and dense part together",
    "seed": "torch.manual_seed draws dense weights, trireme.Table(seed=) those of rows",
    "set_device": "model.to(fleet.device('gpu')) moves the model; the CPU needs no call",
    "shape": "tensors are torch's: tensor.shape",
    "slice": "tensors are torch's: tensor[:, 1:3]",
    "spawn": "trireme launch starts the processes",
    "split": f"{_TENSORS}tensor_split(x, number), or torch.split(x, sizes)",
    "transpiler": "split_method is fleet.RoundRobin, HashName or a function: docs/optimizers.md",
    "transpose": f"{_TENSORS}permute takes the dimensions, as paddle.transpose does",
    "tensor": "torch.Tensor, and the functions of torch",
    "nn": "torch.nn has the layers",
    "optimizer": "torch.optim has the optimizers of the dense part, trireme.optim those of tables",
    "initializer": "trireme.initializer has those of rows, torch.nn.init those of the dense part",
    "io": "data: torch.utils.data, trireme.data; models: fleet.save_persistables, load_model",
    "launch": "the command trireme launch, also as fleetrun",
    "disable_static": "leave it out: torch runs eagerly",
    "ParallelExecutor": "static.Executor; trireme launch --gpus 0,1 starts a worker per device",
    "layers": "torch.nn has the layers; embedding(is_distributed=True) is fleet.sparse_embedding",
}


def __getattr__(name: str) -> Any:
    return _absent("paddle", name)


def _absent(module: str, name: str) -> NoReturn:
    if name in _NAMES:
        refuse(f"{module}.{name}: it has no counterpart here: {_NAMES[name]}")
    if module == "paddle" and not name.startswith("_") and hasattr(torch, name):
        refuse(f"paddle.{name}: it has no counterpart here: {_TENSORS}{name}")
    raise AttributeError(f"{module} of trireme.fleet has no attribute {name!r}")


class _Names:
    """A module of paddle within this one."""

    def __init__(self, name: str, **values: Any) -> None:
        self.__dict__.update(values)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return _absent(self.__dict__["_name"], name)


def enable_static() -> None:
    """Does nothing: a torch model runs as it is, and minimize(fleet.Loss(...)) makes a program."""


def to_tensor(data: Any) -> Tensor:
    """A tensor of numbers, as reader classes make of what they yield."""
    return torch.as_tensor(data)


def get_rank() -> int:
    """fleet.worker_index(), or before fleet.init() the index that the environment states."""
    return job.worker_index() if job.has_role else PaddleCloudRoleMaker().role.index


def get_world_size() -> int:
    """fleet.worker_num(), or before fleet.init() the number that the environment states."""
    return job.worker_num() if job.has_role else PaddleCloudRoleMaker().role.num_workers


distributed = _Names(
    "paddle.distributed",
    fleet=fleet,
    get_rank=get_rank,
    get_world_size=get_world_size,
    barrier=fleet.barrier_worker,
    InMemoryDataset=InMemoryDataset,
    QueueDataset=QueueDataset,
    CountFilterEntry=CountFilterEntry,
    ProbabilityEntry=ProbabilityEntry,
    ShowClickEntry=ShowClickEntry,
)
fluid = _Names(
    "paddle.fluid",
    core=_Names("paddle.fluid.core", PSGPU=PSGPU, CPUPlace=CPUPlace, CUDAPlace=CUDAPlace),
    CPUPlace=CPUPlace,
    CUDAPlace=CUDAPlace,
    DatasetFactory=DatasetFactory,
    DistributeTranspiler=distribute_transpiler.DistributeTranspiler,
    DistributeTranspilerConfig=transpiler.DistributeTranspilerConfig,
    Executor=static.Executor,
    ParamAttr=ParamAttr,
    contrib=_Names("paddle.fluid.contrib", sparse_embedding=fleet.sparse_embedding),
    data=static.data,
    default_main_program=static.default_main_program,
    default_startup_program=static.default_startup_program,
    global_scope=static.global_scope,
    memory_optimize=distribute_transpiler.memory_optimize,
    release_memory=distribute_transpiler.release_memory,
)
