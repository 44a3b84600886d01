"""controlled_script.py as a script whose text does not speak of variables, which may be forked."""

from __future__ import annotations

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).with_name("controlled_script.py")), run_name="__main__")
