"""Dense parameters that an optimizer in the worker steps, and the servers' blocks of them, through
which they are saved, loaded, exported and imported.
"""

import numpy as np
import torch
from torch import Tensor

from trireme.dense.optimizers import begin_state, needs_whole, shapes_made
from trireme.interchange.worker_side.dense_blocks import SCALARS, read_blocks, write_blocks
from trireme.protocol.block_messages import BlockTensors
from trireme.worker.client import WorkerClient
from trireme.worker.dense_parameters import DenseParameters


class WorkerTrainedDense:
    """Brings them to the blocks and back. One thread uses it at a time, with no push on its way."""

    def __init__(
        self, client: WorkerClient, dense: DenseParameters, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._client, self._dense, self._optimizer = client, dense, optimizer

    def publish(self, *, weights: bool) -> None:
        """Write this worker's optimizer state, and its weights if asked, into the blocks."""
        if blocks := self.blocks(weights=weights):
            write_blocks(self._client, blocks)

    def blocks(self, *, weights: bool) -> BlockTensors:
        """This worker's optimizer state, and its weights if asked, as tensors of the blocks."""
        tensors = {name: self._state_of(p) for name, p in self._dense.parameters.items()}
        if weights:
            for name, parameter in self._dense.parameters.items():
                tensors[name]["weights"] = _flat(parameter)
        blocks: BlockTensors = {}
        for spec in self._dense.specs:
            part = {
                name: values if name in SCALARS else values[spec.start : spec.start + spec.size]
                for name, values in tensors[spec.param].items()
            }
            if part:
                blocks[spec.id] = part
        return blocks

    def _state_of(self, parameter: Tensor) -> dict[str, np.ndarray]:
        state = {} if self._optimizer is None else self._optimizer.state.get(parameter, {})
        return {name: _flat(value) for name, value in state.items() if value is not None}

    def adopt(self) -> None:
        """Read weights and optimizer state from the blocks."""
        if not len(self._dense):
            return
        _, blocks = read_blocks(self._client)
        with torch.no_grad():
            for name, parameter in self._dense.parameters.items():
                specs = [spec for spec in self._dense.specs if spec.param == name]
                if not specs:  # a parameter without elements
                    continue
                tensors = _joined(blocks, [spec.id for spec in specs])
                parameter.data.copy_(tensors.pop("weights").view_as(parameter))
                if self._optimizer is not None:
                    _adopt_state(self._optimizer, specs[0].group, parameter, tensors)


def _adopt_state(
    optimizer: torch.optim.Optimizer, group: int, parameter: Tensor, flat: dict[str, Tensor]
) -> None:
    # Only optimizers of whole parameters have state of other shapes than scalars and the parameter.
    shapes = shapes_made(optimizer, group, parameter.shape) if needs_whole(optimizer) else {}
    state = {
        name: values.reshape(())
        if name in SCALARS
        else values.reshape(shapes.get(name, parameter.shape)).to(parameter.device)
        for name, values in flat.items()
    }
    if state:
        optimizer.state[parameter] = state
    else:
        begin_state(optimizer, group, parameter)


def _flat(value: object) -> np.ndarray:
    return torch.as_tensor(value).detach().reshape(-1).float().cpu().numpy()


def _joined(blocks: BlockTensors, block_ids: list[str]) -> dict[str, Tensor]:
    """The tensors of one parameter, flat; a scalar is taken from the first block."""
    parts = [blocks[block_id] for block_id in block_ids]
    joined = {}
    for name in parts[0]:
        values = [part[name].reshape(-1) for part in parts]
        joined[name] = torch.tensor(values[0] if name in SCALARS else np.concatenate(values))
    return joined
