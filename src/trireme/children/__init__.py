"""Child processes that end with this process, for whatever reason it ends."""

from trireme.children.command import PROGRAM, ChildCommand, adopting

__all__ = ["ChildCommand", "PROGRAM", "adopting"]
