"""Mode geo: a worker trains on a cache of its own and exchanges differences every k steps.

The steps between two exchanges are a window. A row is fetched when a window first touches it, and
keeps its optimizer state from the windows before; dense weights are fetched when a window begins.
When it ends, the differences of the touched rows and of the dense weights are pushed, and the
servers add them.
"""
