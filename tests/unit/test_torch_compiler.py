"""torch's compiler is loaded late, and means the same when it is."""

from __future__ import annotations

import subprocess
import sys

import torch

from trireme import torch_compiler

PROGRAM = """
import sys, torch
from trireme import torch_compiler
torch_compiler.keep_unloaded()

def train(optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    torch_compiler.step(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())

model = torch.nn.Linear(3, 1)
for cls in (torch.optim.SGD, torch.optim.Adam, torch.optim.Adafactor):
    train(cls(model.parameters()))
assert "torch._dynamo" not in sys.modules
optimizer = torch.optim.Adam(model.parameters())
torch.compile(train, backend="eager")(optimizer)
assert "torch._dynamo" in sys.modules
"""


def test_optimizers_train_without_the_compiler_and_can_be_compiled() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)


def test_a_function_that_is_not_compiled_leaves_a_graph_around_it() -> None:
    def is_compiled(x: torch.Tensor) -> torch.Tensor:
        return x + torch.compiler.is_compiling()

    excluded = torch_compiler.not_compiled(is_compiled)

    def both(x: torch.Tensor) -> torch.Tensor:
        return 10 * is_compiled(x) + excluded(x)

    zero = torch.zeros(())
    assert both(zero) == 0
    assert torch.compile(both, backend="eager")(zero) == 10


def test_a_step_is_the_same_with_the_compiler_and_without() -> None:
    def weights(step: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 64))
        optimizer = torch.optim.Adam([weight], fused=True)
        for number in range(3):
            weight.grad = torch.linspace(0, number + 1, 64)
            torch_compiler.step(optimizer) if step else optimizer.step()
        return weight.detach()

    assert torch.equal(weights(True), weights(False))
