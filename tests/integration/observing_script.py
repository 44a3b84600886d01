"""Prints, as JSON, all that a Python script sees of its process."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

MODULE = {
    name: value if isinstance(value, str) else type(value).__name__
    for name, value in sorted(globals().items())
    if name.startswith("__")
}


def square(number: int) -> int:
    return number * number


def observe() -> dict[str, Any]:
    main = sys.modules["__main__"]
    names = (*signal.Signals, signal.SIGRTMIN)
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": str(sys.flags),
        "module": MODULE,
        "is_main": vars(main) is globals(),
        "pickled": pickle.loads(pickle.dumps(square)) is square,
        "threads": [thread.name for thread in threading.enumerate()],
        "variables": dict(sorted(os.environ.items())),
        "folder": os.getcwd(),
        "signals": {str(number): repr(signal.getsignal(number)) for number in names},
        "blocked": repr(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "inheritable": [os.get_inheritable(fd) for fd in descriptors()],
        "input": sys.stdin.read(),
        "output": [str(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "write_through": [sys.stdout.write_through, sys.stdout.line_buffering],
        "umask": os.umask(0o22),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "cores": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "words": Path("/proc/self/cmdline").read_text().replace("\0", " ").strip(),
        "name": Path("/proc/self/comm").read_text(),
        "limits_of_gc": gc.get_threshold(),
        "spawned": multiprocessing.get_context("spawn").Pool(1).map(square, [3]),
        "forked": multiprocessing.get_context("fork").Pool(1).map(square, [3]),
    }


def descriptors() -> list[int]:
    """Those that are open, up to where a listing of them would take one."""
    return [fd for fd in range(64) if os.path.exists(f"/proc/self/fd/{fd}")]


def batches() -> list[list[int]]:
    """What processes of a DataLoader read, where torch is loaded."""
    if "torch" not in sys.modules:
        return []
    import torch

    loader = torch.utils.data.DataLoader(list(range(4)), batch_size=2, num_workers=1)
    return [batch.tolist() for batch in loader]


if __name__ == "__main__":
    seen = observe()
    drawn = [random.random(), multiprocessing.current_process().authkey.hex()]
    print(json.dumps({"seen": seen, "drawn": drawn, "batches": batches()}))
