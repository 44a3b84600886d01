"""Python, the packages that Trireme needs, and its core."""

from __future__ import annotations

import importlib
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata

import trireme
from trireme.doctor.finding import Finding, note, ok, problem

_PACKAGE = "trireme-ps"
_MODULES = {"prometheus-client": "prometheus_client", "PyYAML": "yaml", "pyzmq": "zmq"}
"""Packages whose module has another name."""
BROKEN = (ImportError, OSError, AttributeError, RuntimeError, ValueError)
"""What the import of a damaged or unfit package raises."""


def python() -> Iterator[Finding]:
    yield ok(f"Python {platform.python_version()} on {platform.platform()}")
    try:
        version, needs = metadata.version(_PACKAGE), metadata.requires(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        yield note(
            f"Trireme is loaded from {trireme.__path__[0]}, but not installed",
            "to have its packages checked: pip install . in a clone",
        )
        return
    yield ok(f"Trireme {version} in {trireme.__path__[0]}")
    versions = []
    for need in needs:
        if ";" in need:  # of an extra
            continue
        name, least = re.split(r"\s*>=\s*", need, maxsplit=1)
        installed = _version(name)
        if installed is None or _numbers(installed) < _numbers(least):
            yield problem(
                f"expected {name} >= {least}, found {installed or 'none'}",
                f"pip install '{name}>={least}' with {sys.executable}",
            )
        elif (broken := _import_error(name)) is not None:
            yield problem(
                f"{name} {installed} is installed, but cannot be imported: {broken}",
                f"pip install --force-reinstall {name} with {sys.executable}",
            )
        else:
            versions.append(f"{name} {installed}")
    if versions:
        yield ok(", ".join(versions))


def core() -> Iterator[Finding]:
    """The core, and the instructions that it chooses on this processor."""
    try:
        from trireme import _core
    except BROKEN as error:
        yield problem(
            f"the C++ core cannot be imported: {error}",
            "install Trireme for this Python: pip install . in a clone",
        )
        return
    chosen = _core.Table(dims=[1], rule="sgd", init_a=0.0, init_b=0.0, seed=0).simd
    if chosen == "scalar":
        yield note(
            "the core uses no vector instructions: this processor has neither AVX2 nor AVX-512",
            "lookups and updates of rows are slower, with the same results",
        )
    else:
        yield ok(f"the core uses {chosen}")


def has(name: str) -> bool:
    """Whether a package that Trireme needs can be imported."""
    return _import_error(name) is None


def _import_error(name: str) -> str | None:
    try:
        importlib.import_module(_MODULES.get(name, name))
    except BROKEN as error:
        return f"{type(error).__name__}: {error}"
    return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    """[2, 13] of 2.13.0+cpu or 2.13rc1: those of a release, without zeros at the end."""
    match = re.match(r"\d+(\.\d+)*", version)
    release = re.sub(r"(\.0+)+$", "", match[0]) if match else "0"
    return [int(part) for part in release.split(".")]
