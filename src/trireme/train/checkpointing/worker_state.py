"""Where a worker stands between two steps: what a checkpoint holds of it beside the servers' rows,
blocks and streams.
"""

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
from trireme.train.loop.tally import exchange
from trireme.train.optimizer import DistributedOptimizer


@dataclass(frozen=True)
class Moment:
    """num_steps, sequence: of the optimizer. buffers: of the module (BatchNorm and the like), by
    name. random: as of `RandomState.tensors`.
    """

    num_steps: int
    sequence: int
    buffers: dict[str, Tensor]
    random: dict[str, Tensor]

    @classmethod
    def of(cls, optimizer: DistributedOptimizer, random: RandomState) -> Moment:
        """A copy of what is now."""
        buffers = {name: t.detach().clone() for name, t in optimizer.model.named_buffers()}
        return cls(optimizer.num_steps, optimizer.sequence, buffers, random.tensors())


def meet(cluster: Cluster, mine: Moment) -> dict[int, Moment]:
    """Every worker's. Every worker calls it."""
    parts = [_pack(mine.buffers), _pack(mine.random)]
    met = exchange(cluster, [np.array([mine.num_steps, mine.sequence]), *parts], "save")
    return {
        worker: Moment(int(num_steps), int(sequence), _unpack(buffers), _unpack(random))
        for worker, ((num_steps, sequence), buffers, random) in met.items()
    }


def _pack(tensors: Mapping[str, Tensor]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(save_tensors({k: t.contiguous() for k, t in tensors.items()}), np.uint8)


def _unpack(data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> dict[str, Tensor]:
    return load_tensors(data.tobytes())


def stored(moments: Mapping[int, Moment]) -> dict[str, Tensor]:
    """One map for the checkpoint: worker 0's buffers by their names, other workers' where they
    differ from these, and all random numbers.
    """
    common = moments[0].buffers
    tensors = dict(common)
    for worker, moment in moments.items():
        own = {name: t for name, t in moment.buffers.items() if not _same(t, common.get(name))}
        tensors |= {f"{_prefix(worker)}buffer/{name}": t for name, t in own.items()}
        tensors |= {f"{_prefix(worker)}{name}": t for name, t in moment.random.items()}
    return tensors


def _prefix(worker: int) -> str:
    return f"worker {worker}/"  # no name of a buffer has a blank or a slash


def _same(a: Tensor, b: Tensor | None) -> bool:
    """To the bit."""
    if b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def random_of(tensors: Mapping[str, Tensor], worker: int) -> dict[str, Tensor]:
    """A worker's random numbers; none if it was not there or has not been asked."""
    prefix = _prefix(worker)
    named = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    return {name: t for name, t in named.items() if not name.startswith("buffer/")}


def install_buffers(
    tensors: Mapping[str, Tensor],
    model: torch.nn.Module,
    worker: int,
    *,
    where: str,
    match: bool = False,
) -> list[str]:
    """Copy a worker's buffers, where it had none of its own worker 0's, into the model; returns the
    names of those that are not there, or of another shape.

    Raises:
        SchemaMismatch: names or shapes differ, and not `match`. `where` is its subject.
    """
    expected = dict(model.named_buffers())
    found = {name: tensor for name, tensor in tensors.items() if "/" not in name}
    shapes = {name: tensor.shape for name, tensor in found.items()}
    if not match and shapes != {name: tensor.shape for name, tensor in expected.items()}:
        raise SchemaMismatch(
            f"{where}: expected module buffers {sorted(expected)}, found {sorted(found)}"
        )
    kept = []
    for name, target in expected.items():
        own = tensors.get(f"{_prefix(worker)}buffer/{name}", found.get(name))
        if own is not None and own.shape == target.shape:
            target.copy_(own)
        else:
            kept.append(name)
    return kept
