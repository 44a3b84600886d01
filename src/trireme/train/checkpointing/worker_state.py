"""What a checkpoint holds of each worker: its steps, module buffers and random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from trireme.errors import SchemaMismatch
from trireme.job.cluster import Cluster
from trireme.train.checkpointing.random_state import RandomState
from trireme.train.gather_arrays import gather_arrays
from trireme.train.optimizer import DistributedOptimizer


@dataclass(frozen=True)
class WorkerState:
    """What a checkpoint holds of one worker."""

    num_steps: int
    sequence: int
    buffers: dict[str, Tensor]  # of the module (BatchNorm and the like), by name
    random: dict[str, Tensor]  # see `RandomState.tensors`

    @classmethod
    def current(cls, optimizer: DistributedOptimizer, random: RandomState) -> WorkerState:
        """A copy of the present state."""
        buffers = {name: t.detach().clone() for name, t in optimizer.model.named_buffers()}
        return cls(optimizer.num_steps, optimizer.sequence, buffers, random.tensors())


def gather_states(cluster: Cluster, own: WorkerState) -> dict[int, WorkerState]:
    """The states of all workers, by worker. Every worker calls it."""
    arrays = [np.array([own.num_steps, own.sequence]), _pack(own.buffers), _pack(own.random)]
    states = {}
    for worker, (counts, *packed) in gather_arrays(cluster, arrays, "save").items():
        buffers, random = (load_tensors(data.tobytes()) for data in packed)
        states[worker] = WorkerState(int(counts[0]), int(counts[1]), buffers, random)
    return states


def _pack(tensors: Mapping[str, Tensor]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(save_tensors({k: t.contiguous() for k, t in tensors.items()}), np.uint8)


def checkpoint_tensors(states: Mapping[int, WorkerState]) -> dict[str, Tensor]:
    """All tensors of the states by their names in a checkpoint: worker 0's buffers by their own
    names, other workers' buffers where they differ from those, and all random numbers.
    """
    common = states[0].buffers
    tensors = dict(common)
    for worker, state in states.items():
        differing = {n: t for n, t in state.buffers.items() if not _same_bits(t, common.get(n))}
        tensors |= {f"{_prefix(worker)}buffer/{name}": t for name, t in differing.items()}
        tensors |= {f"{_prefix(worker)}{name}": t for name, t in state.random.items()}
    return tensors


def _prefix(worker: int) -> str:
    return f"worker {worker}/"  # no name of a buffer has a blank or a slash


def _same_bits(a: Tensor, b: Tensor | None) -> bool:
    if b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def random_state_of(tensors: Mapping[str, Tensor], worker: int) -> dict[str, Tensor]:
    """The random numbers of a worker; empty if the checkpoint has none of it."""
    prefix = _prefix(worker)
    named = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    return {name: t for name, t in named.items() if not name.startswith("buffer/")}


def check_buffers(tensors: Mapping[str, Tensor], model: torch.nn.Module, where: str) -> None:
    """Raises SchemaMismatch, with the subject `where`: a checkpoint's buffers have other names or
    shapes.
    """
    expected = dict(model.named_buffers())
    common = _common(tensors)
    shapes = {name: tensor.shape for name, tensor in common.items()}
    if shapes != {name: tensor.shape for name, tensor in expected.items()}:
        raise SchemaMismatch(
            f"{where}: expected module buffers {sorted(expected)}, found {sorted(common)}"
        )


def _common(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Worker 0's buffers."""
    return {name: tensor for name, tensor in tensors.items() if "/" not in name}


def install_buffers(
    tensors: Mapping[str, Tensor],
    model: torch.nn.Module,
    worker: int,
    *,
    where: str,
    match: bool = False,
) -> list[str]:
    """Copy a worker's buffers into the model; worker 0's where the worker has none of its own.
    Returns the names of buffers that are missing or have another shape; they keep their values.
    Raises SchemaMismatch, with the subject `where`: names or shapes differ, and not `match`.
    """
    if not match:
        check_buffers(tensors, model, where)
    kept, common = [], _common(tensors)
    for name, target in model.named_buffers():
        own = tensors.get(f"{_prefix(worker)}buffer/{name}", common.get(name))
        if own is not None and own.shape == target.shape:
            target.copy_(own)
        else:
            kept.append(name)
    return kept
