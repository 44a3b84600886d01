"""Processors, memory, folders and limits of this process, and how it reads rows on SSD."""

from __future__ import annotations

import math
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from trireme.doctor import cgroup
from trireme.doctor.devices import rdma
from trireme.doctor.finding import Finding, note, ok, problem
from trireme.doctor.software import BROKEN, has
from trireme.drawing import size
from trireme.errors import BadRequest, Unavailable

_PROCESS_BYTES = 512 << 20
"""Of a process that has loaded torch, and trains a small model."""
_FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 BF16",
    "amx_tile": "AMX",
    "asimd": "NEON",
    "sve": "SVE",
}
"""Flags of /proc/cpuinfo that torch or the core makes use of."""


def cores() -> Iterator[Finding]:
    allowed, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = cgroup.quota_cores()
    if quota is not None and quota < allowed:
        threads = math.ceil(quota)
        yield note(
            f"{quota:g} cores by quota of the control group, {allowed} by affinity",
            "each process starts a thread per core and is stopped when the quota is spent: set"
            f" TRIREME_THREADS={threads} and OMP_NUM_THREADS={threads}, or raise the quota",
        )
    elif allowed < there:
        yield note(
            f"{allowed} of {there} cores, by affinity",
            "if that is not intended: taskset, or --cpuset-cpus of docker",
        )
    else:
        yield ok(f"{allowed} cores, all that there are")
    if (load := os.getloadavg()[0]) > there:
        yield note(
            f"a load of {load:.1f} on {there} cores in the last minute",
            "threads of torch that wait for each other keep cores busy while others wait for these:"
            " OMP_WAIT_POLICY=passive, or OMP_NUM_THREADS=1, can be ten times as fast then",
        )
    flags = _cpuinfo("flags", "Features")
    features = ", ".join(name for flag, name in _FEATURES.items() if flag in flags) or "no AVX2"
    if "avx512f" in flags and "AuthenticAMD" in _cpuinfo("vendor_id"):
        yield note(
            f"{features}, by AMD: torch's float32 products (MKL) do not use AVX-512",
            "if a model's time goes into torch.nn.Linear, tr.nn.use_onednn(model) saves up to half"
            " of it, and Trainer(autocast=torch.bfloat16) more (docs/optimizers.md)",
        )
    else:
        yield ok(features)


def memory() -> Iterator[Finding]:
    sizes = _meminfo()
    total, free = sizes["MemTotal"], sizes["MemAvailable"]
    limit = cgroup.memory()
    text = f"{size(free)} free of {size(total)}"
    if limit is not None and limit[1] < free:
        free = limit[1]
        text = f"{size(free)} free of {size(limit[0])}, the limit of the control group"
    if free < _PROCESS_BYTES:
        yield problem(
            text,
            f"a process of a job takes about {size(_PROCESS_BYTES)} before its tables: end others,"
            " or raise the limit (--memory of docker, MemoryMax= of systemd)",
        )
    else:
        yield ok(text)


def _cpuinfo(*names: str) -> set[str]:
    """The words of a line of the first processor; all of a machine have the same."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return set(value.split())
    return set()


def _meminfo() -> Mapping[str, int]:
    """Bytes by name."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {name.rstrip(":"): int(value) << 10 for name, value, *_ in lines}


def disk() -> Iterator[Finding]:
    yield _working_folder()
    yield _io_uring()


def _working_folder() -> Finding:
    folder = os.getcwd()
    text = f"{size(shutil.disk_usage(folder).free)} free in {folder}"
    if not os.access(folder, os.W_OK):
        return note(
            f"{text}, which cannot be written",
            "trireme launch writes logs to log/ there: give --log_dir, and save elsewhere",
        )
    return ok(text)


def _io_uring() -> Finding:
    try:
        from trireme import _core
    except BROKEN:
        return note("io_uring is not tried: the core cannot be imported", "see Trireme above")
    try:
        with tempfile.TemporaryDirectory() as folder:
            _core.SsdDevice(folder, "io_uring")
    except Unavailable as error:
        return note(
            f"no io_uring: {error}",
            "rows on SSD are read by threads, which costs more CPU: allow io_uring_setup, _enter"
            " and _register in the profile of seccomp, and kernel.io_uring_disabled=0",
        )
    except OSError as error:
        return note(f"io_uring is not tried: {error}", "set TMPDIR to a folder that can be written")
    return ok("rows on SSD are read by io_uring")


_SHARED_MEMORY = "/dev/shm"
_SHARED_BYTES = 256 << 20
"""What DataLoaders with a few workers take; Docker gives 64 MiB."""


def limits(server_limits: str | None) -> Iterator[Finding]:
    """server_limits: those in TRIREME_LIMITS."""
    yield _open_files(server_limits)
    yield _locked_memory()
    yield _shared_memory()


def _open_files(server_limits: str | None) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_number(soft)} open files, {_number(hard)} if a process asks"
    if not (has("pyzmq") and has("msgpack") and has("numpy")):
        return note(f"{text}; what a server needs is unknown", "install what is missing first")
    from trireme import rpc
    from trireme.server.server_limits import parse_limits

    try:
        peers = parse_limits(server_limits or "").messages
    except BadRequest as error:
        return problem(f"TRIREME_LIMITS cannot be used: {error}", "change or unset TRIREME_LIMITS")
    needed = rpc.open_files_needed(peers)
    text += f"; a server with connections_max={peers.connections_max:,} needs {needed:,}"
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return ok(text)
    advice = "raise the hard limit: ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of docker"
    if (possible := rpc.connections_within(hard)) > 0:
        advice += f"; or give servers --limits connections_max={possible}"
    return problem(text, advice)


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and rdma():
        return note(
            f"{size(soft)} of locked memory", "NCCL locks its buffers for RDMA: ulimit -l unlimited"
        )
    return ok(f"{'any' if soft == resource.RLIM_INFINITY else size(soft)} of locked memory")


def _shared_memory() -> Finding:
    try:
        there = os.statvfs(_SHARED_MEMORY)
    except OSError as error:
        return note(f"{_SHARED_MEMORY}: {error}", "DataLoaders with workers, and NCCL, need it")
    num_bytes = there.f_frsize * there.f_blocks
    text = f"{size(num_bytes)} of shared memory in {_SHARED_MEMORY}"
    if num_bytes < _SHARED_BYTES:
        return note(text, "DataLoaders with workers, and NCCL, need more: --shm-size=1g of docker")
    return ok(text)


def _number(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else f"{limit:,}"
