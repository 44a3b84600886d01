"""Stages in one process: what crosses from stage to stage, and the errors that name stages."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trireme as tr
from trireme.accelerator import HOST
from trireme.errors import BadRequest, NotReady
from trireme.inference.export import exporter
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.nn.on_device import device_of
from trireme.nn.stages import label_of

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.fixture
def home():
    with embedded(devices={"gpu": "cpu"}) as cluster:
        set_default(cluster)
        yield cluster


class Call(nn.Module):
    """A stage that calls a function of (its linear layer, values)."""

    def __init__(self, function: Any, size: int = 2) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(size, size), function

    def forward(self, values: Any) -> Any:
        return self.function(self.linear, values)


def hidden(linear: nn.Linear, values: Any) -> dict[str, Tensor]:
    return {"x": linear(values["x"])}


def output(linear: nn.Linear, values: Any) -> Tensor:
    return linear(values["x"]).sum(1)


def stages(first: Any = hidden, middle: Any = hidden, last: Any = output) -> tr.Stages:
    torch.manual_seed(0)
    return tr.Stages(cpu=Call(first), gpu=Call(middle), cpu_2=Call(last))


def x(num_examples: int = 3) -> dict[str, Tensor]:
    return {"x": torch.randn(num_examples, 2, generator=torch.Generator().manual_seed(1))}


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("num_examples", [0, 3])
def test_backward_trains_all_stages_as_one_module(num_examples: int) -> None:
    model, batch = stages(), x(num_examples)
    parts = [copy.deepcopy(model[name].linear) for name in model.names]
    model(batch).sum().backward()
    nn.Sequential(*parts)(batch["x"]).sum(1).sum().backward()
    for name, part in zip(model.names, parts, strict=True):
        for key, expected in part.named_parameters():
            actual = model.get_parameter(f"stage_{name}.linear.{key}").grad
            assert expected.grad is not None
            assert actual is not None
            assert torch.equal(actual, expected.grad)


@pytest.mark.usefixtures("home")
def test_plain_torch_training_learns() -> None:
    model, batch = stages(), x(64)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = ((model(batch) - batch["x"].prod(1)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_return_gradients_and_others_pass(dtype: torch.dtype) -> None:
    whole = {"i": torch.tensor([2, 3]), "b": torch.tensor([True, False])}
    seen: dict[str, Tensor] = {}

    def first(linear: nn.Linear, values: Any) -> dict[str, Tensor]:
        return {"f": linear.weight.to(dtype), **whole}

    def last(linear: nn.Linear, values: Any) -> Tensor:
        seen.update(values)
        return torch.where(values["b"], values["f"] * values["i"], 0).float() + 0 * linear.weight

    model = tr.Stages(cpu=Call(first), gpu=Call(last))
    model(None).sum().backward()
    assert seen["f"].dtype == dtype
    assert torch.equal(seen["i"], whole["i"])
    assert torch.equal(seen["b"], whole["b"])
    assert not seen["i"].requires_grad
    assert torch.equal(model["cpu"].linear.weight.grad, torch.tensor([[2.0, 0.0], [2.0, 0.0]]))


@pytest.mark.usefixtures("home")
def test_a_stage_gets_contiguous_tensors_without_the_graph_of_the_one_before() -> None:
    seen: dict[str, Tensor] = {}

    def first(linear: nn.Linear, values: Any) -> dict[str, Tensor]:
        constant = torch.ones(3)
        return {"x": linear(values["x"]).t(), "wide": constant[:, None].expand(3, 2)}

    def middle(linear: nn.Linear, values: Any) -> dict[str, Tensor]:
        seen.update(values)
        return {"x": linear(values["x"].t())}

    stages(first, middle)(x()).sum().backward()
    assert all(tensor.is_contiguous() for tensor in seen.values())
    assert seen["x"].requires_grad
    assert not seen["wide"].requires_grad
    assert type(seen["x"].grad_fn).__name__ == "_CrossingBackward"


@pytest.mark.usefixtures("home")
def test_a_stage_begins_backward_when_the_one_behind_has_ended() -> None:
    order: list[str] = []

    def noted(name: str, tensor: Tensor) -> Tensor:
        tensor.register_hook(lambda _: order.append(name))
        return tensor

    def first(linear: nn.Linear, values: Any) -> dict[str, Tensor]:
        return {
            "a": noted("first", linear(values["x"])),
            "b": noted("first", values["x"] * linear.bias),
        }

    def last(linear: nn.Linear, values: Any) -> Tensor:
        early = noted("last", linear(values["a"]).exp())
        return (noted("last", values["b"] * 2) + early).sum(1)

    tr.Stages(cpu=Call(first), gpu=Call(last))(x()).sum().backward()
    assert order == ["last", "last", "first", "first"]


@pytest.mark.usefixtures("home")
def test_one_stage_is_the_model_itself() -> None:
    only = Call(output)
    assert torch.equal(tr.Stages(gpu=only)(x()), only(x()))


def test_stages_are_on_the_devices_of_their_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = torch.device("meta")
    with embedded(devices={"gpu": "meta"}) as cluster:
        set_default(cluster)
        model = tr.Stages(cpu=Call(hidden), gpu=Call(output))
        parameter = model["gpu"].linear.weight
        model.place(cluster)
        assert model.devices == {"cpu": HOST, "gpu": meta}
        assert model["gpu"].linear.weight.device == meta
        assert model["cpu"].linear.weight.device == HOST
        assert model.rows_device == device_of(model) == HOST
        seen: list[torch.device] = []
        model["gpu"].register_forward_pre_hook(lambda _, args: seen.append(args[0]["x"].device))
        with pytest.raises(NotImplementedError, match="meta"):  # the outputs come back
            model(x())
        assert seen == [meta]
        # An export predicts on the CPU, wherever the stages are.
        with pytest.raises(NotImplementedError, match="meta"):
            exporter._on_host(model, [])
        moved = copy.deepcopy(model).to(meta)
        assert moved.devices == {"cpu": meta, "gpu": meta}
        assert parameter.device == HOST  # only a tensor of meta is a new one


def test_forward_needs_a_cluster_that_knows_the_devices() -> None:
    with pytest.raises(NotReady, match="init"):
        stages()(x())


@pytest.mark.parametrize(
    ("name", "labels", "label"),
    [("cpu", (), "cpu"), ("gpu_2", ("gpu",), "gpu"), ("gpu_2", ("gpu_2",), "gpu_2")],
)
def test_the_label_of_a_stage(name: str, labels: tuple[str, ...], label: str) -> None:
    assert label_of(name, labels) == label


# ---- errors ----


def test_an_unknown_label_is_named(home: Cluster) -> None:
    with pytest.raises(BadRequest, match=r"label of cpu, gpu, .*TRIREME_DEVICE_NPU .* found 'npu'"):
        tr.Stages(npu=Call(output)).place(home)


@pytest.mark.parametrize("name", ["GPU", "2", "_2", "a.b", "a" * 33])
def test_a_name_that_is_not_a_label_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=f"found {name!r}"):
        tr.Stages(**{name: Call(output)})


def test_no_stage_is_refused() -> None:
    with pytest.raises(BadRequest, match="at least one stage"):
        tr.Stages()


def test_what_is_not_a_module_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"expected stage 'gpu' as a module, found <function"):
        tr.Stages(gpu=hidden)  # type: ignore[arg-type]


def test_an_unknown_stage_is_named() -> None:
    with pytest.raises(BadRequest, match="stages cpu, gpu, cpu_2, found 'gpu_2'"):
        stages()["gpu_2"]


def test_a_parameter_in_two_stages_is_refused(home: Cluster) -> None:
    first, second = Call(hidden), Call(output)
    second.linear.weight = first.linear.weight
    with pytest.raises(
        BadRequest, match=r"parameter 'linear.weight' of stage 'cpu' in stage 'gpu' too"
    ):
        tr.Stages(cpu=first, gpu=second)
    model = stages()
    model["cpu_2"].linear.bias = model["gpu"].linear.bias
    with pytest.raises(BadRequest, match=r"'linear.bias' of stage 'gpu' in stage 'cpu_2' too"):
        model.place(home)


def test_a_buffer_in_two_stages_is_refused() -> None:
    shared = nn.BatchNorm1d(2, affine=False)
    with pytest.raises(BadRequest, match=r"buffer '0.running_mean' of stage 'cpu' in stage 'gpu'"):
        tr.Stages(cpu=nn.Sequential(shared), gpu=nn.Sequential(shared))


def test_a_table_in_two_stages_or_behind_the_first_is_refused() -> None:
    table = tr.Table("t", dim=2, optimizer=tr.optim.SGD(lr=0.1))
    bags = [tr.nn.EmbeddingBag(table, features=name) for name in "ab"]
    with pytest.raises(BadRequest, match="table 't' of stage 'cpu' in stage 'gpu' too"):
        tr.Stages(cpu=bags[0], gpu=bags[1])
    with pytest.raises(BadRequest, match=r"first stage, 'cpu', .* table 't' in stage 'cpu_2'"):
        tr.Stages(cpu=Call(hidden), cpu_2=bags[1])


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(2), "dict of tensors by name, found Tensor"),
        ({}, "dict of tensors by name, found none"),
        ({"x": 1.0}, "found 'x': float"),
        ({1: torch.zeros(2)}, "found the name 1"),
        ({"": torch.zeros(2)}, "found the name ''"),
        ({"x": torch.zeros(2, 2).to_sparse()}, "found 'x': torch.sparse_coo"),
        ({"x": torch.zeros(2, dtype=torch.complex64)}, "found 'x' of torch.complex64"),
    ],
)
def test_what_cannot_cross_is_named(returned: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=f"stage 'cpu' to return .*{message}"):
        stages(lambda *_: returned)(x())


@pytest.mark.usefixtures("home")
def test_a_name_that_the_stage_before_does_not_return_is_named() -> None:
    model = stages(middle=lambda linear, values: {"y": linear(values["y"])})
    with pytest.raises(BadRequest, match=r"stage 'gpu' to read what .* 'cpu' returns, x, .* 'y'"):
        model(x())


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"first": lambda linear, _: {"x": torch.zeros(3, 2), "n": torch.ones(3).long()}},
            "output of stage 'cpu' .*found x: float32 without gradient, n: int64 without gradient",
        ),
        (
            {"middle": lambda linear, values: {"x": linear(values["x"].detach())}},
            "output of stage 'gpu' that depends on what stage 'cpu' returned",
        ),
        (
            {"last": lambda linear, values: linear.weight.sum(1)},
            "output of stage 'cpu_2' that depends on what stage 'gpu' returned",
        ),
        ({"last": lambda linear, values: torch.zeros(3)}, "output of stage 'cpu_2'"),
    ],
)
def test_a_stage_without_gradient_is_named(wrong: Any, message: str) -> None:
    model = stages(**wrong)
    with pytest.raises(BadRequest, match=message):
        model(x())
    model.eval()(x())
    with torch.no_grad():
        model.train()(x())


@pytest.mark.usefixtures("home")
def test_a_stage_that_is_not_trained_needs_no_gradient() -> None:
    model = stages(middle=lambda linear, values: {"x": linear(values["x"].detach())})
    model["cpu"].requires_grad_(False)
    model(x()).sum().backward()
    assert model["cpu"].linear.weight.grad is None
    assert model["gpu"].linear.weight.grad is not None


def test_state_dicts_name_the_stages(home: Cluster) -> None:
    model = stages()
    assert "stage_cpu_2.linear.weight" in model.state_dict()
    other = stages()
    with torch.no_grad():
        other["gpu"].linear.weight.zero_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other["gpu"].linear.weight, model["gpu"].linear.weight)
    with pytest.raises(RuntimeError, match="stage_gpu"):
        tr.Stages(cpu=Call(hidden)).load_state_dict(model.state_dict())
