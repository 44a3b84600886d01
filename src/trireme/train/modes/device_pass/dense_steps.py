"""Steps of dense parameters in a worker, with the bits that servers give their blocks: the same
class of optimizer, the same kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trireme.dense.optimizers import (
    FUSED,
    GroupValues,
    arguments_of,
    as_group,
    group_values,
    make,
    step_fused,
)


class DenseSteps:
    """A twin of the user's optimizer over the same parameters, which itself never steps.

    Attributes:
        twin: has the state; its groups are in the order of the user's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        kernel = {"fused": True} if type(optimizer).__name__ in FUSED else {}
        values = [as_group(one) for one in self.values()]
        groups = [
            {"params": list(group["params"]), **own}
            for group, own in zip(optimizer.param_groups, values, strict=True)
        ]
        # As servers do: Adagrad starts its state from the argument, not from the group.
        arguments = arguments_of(type(optimizer), values[0])
        self.twin = make(type(optimizer), groups, **arguments, **kernel)

    def step(self, values: Sequence[GroupValues] | None = None) -> None:
        """Step with these values of the groups, default those that the user's have now; gradients
        stay.
        """
        own = self.values() if values is None else values
        for group, one in zip(self.twin.param_groups, own, strict=True):
            group.update(as_group(one))
        step_fused(self.twin)

    def values(self) -> list[GroupValues]:
        """The values of the user's groups, as a push has them."""
        groups = self._optimizer.param_groups
        return [group_values(group, self._optimizer.defaults) for group in groups]
