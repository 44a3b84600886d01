"""Mode geo: a worker trains on a cache of its own and exchanges differences every k steps.

The steps between two exchanges are a window. A row is fetched when it is first touched in a window
and keeps its optimizer state from the windows before; dense weights are fetched when the window
begins. At its end the differences of the touched rows and of the dense weights are pushed, and the
servers add them.
"""

from trireme.train.modes.geo.cache import RowCache
from trireme.train.modes.geo.worker import Geo

__all__ = ["Geo", "RowCache"]
