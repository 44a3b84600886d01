"""macro/job.py on workers of several types, each with a part of a core: GROUPS TYPE OPTIONS...

GROUPS is a folder of cgroups: a process joins ROLE_INDEX, its place in the job, or TYPE where it
trains alone, as under `trireme place`. OPTIONS are those of macro/job.py.

A compute worker has the last core to itself, when it is measured as in a job: on a machine of its
own nobody else would use its caches either. The other processes of a job share the other cores.
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
    *others, last = sorted(os.sched_getaffinity(0))
    if others and (kind == "gpu" or role == "heter"):
        os.sched_setaffinity(0, {last})
    elif others and role != "embedded":
        os.sched_setaffinity(0, others)
    sys.argv = [sys.argv[0], *options]
    job.main()


if __name__ == "__main__":
    main()
