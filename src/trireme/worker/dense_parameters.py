"""The dense parameters of a model in a worker: cut into blocks, flattened per server, installed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor, nn

from trireme import accelerator
from trireme.errors import BadRequest
from trireme.protocol.block_spec import BlockSpec, cut
from trireme.protocol.routing import BucketMap, Floats

log = logging.getLogger("trireme.worker")

_PLACES_MAX = 1024  # kept: one per server
_SAMPLES = 16  # of the elements of a piece


@dataclass(frozen=True)
class _Place:
    """Where the blocks of a server lie: no step should pay for each of them again."""

    block_ids: Sequence[str]
    pieces: list[tuple[str, int, int]]  # (parameter, start, size) of adjacent blocks in it
    runs: list[tuple[int, int]]  # (start, size) among the elements of all parameters
    params: list[str]  # that they belong to
    size: int


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
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        self._begin_of = dict(zip(self.parameters, accumulate(sizes, initial=0), strict=False))
        self._places: dict[int, _Place] = {}  # by the identity of a list of blocks
        self._arrays: dict[str, tuple[int, Floats]] = {}  # parameters in memory, by their address
        self._num_writes = self._count_writes()  # of others than this object
        self._has_warned = False
        self._samples: dict[tuple[str, int], Floats] = {}  # of what was installed last, by piece

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

    def blocks_of(self, bucket_map: BucketMap, server: int) -> Sequence[str]:
        """Blocks of this model on a server, in the map's order."""
        block_ids = bucket_map.blocks_of(server)
        own = [block_id for block_id in block_ids if block_id in self._spec_of]
        return block_ids if len(own) == len(block_ids) else own

    def values(self, block_ids: Sequence[str]) -> Floats:
        """The weights of these blocks, flat; a copy."""
        flat = self._flat({name: p.detach() for name, p in self.parameters.items()})
        return self.of_blocks(flat, block_ids)

    def copies(self) -> dict[str, Tensor]:
        """The weights of each parameter as they are now."""
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: parameter.grad for name, parameter in self.parameters.items()}

    def take_gradients(self, *, trained: bool = False) -> dict[str, Tensor | None]:
        """Take the gradient of each parameter away: a push in flight must not see the next one.
        trained: the mode has trained them with these, here.
        """
        gradients: dict[str, Tensor | None] = {}
        for name, parameter in self.parameters.items():
            gradients[name] = None if parameter.grad is None else parameter.grad.detach()
            parameter.grad = None
        if trained:
            self._num_writes = self._count_writes()
        return gradients

    def _count_writes(self) -> dict[str, int]:
        return {name: parameter._version for name, parameter in self.parameters.items()}

    def flat_gradients(self, gradients: Mapping[str, Tensor | None]) -> Floats:
        """The gradients of all parameters, one after the other; zeros where there is none."""
        return self._flat(
            {
                name: torch.zeros_like(self.parameters[name]) if gradient is None else gradient
                for name, gradient in gradients.items()
            }
        )

    def of_blocks(self, flat: Floats, block_ids: Sequence[str]) -> Floats:
        """Those of these blocks, of one number per element of all parameters; a view if they are
        adjacent.
        """
        pieces = [flat[start : start + size] for start, size in self._place_of(block_ids).runs]
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.float32)

    def parameters_of(self, block_ids: Sequence[str]) -> list[str]:
        """The parameters that these blocks belong to."""
        return self._place_of(block_ids).params

    def _flat(self, tensors: Mapping[str, Tensor]) -> Floats:
        on_host = accelerator.to_host([tensors[name].reshape(-1) for name in self.parameters])
        return torch.cat(on_host).numpy() if on_host else np.empty(0, dtype=np.float32)

    def _place_of(self, block_ids: Sequence[str]) -> _Place:
        place = self._places.get(id(block_ids))
        if place is None or place.block_ids is not block_ids:
            if len(self._places) >= _PLACES_MAX:
                self._places.clear()
            place = self._places[id(block_ids)] = self._placed(block_ids)
        return place

    def _placed(self, block_ids: Sequence[str]) -> _Place:
        specs = self.specs_of(block_ids)
        by_param = groupby(specs, lambda spec: spec.param)
        return _Place(
            block_ids,
            pieces=[
                (param, *part)
                for param, own in by_param
                for part in _joined((spec.start, spec.size) for spec in own)
            ],
            runs=_joined((self._begin_of[spec.param] + spec.start, spec.size) for spec in specs),
            params=list(dict.fromkeys(spec.param for spec in specs)),
            size=sum(spec.size for spec in specs),
        )

    def install(self, block_ids: Sequence[str], values: Floats) -> None:
        """Write flat weights back into the parameters."""
        place, begin = self._place_of(block_ids), 0
        if len(values) != place.size:
            raise BadRequest(f"blocks: expected {place.size} elements, found {len(values)}")
        self._warn_of_writes(place)
        for name, start, size in place.pieces:
            part, array = values[begin : begin + size], self._array_of(name)
            self._samples[name, start] = part[:: -(-size // _SAMPLES)].copy()
            if array is not None:
                array[start : start + size] = part
            else:
                target = self.parameters[name].data.view(-1)[start : start + size]
                target.copy_(torch.from_numpy(part.copy()))
            begin += size

    def _warn_of_writes(self, place: _Place) -> None:
        """Warn, once, of weights that are about to be lost. `install` itself is not counted, nor
        is who puts back what it has installed, as after an evaluation with averaged weights.
        """
        written = [n for n in place.params if self.parameters[n]._version != self._num_writes[n]]
        if written and not self._has_warned:
            pieces = [piece for piece in place.pieces if piece[0] in written]
            self._num_writes |= {name: self.parameters[name]._version for name in written}
            written = list(dict.fromkeys(piece[0] for piece in pieces if self._has_changed(*piece)))
        if written and not self._has_warned:
            self._has_warned = True
            log.warning(
                "weights of %s were set in this process, and are lost: the servers' replace"
                " them. Set those that training shall begin with before the DistributedOptimizer or"
                " Trainer is made (in a script of Fleet before exe.run of the startup program); a"
                " checkpoint is loaded by load",
                ", ".join(written),
            )

    def _has_changed(self, name: str, start: int, size: int) -> bool:
        """Whether samples of a piece differ from what was installed there."""
        now = self.parameters[name].data.view(-1)[start : start + size : -(-size // _SAMPLES)]
        before = self._samples.get((name, start))
        return before is None or not np.array_equal(before, now.cpu().numpy())

    def _array_of(self, name: str) -> Floats | None:
        """The parameter as it lies in memory; None: it is on a device. Through NumPy, for torch
        would warn that the memory of a received message is read-only.
        """
        parameter = self.parameters[name]
        address, array = self._arrays.get(name, (0, None))
        if array is not None and address == parameter.data_ptr():
            return array
        if parameter.device != accelerator.HOST:
            self._arrays.pop(name, None)
            return None
        array = parameter.data.view(-1).numpy()
        self._arrays[name] = parameter.data_ptr(), array
        return array


def _joined(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Parts, (start, size), with neighbours that are adjacent as one."""
    joined: list[tuple[int, int]] = []
    for start, size in parts:
        if joined and sum(joined[-1]) == start:
            before = joined.pop()
            start, size = before[0], before[1] + size
        joined.append((start, size))
    return joined
