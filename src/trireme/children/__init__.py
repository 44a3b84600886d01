"""Child processes that end with this process, for whatever reason it ends."""

from trireme.children.adoption import adopting
from trireme.children.command import PROGRAM, ChildCommand

__all__ = ["ChildCommand", "PROGRAM", "adopting"]
