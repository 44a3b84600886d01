"""Functions of `fleet` that act on the optimizer of the last distributed_optimizer."""

from collections.abc import Mapping
from typing import Any

from trireme.fleet.calls import job


def minimize(
    loss: Any, startup_program: None = None, parameter_list: None = None, no_grad_set: None = None
) -> None:
    """As FleetOptimizer.minimize."""
    job.fleet_optimizer.minimize(loss, startup_program, parameter_list, no_grad_set)


def step() -> None:
    """As FleetOptimizer.step."""
    job.fleet_optimizer.step()


def clear_grad() -> None:
    """As FleetOptimizer.clear_grad."""
    job.fleet_optimizer.clear_grad()


def set_lr(value: float) -> None:
    """As FleetOptimizer.set_lr."""
    job.fleet_optimizer.set_lr(value)


def get_lr() -> float:
    """As FleetOptimizer.get_lr."""
    return job.fleet_optimizer.get_lr()


def state_dict() -> dict[str, Any]:
    """As FleetOptimizer.state_dict."""
    return job.fleet_optimizer.state_dict()


def set_state_dict(state_dict: Mapping[str, Any]) -> None:
    """As FleetOptimizer.set_state_dict."""
    job.fleet_optimizer.set_state_dict(state_dict)
