"""What `fleet.distributed_optimizer` returns where it does not know the model yet.

`minimize(loss)` of a Loss makes the program that an executor trains. In a loop of the script's own,
`fleet.distributed_model(model)` says the model, and `step()` is the push.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trireme.errors import BadRequest, NotReady, check_numbers, check_values
from trireme.fleet.program import Loss
from trireme.train import DistributedOptimizer


class FleetOptimizer:
    """An optimizer with a strategy, under the names of Paddle's optimizers.

    Attributes:
        user_defined_optimizer: the torch optimizer that it was made with.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        begin: Callable[[Loss], None],
        bind: Callable[[nn.Module], DistributedOptimizer],
        of_program: Callable[[], DistributedOptimizer | None],
    ) -> None:
        self.user_defined_optimizer = optimizer
        self._begin, self._bind, self._of_program = begin, bind, of_program
        self._bound: DistributedOptimizer | None = None

    def minimize(
        self,
        loss: Loss | torch.Tensor,
        startup_program: None = None,
        parameter_list: None = None,
        no_grad_set: None = None,
    ) -> None:
        """Of a Loss: make it the program that an executor trains. Of a tensor, after its
        `backward()`: make a step.
        """
        for name, value in (
            ("startup_program", startup_program),
            ("parameter_list", parameter_list),
            ("no_grad_set", no_grad_set),
        ):
            if value is not None:
                raise BadRequest(
                    f"minimize: expected {name}=None, found {type(value).__name__}: the optimizer"
                    " trains the parameters that it was made with"
                )
        if isinstance(loss, Loss):
            self._begin(loss)
        elif isinstance(loss, torch.Tensor):
            self.step()
        else:
            raise BadRequest(
                "minimize: expected fleet.Loss(model, function, label=...), or a tensor after its"
                f" backward(), found {type(loss).__name__}"
            )

    def bind(self, model: nn.Module) -> None:
        """Train this model in a loop of the script's own."""
        if self._bound is None:
            self._bound = self._bind(model)

    @property
    def distributed(self) -> DistributedOptimizer:
        """The torch optimizer that pushes, for schedulers and Trainers. Raises NotReady: the model
        is not known.
        """
        optimizer = self._bound or self._of_program()
        if optimizer is None:
            raise NotReady(
                "fleet.distributed_optimizer: expected to know the model: call"
                " fleet.distributed_model(model), minimize(fleet.Loss(model, ...)), or give"
                " distributed_optimizer model="
            )
        return optimizer

    @property
    def param_groups(self) -> Any:
        raise BadRequest(
            "fleet.distributed_optimizer: expected the optimizer that knows its model: give a"
            " scheduler or a Trainer its attribute `distributed`, or distributed_optimizer model="
        )

    def step(self) -> None:
        """Push the gradients of the last backward. Raises BadRequest: there was none."""
        optimizer = self.distributed
        if not any(
            parameter.grad is not None
            for group in optimizer.param_groups
            for parameter in group["params"]
        ):
            raise BadRequest("step: expected gradients, found none: call loss.backward() before")
        optimizer.step()

    def clear_grad(self) -> None:
        self.distributed.zero_grad()

    def set_lr(self, value: float) -> None:
        """Set the learning rate of the dense parameters; a table's is a group of `distributed`.
        Raises BadRequest: no number >= 0.
        """
        check_numbers("set_lr", ">= 0", value=value)
        for group in self._dense_groups():
            group["lr"] = value

    def get_lr(self) -> float:
        """Raises BadRequest: the groups of dense parameters have several."""
        rates = {float(group["lr"]) for group in self._dense_groups()}
        if len(rates) != 1:
            raise BadRequest(f"get_lr: expected one learning rate, found {sorted(rates)}")
        return rates.pop()

    def _dense_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.distributed.param_groups if "table" not in group]

    def state_dict(self) -> dict[str, Any]:
        return self.distributed.state_dict()

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        is_state = isinstance(state_dict, Mapping) and "param_groups" in state_dict
        check_values("set_state_dict", value=(is_state, "as what state_dict returned", state_dict))
        self.distributed.load_state_dict(dict(state_dict))
