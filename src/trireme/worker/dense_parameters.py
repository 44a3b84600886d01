"""The dense parameters of a model in a worker: cut into blocks, flattened per server, installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from trireme import accelerator
from trireme.errors import BadRequest
from trireme.protocol.block_spec import BlockSpec, cut
from trireme.protocol.routing import BucketMap, Floats


class DenseParameters:
    """Named parameters, each with the index of its param group.

    Args:
        parameters: name -> (parameter, group index), in the model's order.
        block_elements: elements per block; None: parameters are not cut.
        shaped: blocks are whole parameters and have their shapes.

    Raises:
        BadRequest: a parameter is not float32 or not contiguous.
    """

    def __init__(
        self,
        parameters: Mapping[str, tuple[Tensor, int]],
        block_elements: int | None,
        *,
        shaped: bool = False,
    ) -> None:
        self.parameters = {name: parameter for name, (parameter, _) in parameters.items()}
        self._block_elements, self._is_shaped = block_elements, shaped
        self.specs: list[BlockSpec] = []
        for name, (parameter, group) in parameters.items():
            if parameter.dtype != torch.float32 or not parameter.is_contiguous():
                raise BadRequest(
                    f"DistributedOptimizer: expected contiguous float32 parameters, found {name}"
                    f" of {parameter.dtype}, stride {parameter.stride()}"
                )
            specs = cut(name, parameter.numel(), group, block_elements)
            if shaped:
                specs = [replace(spec, shape=tuple(parameter.shape) or (1,)) for spec in specs]
            self.specs += specs
        self._spec_of = {spec.id: spec for spec in self.specs}

    def of_copy(self, model: nn.Module) -> DenseParameters:
        """The parameters of the same names, in the same groups, of a copy of the model."""
        copied = dict(model.named_parameters())
        group_of = {spec.param: spec.group for spec in self.specs}
        parameters = {name: (copied[name], group_of[name]) for name in self.parameters}
        return DenseParameters(parameters, self._block_elements, shaped=self._is_shaped)

    def __len__(self) -> int:
        return len(self.specs)

    def specs_of(self, block_ids: Sequence[str]) -> list[BlockSpec]:
        return [self._spec_of[block_id] for block_id in block_ids]

    def blocks_of(self, bucket_map: BucketMap, server: int) -> list[str]:
        """Blocks of this model on a server, in the map's order."""
        return [block_id for block_id in bucket_map.blocks_of(server) if block_id in self._spec_of]

    def values(self, block_ids: Sequence[str]) -> Floats:
        """The weights of these blocks, flat; a copy."""
        return self._flat({name: p.detach() for name, p in self.parameters.items()}, block_ids)

    def copies(self) -> dict[str, Tensor]:
        """The weights of each parameter as they are now."""
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: parameter.grad for name, parameter in self.parameters.items()}

    def take_gradients(self) -> dict[str, Tensor | None]:
        """Take the gradient of each parameter away: a push in flight must not see the next one."""
        gradients: dict[str, Tensor | None] = {}
        for name, parameter in self.parameters.items():
            gradients[name] = None if parameter.grad is None else parameter.grad.detach()
            parameter.grad = None
        return gradients

    def flat_gradients(
        self, gradients: Mapping[str, Tensor | None], block_ids: Sequence[str]
    ) -> tuple[Floats, list[str]]:
        """The flat gradients of these blocks, zeros if absent; and the parameters without one."""
        params = dict.fromkeys(self._spec_of[block_id].param for block_id in block_ids)
        absent = [name for name in params if gradients[name] is None]
        filled = {
            name: torch.zeros_like(self.parameters[name]) if gradient is None else gradient
            for name, gradient in gradients.items()
        }
        return self._flat(filled, block_ids), absent

    def _flat(self, tensors: Mapping[str, Tensor], block_ids: Sequence[str]) -> Floats:
        on_host = accelerator.to_host([tensor.reshape(-1) for tensor in tensors.values()])
        flat = {name: tensor.numpy() for name, tensor in zip(tensors, on_host, strict=True)}
        pieces = [
            flat[spec.param][spec.start : spec.start + spec.size]
            for spec in self.specs_of(block_ids)
        ]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.float32)

    def install(self, block_ids: Sequence[str], values: Floats) -> None:
        """Write flat weights back into the parameters."""
        specs = self.specs_of(block_ids)
        expected = sum(spec.size for spec in specs)
        if len(values) != expected:
            raise BadRequest(f"blocks: expected {expected} elements, found {len(values)}")
        targets = {name: p.data.view(-1) for name, p in self.parameters.items()}
        # Through NumPy: torch would warn that the memory of a received message is read-only.
        on_cpu = {name: t.numpy() for name, t in targets.items() if t.device == accelerator.HOST}
        start = 0
        for spec in specs:
            piece = values[start : start + spec.size]
            if spec.param in on_cpu:
                on_cpu[spec.param][spec.start : spec.start + spec.size] = piece
            else:
                part = targets[spec.param][spec.start : spec.start + spec.size]
                part.copy_(torch.from_numpy(piece.copy()))
            start += spec.size
