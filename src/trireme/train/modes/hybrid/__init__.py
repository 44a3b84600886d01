"""Mode hybrid: rows through the servers, dense parameters by all-reduce among the workers."""

from trireme.train.modes.hybrid.mode import Hybrid

__all__ = ["Hybrid"]
