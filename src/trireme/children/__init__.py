"""Child processes that end with this one, whatever happens to it."""

from trireme.children.keeper import SHIM, Child

__all__ = ["Child", "SHIM"]
