"""GPUs, and devices for RDMA."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from trireme.doctor.finding import Finding, note, ok
from trireme.doctor.software import has
from trireme.drawing import size

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_RDMA = Path("/sys/class/infiniband")


def gpus() -> Iterator[Finding]:
    if not has("torch"):
        yield note("not looked for: torch sees GPUs, and cannot be imported", "install torch first")
        return
    from trireme import accelerator

    gpus_here = accelerator.describe_gpus()
    for index, (name, num_bytes) in enumerate(gpus_here):
        yield ok(f"GPU {index}: {name}, {size(num_bytes)}")
    if gpus_here:
        yield from _triton()
    elif _NVIDIA_DRIVER.exists():
        yield note(
            f"torch ({accelerator.built_for()}) sees no GPU, but there is a driver of NVIDIA's",
            "models compute on the CPU: install torch's build for this driver's CUDA, from"
            " https://pytorch.org/get-started/locally",
        )
    else:
        yield ok(f"none; models compute on the CPU (torch is built for {accelerator.built_for()})")


def _triton() -> Iterator[Finding]:
    try:
        yield ok(f"Triton {metadata.version('triton')}")
    except metadata.PackageNotFoundError:
        yield note(
            "no Triton", "rows on GPUs are updated by torch's operations: pip install 'triton>=3.4'"
        )


def rdma() -> list[str]:
    """Names of the devices for RDMA."""
    return sorted(path.name for path in _RDMA.iterdir()) if _RDMA.is_dir() else []
