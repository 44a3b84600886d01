"""What every process sets up once."""

import platform
import subprocess
import sys

import pytest

from trireme.ps.process import start_pool

PAGE_FAULTS_OF_A_STEP = """
import resource, torch
from trireme.ps.process import start_pool
if {is_started}:
    start_pool(1)
def step():
    blocks = [torch.ones(1 << 21) for _ in range(4)]  # 8 MB each
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""


def page_faults(*, is_started):
    code = PAGE_FAULTS_OF_A_STEP.format(is_started=is_started)
    return int(subprocess.check_output([sys.executable, "-c", code], text=True, timeout=100))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator")
def test_freed_memory_is_kept_for_the_next_step():
    assert page_faults(is_started=True) < page_faults(is_started=False) // 10


def test_a_pool_has_the_threads_asked_for():
    assert start_pool(3).threads == 3
    assert start_pool(0).threads >= 1
