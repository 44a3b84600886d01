"""Answers of a compute worker that are wrong in one part: an error says which, nothing changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trireme import _core, accelerator
from trireme.data.batch import Batch
from trireme.errors import BadRequest, SchemaMismatch
from trireme.rpc import Reply
from trireme.train.compute.compute_messages import ComputeAnswer, ComputeRequest
from trireme.train.compute.model_runner import ModelRunner
from trireme.train.compute.model_state import ModelIdentity
from trireme.train.compute.remote_model import RemotePass
from trireme.train.compute.stage_call import StageCall
from trireme.train.compute.stage_messages import Owner, StageRequest
from trireme.train.loop.replica import Replica
from trireme.train.loop.scoring import Scorer

BATCH = Batch({"x": torch.ones(4, 2), "label": torch.zeros(4)})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.top = nn.BatchNorm1d(2), nn.Linear(2, 1)

    def forward(self, batch: Any) -> Tensor:
        out: Tensor = self.top(self.norm(batch["x"])).squeeze(1)
        return out


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, labels)


WRONG: list[tuple[Callable[[ComputeAnswer], object], str]] = [
    (lambda a: a.buffers.update({0: torch.zeros(2, dtype=torch.int64)}), "buffer 0 of float32 "),
    (lambda a: a.buffers.update({1: torch.zeros(3)}), r"buffer 1 of float32 \(2,\), found .* \(3"),
    (lambda a: a.buffers.update({9: torch.zeros(2)}), "one of 3 buffers, found 9"),
    (lambda a: a.buffers.update({-1: torch.zeros(2)}), "one of 3 buffers, found -1"),
    (lambda a: a.parameters.pop(), r"gradients of float32 \(2,\), "),
    (lambda a: a.parameters.__setitem__(0, torch.zeros(2).double()), "found float64"),
    (lambda a: a.inputs.append(torch.zeros(1)), "expected gradients of nothing"),
    (lambda a: setattr(a, "loss", None), "a loss of one float, found none"),
    (lambda a: setattr(a, "loss", torch.zeros(2)), r"a loss of one float, found float32 \(2,\)"),
    (lambda a: setattr(a, "loss", torch.tensor(1)), "a loss of one float, found int64"),
    (lambda a: setattr(a, "random", None), "random numbers uint8 .* found none"),
    (lambda a: setattr(a, "random", torch.zeros(3)), "random numbers uint8 .* found float32"),
    (lambda a: a.random.fill_(255), "random numbers, found another"),  # type: ignore[union-attr]
]


@pytest.mark.parametrize(("spoil", "words"), WRONG)
def test_a_wrong_answer_is_an_error_and_changes_nothing(
    spoil: Callable[[ComputeAnswer], object], words: str
) -> None:
    runner = ModelRunner(Model(), Scorer(loss, "label"), accelerator.HOST, _core.Pool(1))

    def run(request: ComputeRequest, state: list[Tensor]) -> ComputeAnswer:
        answer = runner.run(request)
        spoil(answer)
        return answer

    model = Model()
    remote: Any = SimpleNamespace(
        identity=ModelIdentity(model, Scorer(loss, "label")), run=run, credits=2
    )
    replica: Any = Replica(model, None, None)  # type: ignore[arg-type]  # of one batch alone
    before = {name: value.clone() for name, value in model.state_dict().items()}
    training = RemotePass(remote, model, training=True, threads=1)
    random = torch.get_rng_state()
    with pytest.raises(BadRequest, match=words):
        training.train(replica, BATCH)
    assert torch.equal(torch.get_rng_state(), random) or "random" not in words
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def right_answer() -> ComputeAnswer:
    return ComputeAnswer(outputs={"y": torch.ones(4)}, learned=["y"])


WRONG_STAGES: list[tuple[Callable[[ComputeAnswer], object], str]] = [
    (lambda a: a.learned.append("z"), "among the outputs y, found z"),
    (lambda a: a.outputs.update(y=torch.ones(4, dtype=torch.int64)), "outputs y, found y"),
    (lambda a: a.buffers.update({0: torch.zeros(2).double()}), "buffer 0 of float32 .* float64"),
    (lambda a: setattr(a, "loss", torch.zeros(())), "expected no loss, found float32"),
    (lambda a: setattr(a, "random", torch.get_rng_state()), "random numbers none, found uint8"),
]


def stage_call(answer: ComputeAnswer, buffers: list[Tensor]) -> StageCall:
    def call(*_: object) -> tuple[Reply, str]:
        return Reply(*answer.to_wire()), "host:1"

    identity: Any = SimpleNamespace(explained=contextlib.nullcontext)
    graphs: Any = SimpleNamespace(
        next_token=lambda: "1", note=lambda *_: None, forget=lambda _: None
    )
    request = StageRequest(
        model="",
        stages=["gpu"],
        owner=Owner(0, 0),
        token="",
        graphs_max=1,
        training=True,
        inputs={"x": torch.ones(4)},
        learned=["x"],
        labels=None,
        state=[],
    )
    workers: Any = SimpleNamespace(call=call)
    return StageCall(workers, identity, graphs, request, [torch.ones(4)], [], buffers)


@pytest.mark.parametrize(("spoil", "words"), WRONG_STAGES)
def test_a_wrong_answer_of_a_stage_is_an_error_and_changes_nothing(
    spoil: Callable[[ComputeAnswer], object], words: str
) -> None:
    answer, buffers = right_answer(), [torch.ones(2)]
    spoil(answer)
    with pytest.raises(BadRequest, match=words):
        stage_call(answer, buffers).forward()
    assert torch.equal(buffers[0], torch.ones(2))


def test_gradients_of_a_stage_that_are_not_of_its_inputs_are_an_error() -> None:
    answer = right_answer()
    call = stage_call(answer, [])
    call.forward()
    answer.inputs = [torch.ones(3)]
    with pytest.raises(BadRequest, match=r"gradients of float32 \(4,\), found float32 \(3,\)"):
        call.backward([torch.ones(4)])


@pytest.mark.parametrize("model", [3, "x", {"parameter": 5}])
def test_a_refusal_that_describes_no_model_is_still_a_refusal(model: Any) -> None:
    refusal = SchemaMismatch("compute worker 0 runs another model")
    refusal.details = {"model": model}
    identity = ModelIdentity(Model(), Scorer(loss, "label"))
    with pytest.raises(SchemaMismatch, match="another model"), identity.explained():
        raise refusal
