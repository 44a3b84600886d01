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
from trireme.errors import BadRequest
from trireme.fleet import distribute_transpiler, static, transpiler
from trireme.fleet.dataset import DatasetFactory, InMemoryDataset, QueueDataset
from trireme.fleet.embedding_layers import (
    CountFilterEntry,
    ParamAttr,
    ProbabilityEntry,
    ShowClickEntry,
)
from trireme.fleet.executor import CPUPlace, CUDAPlace
from trireme.fleet.ps_gpu import PSGPU

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

_NAMES = {
    "nn": "torch.nn has the layers",
    "optimizer": "torch.optim has the optimizers of the dense part, trireme.optim those of tables",
    "io": "torch.utils.data, or the datasets of trireme.data",
    "disable_static": "leave it out: torch runs eagerly",
    "ParallelExecutor": "static.Executor; trireme launch --gpus 0,1 starts a worker per device",
    "layers": "torch.nn has the layers; embedding(is_distributed=True) is fleet.sparse_embedding",
}


def __getattr__(name: str) -> Any:
    return _absent("paddle", name)


def _absent(module: str, name: str) -> NoReturn:
    if name in _NAMES:
        raise BadRequest(f"{module}.{name}: it has no counterpart here: {_NAMES[name]}")
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


distributed = _Names(
    "paddle.distributed",
    fleet=fleet,
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
