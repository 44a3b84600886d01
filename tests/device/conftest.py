"""Kernels run in Triton's interpreter, which the variable chooses before the import; `make gpu`
sets it to 0.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
