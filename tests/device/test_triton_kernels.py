"""Triton's kernels as they are compiled for a GPU, which none need have. What they compute is
compared in the other tests: here in Triton's interpreter, which shows neither races nor speed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.blocks import NO_TRITON, RULES, Place, Twin
from tests.long import pick
from trireme.errors import BadRequest

PROGRAM = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from trireme.device import triton_kernels as kernels, triton_rules

F, I = "*fp32", "*i32"
SOURCE = kernels._Source(F, F, I, I, I, F, I, F, "i32", "i32")
UPDATE = {"weights": F, "states": F, "slots": I, "source": SOURCE, "exact": "*fp64",
          "values": ("fp32",) * len(triton_rules.VALUES)}
POOL = {"out": F, "weights": F, "slots": I, "offsets": "*i64", "factors": F,
        "num_examples": "i32", "num_features": "i32"}


def check(kernel, types, **constants):
    constants.update(D=37, BLOCK=64)
    signature = {n: types.get(n, "constexpr") for n in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    options = {**kernels.OPTIONS, "num_warps": 2}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 0
    for inexact in ("fma", "approx", "atom.", " red.", "\\tred."):
        assert inexact not in ptx, (kernel.__name__, constants, inexact)
    return ptx


assert not triton_rules.is_interpreted
check(kernels._pool, POOL, KIND=6)
check(kernels._sum, {"source": SOURCE}, KIND=6)
check(kernels._sum_chunk, {"source": SOURCE, "owners": I, "num_rows": "i32"}, KIND=6, CHUNK=256)
for rule in sys.argv[1:]:
    kernel = kernels._update_parts if rule.startswith("fleet") else kernels._update
    ptx = check(kernel, UPDATE, KIND=6, RULE=rule, S=76)
    if "ada" in rule:
        assert "sqrt.rn" in ptx and "div.rn" in ptx
    if rule in ("momentum", "row_adam"):  # they count, and have no sums over a row
        assert "bar.sync" in ptx, "a thread may load a count that another has replaced"
print("compiled")
"""
FEW = ("sgd", "shared_adagrad", "row_adam", "fleet_shared_adagrad")
ALL = (
    *("sgd", "momentum", "nesterov", "adagrad", "shared_adagrad", "adam", "row_adam"),
    *("shared_adam", "shared_row_adam", "ftrl", "count", "fleet_sgd", "fleet_adagrad"),
    *("fleet_shared_adagrad", "fleet_adagrad_v2", "fleet_adam", "fleet_shared_adam"),
)


@NO_TRITON
def test_kernels_compile_for_a_gpu_without_atomics_and_fused_operations(tmp_path: Path) -> None:
    rules = pick(short=FEW, long=ALL)
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, *rules]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110)
    assert done.stdout == "compiled\n", done.stderr


@NO_TRITON
def test_kernels_for_the_cpu_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from trireme.device import triton_rules

    monkeypatch.setattr(triton_rules, "is_interpreted", False)
    with pytest.raises(BadRequest, match="TRITON_INTERPRET=1"):
        Twin(RULES["sgd"]).block(Place("cpu", "triton"))


@NO_TRITON
def test_the_compiled_rules_are_all_rules() -> None:
    from trireme.device.triton_rules import name_of

    assert {name_of(rule.fixed()) for rule in RULES.values()} == set(ALL)
