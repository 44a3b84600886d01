"""StrategyFactory: how scripts of Fleet 1.x choose a mode."""

from typing import NoReturn

from trireme.errors import BadRequest, check_kind, check_values
from trireme.fleet.distributed_strategy import DistributedStrategy


class StrategyFactory:
    """Makes a strategy for `fleet.distributed_optimizer`."""

    @staticmethod
    def create_sync_strategy() -> DistributedStrategy:
        strategy = DistributedStrategy()
        strategy.a_sync = False
        return strategy

    @staticmethod
    def create_async_strategy() -> DistributedStrategy:
        strategy = DistributedStrategy()
        strategy.a_sync = True
        return strategy

    @staticmethod
    def create_geo_strategy(update_frequency: int = 100) -> DistributedStrategy:
        """update_frequency: steps between two exchanges. Raises BadRequest: less than 1."""
        check_kind("StrategyFactory", "update_frequency", update_frequency, int, "an integer >= 1")
        check_values(
            "StrategyFactory",
            update_frequency=(update_frequency >= 1, "as an integer >= 1", update_frequency),
        )
        strategy = StrategyFactory.create_async_strategy()
        strategy.a_sync_configs = {"k_steps": update_frequency}
        return strategy

    @staticmethod
    def create_half_async_strategy() -> NoReturn:
        raise BadRequest(
            "StrategyFactory.create_half_async_strategy: there are no threads that share a worker's"
            " push; use create_sync_strategy or create_async_strategy"
        )
