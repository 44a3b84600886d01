"""Settings that every process makes once."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from trireme.errors import BadRequest
from trireme.threads import start_pool

PAGE_FAULTS_OF_A_STEP = """
import resource, torch
from trireme.threads import start_pool
if {is_started}:
    start_pool(1)
def page_faults(num_steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(num_steps):
        blocks = [torch.ones(1 << 21) for _ in range(4)]  # 8 MB each
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // num_steps
page_faults(20)
print(page_faults(10))
"""

NO_ROOM_FOR_THREADS = """
import resource
from trireme import _core
from trireme.errors import ResourceExhausted
resource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20))
try:
    _core.Pool(900)
except ResourceExhausted as error:
    print(error)
print(_core.Pool(2).threads)
"""

FROZEN = """
import gc
by_python = gc.get_freeze_count()
from trireme.threads import frozen_objects
def are_frozen():
    return gc.get_freeze_count() > by_python
seen = [are_frozen()]
first, second = frozen_objects(), frozen_objects()
first.__enter__()
second.__enter__()  # as of two threads
seen.append(are_frozen())
first.__exit__(None, None, None)
seen.append(are_frozen())
second.__exit__(None, None, None)
seen.append(are_frozen())
with frozen_objects():
    seen.append(are_frozen())
seen.append(are_frozen())
gc.freeze()  # by the script
with frozen_objects():
    pass
print(*map(int, [*seen, are_frozen()]))
"""


def page_faults_of_a_step(*, is_started):
    return int(
        subprocess.check_output(
            [sys.executable, "-c", PAGE_FAULTS_OF_A_STEP.format(is_started=is_started)],
            # Where glibc begins, and what it may or may not adapt as the process runs.
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)},
            text=True,
            timeout=100,
        )
    )


def test_freed_memory_is_kept_for_the_next_step():
    if platform.libc_ver()[0] == "glibc":
        # One step's memory may be fresh once in the measured ten: a tenth, not nothing.
        assert page_faults_of_a_step(is_started=True) * 4 < page_faults_of_a_step(is_started=False)
    else:
        page_faults_of_a_step(is_started=True)


def test_a_pool_has_the_threads_asked_for():
    assert start_pool(3).threads == 3
    assert start_pool(0).threads >= 1


def test_objects_are_frozen_while_any_needs_it_and_stay_so_if_the_script_wants_it():
    printed = subprocess.check_output([sys.executable, "-c", FROZEN], text=True, timeout=100)
    assert printed.split() == list("0110101")


@pytest.mark.parametrize("threads", [-1, 1025, 99_999_999])
def test_threads_that_the_system_would_refuse_are_refused_by_name(threads: int) -> None:
    with pytest.raises(BadRequest, match=rf"expected 0 to 1024 \(--threads, .*, found {threads}"):
        start_pool(threads)


def test_threads_that_the_system_refuses_end_no_process() -> None:
    command = [sys.executable, "-c", NO_ROOM_FOR_THREADS]
    refused, threads = subprocess.check_output(command, text=True, timeout=100).splitlines()
    assert refused.startswith("Pool: expected 900 threads, found that the system refuses number ")
    assert refused.endswith(
        "use fewer, or allow the process more (ulimit -u, pids.max of its cgroup)"
    )
    assert threads == "2"


WITHOUT_UTF8 = """
import os, sys
from pathlib import Path
from trireme.errors import BadRequest, is_file, writing

path = Path(sys.argv[1]) / "mod\\u00e8le"
def write():
    with writing("checkpoint: cannot write it"):
        path.mkdir()
for use in (write, lambda: is_file(path)):
    try:
        use()
    except BadRequest as error:
        print(ascii(str(error)))
"""


def test_paths_that_the_locale_cannot_spell_are_refused_with_what_to_set(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    command = [sys.executable, "-c", WITHOUT_UTF8, str(tmp_path)]
    lines = subprocess.check_output(command, text=True, timeout=100, env=env).splitlines()
    assert len(lines) == 2
    assert all("set PYTHONUTF8=1, or a locale of UTF-8" in line for line in lines)
