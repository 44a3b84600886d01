"""macro/job.py on workers of several types, each with a part of a core: GROUPS TYPE OPTIONS...

GROUPS is a folder of cgroups: a process joins ROLE_INDEX, its place in the job, or TYPE where it
trains alone, as under `trireme place`. OPTIONS are those of macro/job.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.macro import job
from benchmarks.macro.throttled import join


def main() -> None:
    folder, kind, *options = sys.argv[1:]
    role = os.environ.get("TRIREME_ROLE", "embedded")
    place = kind if role == "embedded" else f"{role}_{os.environ['TRIREME_INDEX']}"
    join(Path(folder) / place)
    sys.argv = [sys.argv[0], *options]
    job.main()


if __name__ == "__main__":
    main()
