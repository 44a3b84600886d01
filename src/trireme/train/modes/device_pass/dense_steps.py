"""Steps of dense parameters in a worker, with the bits that servers give their blocks: the same
class of optimizer, the same kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from trireme.dense.optimizers import FUSED, arguments_of, as_group, group_values, make
from trireme.torch_compiler import step


class DenseSteps:
    """A twin of the user's optimizer over the same parameters, which itself never steps.

    Attributes:
        twin: has the state; its groups are in the order of the user's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        kernel = {"fused": True} if type(optimizer).__name__ in FUSED else {}
        values = self._values()
        groups = [
            {"params": list(group["params"]), **own}
            for group, own in zip(optimizer.param_groups, values, strict=True)
        ]
        # As servers do: Adagrad starts its state from the argument, not from the group.
        arguments = arguments_of(type(optimizer), values[0])
        self.twin = make(type(optimizer), groups, **arguments, **kernel)

    def step(self) -> None:
        """Step with the values that the user's groups have now; gradients stay."""
        for group, values in zip(self.twin.param_groups, self._values(), strict=True):
            group.update(values)
        step(self.twin)

    def _values(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        return [as_group(group_values(group, self._optimizer.defaults)) for group in groups]
