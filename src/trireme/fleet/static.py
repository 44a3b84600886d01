"""paddle.static, as far as scripts of the parameter server use it.

from trireme.fleet import static

exe = static.Executor(static.CPUPlace())
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from trireme.errors import BadRequest, check_choice
from trireme.fleet.absent import refuse
from trireme.fleet.executor import CPUPlace, CUDAPlace, Executor, Scope, global_scope
from trireme.fleet.program import NOT_BUILT, Program, StartupProgram, Variable, programs

__all__ = [
    "CPUPlace",
    "CUDAPlace",
    "Executor",
    "Program",
    "Scope",
    "Variable",
    "data",
    "default_main_program",
    "default_startup_program",
    "global_scope",
    "program_guard",
]

_DTYPES = ("int64", "float32")
_NAMES = {
    "nn": "the layers are those of torch.nn; sparse_embedding is fleet.sparse_embedding or"
    " trireme.nn.EmbeddingBag, sequence_pool its mode",
    "auc": "give fleet.Loss(model, ..., metrics=[trireme.metrics.AUC()])",
    "ctr_metric_bundle": "give fleet.Loss(model, ..., metrics=[fleet.ctr_metric_bundle()])",
    "accuracy": "give fleet.Loss(..., metrics=[...]) metrics of trireme.metrics",
    "ParallelExecutor": "static.Executor runs programs; a worker for each device trains, as"
    " trireme launch --gpus 0,1 starts them",
    "CompiledProgram": "give static.Executor the program itself; torch.compile compiles a model",
    "save_inference_model": "fleet.save_inference_model writes the model for inference",
    "load_inference_model": "fleet.load_inference_model, or trireme.inference.Predictor",
    "save": "fleet.save_persistables writes a checkpoint",
    "load": "fleet.load_model reads a checkpoint",
    "append_backward": "loss.backward(), or minimize(loss)",
    "gradients": "torch.autograd.grad",
    "device_guard": "trireme.Stages has a module for each guard: docs/paddlerec.md",
    "py_func": "call the function in forward",
    "InputSpec": "static.data declares an input",
}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        refuse(f"static.{name}: it has no counterpart here: {_NAMES[name]}")
    raise AttributeError(f"module 'trireme.fleet.static' has no attribute {name!r}")


def data(
    name: str, shape: Sequence[int | None], dtype: str = "float32", lod_level: int = 0
) -> Variable:
    """Declare an input, for a dataset's use_var. An integer is the label of the loss, or else a
    feature of the model; numbers are a dense column of the last dimension.

    Raises BadRequest: a dtype other than "int64" and "float32".
    """
    check_choice("static.data", _DTYPES, dtype=dtype)
    width = [None if size in (None, -1) else size for size in shape]
    return Variable(name, tuple(width), dtype, lod_level)


def default_main_program() -> Program:
    """The program of the last `minimize`. Raises NotReady: there is none."""
    return programs.required("default_main_program")


def default_startup_program() -> StartupProgram:
    """What joins the job with the program of the last `minimize` when it is run."""
    return StartupProgram()


def program_guard(*programs: Any) -> NoReturn:
    raise BadRequest(f"static.program_guard: {NOT_BUILT}")
