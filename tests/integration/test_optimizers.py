"""docs/optimizers.md is correct: its table lists every torch optimizer, and each behaves as
described.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.jobs import Job
from tests.tables import T_ROWS
from trireme import fleet
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.optim import values_of_group

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
STEPS = 12
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{"lr": 0.01, "t0": 5}],
    "Adadelta": [{"lr": 0.5, "weight_decay": 0.01}],
    "Adagrad": [{"lr": 0.05, "initial_accumulator_value": 0.1, "lr_decay": 0.01}],
    "Adam": [{"lr": 0.01}, {"lr": 0.01, "amsgrad": True, "betas": (0.8, 0.99)}],
    "AdamD2Sum": [{"lr": 0.01}],
    "AdamW": [{"lr": 0.01, "weight_decay": 0.1}],
    "Adamax": [{"lr": 0.01}],
    "NAdam": [{"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.01}],
    "RAdam": [{"lr": 0.01}],
    "RMSprop": [{"lr": 0.01, "momentum": 0.9, "centered": True}],
    "Rprop": [{"lr": 0.01}],
    "SGD": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}],
    "Adafactor": [{"lr": 0.05, "weight_decay": 0.01}],
    "Muon": [{"lr": 0.05, "adjust_lr_fn": "match_rms_adamw"}],
}


def table() -> dict[str, str]:
    """Class -> where it runs, according to the page."""
    rows = re.findall(r"^\| `([A-Z]\w+)` \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    return dict(rows)


def installed() -> dict[str, type[torch.optim.Optimizer]]:
    of_torch = {name: getattr(torch.optim, name) for name in torch.optim.__all__}
    return {
        name: cls
        for name, cls in {**of_torch, "AdamD2Sum": fleet.AdamD2Sum}.items()
        if isinstance(cls, type)
        and issubclass(cls, torch.optim.Optimizer)
        and cls is not torch.optim.Optimizer
    }


RUNNING = [
    (name, options)
    for name, choices in OPTIONS.items()
    for options in choices
    if name in installed()  # Muon came with torch 2.9
]


def test_every_optimizer_of_torch_is_in_the_table_and_tested_or_refused() -> None:
    page = table()
    assert installed().keys() <= page.keys() <= installed().keys() | {"Muon"}
    assert OPTIONS.keys() == {name for name, where in page.items() if where != "refused"}


def make_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(30, 25, bias=False), nn.Linear(25, 1, bias=False))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3, generator=generator)
    return model


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def weights_of(model: nn.Module) -> list[np.ndarray]:
    return [p.detach().numpy().copy() for p in model.parameters()]


def train(
    cluster: Cluster,
    name: str,
    options: dict[str, Any],
    blocks: tr.Blocks | None,
    mode: str = "sync",
) -> list[np.ndarray]:
    model = make_model()
    inner = installed()[name](model.parameters(), **options)
    strategy = tr.Strategy(mode)
    optimizer = tr.DistributedOptimizer(
        inner, model, strategy=strategy, blocks=blocks, cluster=cluster
    )
    for step in range(STEPS):
        set_gradients(model, step)
        optimizer.step(examples=8)
    optimizer.end_pass()
    return weights_of(model)


@pytest.mark.parametrize(("name", "options"), RUNNING)
def test_it_gives_the_same_bits_whole_and_in_blocks_and_what_torch_gives(
    name: str, options: dict[str, Any]
) -> None:
    is_whole = table()[name] == "whole parameters"
    with embedded(threads=1) as cluster:
        actual = [train(cluster, name, options, tr.Blocks(None))]
    with Job(2) as job, job.join(0, 1) as cluster:
        blocks = tr.Blocks(None if is_whole else 64, place="hash")
        actual.append(train(cluster, name, options, blocks))
    model = make_model()
    before, plain = weights_of(model), installed()[name](model.parameters(), **options)
    for step in range(STEPS):
        set_gradients(model, step)
        plain.step()
    for one, other, first, expected in zip(*actual, before, weights_of(model), strict=True):
        np.testing.assert_array_equal(one, other)
        # The servers take torch's fused kernel where there is one: same formula, other rounding.
        atol = 0 if is_whole else 2e-6
        np.testing.assert_allclose(one, expected, atol=atol, rtol=0)
        assert np.abs(one - first).max() > 100 * 2e-6


@pytest.mark.parametrize("name", [name for name, where in table().items() if where == "refused"])
def test_it_is_refused_with_the_reason(name: str) -> None:
    reason = re.search(rf"^\| `{name}` \| refused \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    assert reason is not None
    model = make_model()
    optimizer = installed()[name](model.parameters(), lr=0.1)
    with embedded() as cluster, pytest.raises(BadRequest) as raised:
        tr.DistributedOptimizer(optimizer, model, cluster=cluster)
    assert reason[1] in str(raised.value).replace("trireme.optim", "tr.optim")


def test_whole_parameters_train_in_geo_too() -> None:
    model = make_model()
    plain = torch.optim.Adafactor(model.parameters(), lr=0.05)
    for step in range(STEPS):
        set_gradients(model, step)
        plain.step()
    expected = weights_of(model)
    with embedded() as cluster:
        model = make_model()
        inner = torch.optim.Adafactor(model.parameters(), lr=0.05)
        optimizer = tr.DistributedOptimizer(
            inner,
            model,
            strategy=tr.Strategy("geo", k=5),
            blocks=tr.Blocks(None),
            cluster=cluster,
        )
        for step in range(STEPS):
            optimizer.mode.pull({}, blocks=True)
            set_gradients(model, step)
            optimizer.step(examples=8)
        optimizer.end_pass()
    for actual, wanted in zip(weights_of(model), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [n for n, where in table().items() if where == "whole parameters"])
def test_whole_parameters_resume_from_a_checkpoint_in_geo(name: str, tmp_path: Path) -> None:
    actual = []
    for goes_on in (False, True):
        with embedded() as cluster:
            model = make_model()
            trainer = tr.Trainer(
                model,
                installed()[name](model.parameters(), lr=0.05),
                loss=nn.functional.mse_loss,
                strategy=tr.Strategy("geo", k=5),
                blocks=tr.Blocks(None),
                progress=False,
                cluster=cluster,
            )
            for step in range(6 if goes_on else 0, 12):
                if step == 6:
                    (trainer.load if goes_on else trainer.save)(tmp_path / "saved")
                trainer.optimizer.mode.pull({}, blocks=True)
                set_gradients(model, step)
                trainer.optimizer.step(examples=8)
            trainer.optimizer.end_pass()
            actual.append(weights_of(model))
    for one, other in zip(*actual, strict=True):
        np.testing.assert_array_equal(one, other)


# ---- groups and schedulers ----

NUM_KEYS = 4  # each batch has all of them: lazy rows then are what torch's parameters are


class Model(nn.Module):
    def __init__(self, rule: tr.optim.Rule) -> None:
        super().__init__()
        init = tr.initializer.Constant(0.2)
        rows = tr.Table("t", dim=3, optimizer=rule, initializer=init)
        self.rows = tr.nn.Embedding(rows, features="key")
        self.top = nn.Linear(3, 1)
        nn.init.constant_(self.top.weight, 0.1)
        nn.init.constant_(self.top.bias, 0.3)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.top(self.rows(batch)).squeeze(1)


class Plain(nn.Module):
    """The same with torch's own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(NUM_KEYS, 3)
        nn.init.constant_(self.rows.weight, 0.2)
        self.top = nn.Linear(3, 1)
        nn.init.constant_(self.top.weight, 0.1)
        nn.init.constant_(self.top.bias, 0.3)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.top(self.rows(batch["key"])).squeeze(1)


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    keys = torch.arange(NUM_KEYS).repeat(2)
    return [{"key": keys, "label": torch.randn(8, generator=generator)} for _ in range(20)]


L = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: L.StepLR(o, 5, 0.5),
    "CosineAnnealingLR": lambda o: L.CosineAnnealingLR(o, 15),
    "CosineAnnealingWarmRestarts": lambda o: L.CosineAnnealingWarmRestarts(o, 6),
    "OneCycleLR": lambda o: L.OneCycleLR(o, max_lr=[0.1, 0.05, 0.2], total_steps=21),
    "CyclicLR": lambda o: L.CyclicLR(o, 0.01, 0.1, step_size_up=4),
    "ReduceLROnPlateau": lambda o: L.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "LambdaLR": lambda o: L.LambdaLR(
        o, [lambda n: 0.9**n, lambda n: 0.8**n, lambda n: 1 / (n + 1)]
    ),
    "SequentialLR": lambda o: L.SequentialLR(
        o, [L.LinearLR(o, 0.1, total_iters=5), L.ExponentialLR(o, 0.9)], milestones=[5]
    ),
}
# The dense class with its options, the rule of the rows, and the rows' class in torch.
PAIRS: dict[str, tuple[Any, dict[str, Any], tr.optim.Rule]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}, tr.optim.SGD(lr=0.2, momentum=0.9)),
    "Adam": (torch.optim.Adam, {"betas": (0.8, 0.95)}, tr.optim.Adam(lr=0.2, betas=(0.8, 0.95))),
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    top: Any = model.top
    return [
        {"params": [top.weight], "lr": 0.1},
        {"params": [top.bias], "lr": 0.05, "weight_decay": 0.01},
    ]


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> np.ndarray:
    for batch in batches():
        loss = nn.functional.mse_loss(model(batch), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if isinstance(scheduler, L.ReduceLROnPlateau):
            scheduler.step(loss.detach())
        else:
            scheduler.step()
    return np.concatenate([p.detach().numpy().reshape(-1) for p in model.top.parameters()])


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_groups_and_tables_as_torchs_own_parameters(
    name: str, kind: str, default_cluster: Cluster
) -> None:
    dense, options, rule = PAIRS[kind]
    model = Model(rule)
    inner = dense(groups_of(model), **options)
    optimizer = tr.DistributedOptimizer(inner, model)
    actual = fit(model, optimizer, SCHEDULERS[name](optimizer))
    rows = (
        default_cluster.client.pull({T_ROWS: np.arange(NUM_KEYS, dtype=np.uint64)})
        .rows[T_ROWS]
        .numpy()
    )
    plain = Plain()
    groups = [*groups_of(plain), {"params": plain.rows.parameters(), "lr": 0.2}]
    optimizer_of_torch = dense(groups, **options)
    expected = fit(plain, optimizer_of_torch, SCHEDULERS[name](optimizer_of_torch))
    np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=0)
    np.testing.assert_allclose(rows, plain.rows.weight.detach().numpy(), atol=1e-5, rtol=0)
    assert np.abs(rows - 0.2).max() > 100 * 1e-5


@pytest.mark.parametrize("dense", [torch.optim.Adam, torch.optim.Adadelta])
def test_values_of_the_dense_optimizer_are_not_those_of_tables(
    dense: Any, default_cluster: Cluster
) -> None:
    """Adam's betas once replaced a table's momentum without an error."""
    model, plain = Model(tr.optim.SGD(lr=0.2, momentum=0.9)), Plain()
    optimizer = tr.DistributedOptimizer(dense(model.top.parameters(), lr=0.0), model)
    fit(model, optimizer, SCHEDULERS["StepLR"](optimizer))
    momentum = torch.optim.SGD(
        [{"params": plain.rows.parameters()}, {"params": plain.top.parameters(), "lr": 0.0}],
        lr=0.2,
        momentum=0.9,
    )
    fit(plain, momentum, SCHEDULERS["StepLR"](momentum))
    rows = (
        default_cluster.client.pull({T_ROWS: np.arange(NUM_KEYS, dtype=np.uint64)})
        .rows[T_ROWS]
        .numpy()
    )
    np.testing.assert_allclose(rows, plain.rows.weight.detach().numpy(), atol=1e-5, rtol=0)


def test_two_workers_in_sync_step_with_the_rates_of_the_step() -> None:
    def work(cluster: Cluster) -> list[np.ndarray]:
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = tr.DistributedOptimizer(
            inner, model, strategy=tr.Strategy("sync"), cluster=cluster
        )
        scheduler = L.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)
        for step in range(STEPS):
            set_gradients(model, 2 * step + cluster.worker)
            optimizer.step(examples=8)
            if step < STEPS - 1:
                scheduler.step()
        optimizer.end_pass()
        cluster.client.coordinator.gather({}, [])
        optimizer.refresh()
        return weights_of(model)

    with Job(2) as job:
        one, two = job.run(2, work)
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = L.OneCycleLR(plain, max_lr=0.1, total_steps=STEPS)
    for step in range(STEPS):
        means = []
        for worker in range(2):
            set_gradients(model, 2 * step + worker)
            means.append([p.grad / 2 for p in model.parameters() if p.grad is not None])
        for parameter, *halves in zip(model.parameters(), *means, strict=True):
            parameter.grad = halves[0] + halves[1]
        plain.step()
        if step < STEPS - 1:
            scheduler.step()
    for first, second, expected in zip(one, two, weights_of(model), strict=True):
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, expected, atol=1e-5, rtol=0)


def test_a_trainer_steps_a_scheduler_after_each_batch_by_a_hook(default_cluster: Cluster) -> None:
    model = Model(tr.optim.SGD(lr=0.2))
    trainer = tr.Trainer(
        model,
        torch.optim.SGD(model.top.parameters(), lr=0.1),
        loss=nn.functional.mse_loss,
        progress=False,
    )
    per_batch = L.ExponentialLR(trainer.optimizer, 0.5)
    hook = trainer.optimizer.register_step_post_hook(lambda *_: per_batch.step())
    trainer.fit(batches()[:3])
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.1 / 8, 0.2 / 8]
    hook.remove()
    per_epoch = L.ConstantLR(trainer.optimizer, 0.5, total_iters=10)
    trainer.fit(batches())
    per_epoch.step()  # which warns where no step has been made
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1 / 16


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (tr.optim.FTRL(beta=2.0), "beta"),
        (tr.optim.FleetAdagrad(initial_g2sum=4.0), "initial_g2sum"),
    ],
)
def test_a_value_of_a_rule_has_its_own_name_beside_that_of_the_dense_optimizer(
    rule: tr.optim.Rule, name: str, default_cluster: Cluster
) -> None:
    model = Model(rule)
    dense = torch.optim.Adam(model.top.parameters(), lr=0.1, eps=1e-3)
    optimizer = tr.DistributedOptimizer(dense, model)
    of_dense, of_table = optimizer.param_groups
    assert values_of_group(of_table, 1)["eps"] == of_table[name]
    of_table[name] = 3.0
    saved = optimizer.state_dict()
    assert saved["param_groups"][1]["eps"] == 3.0
    assert name not in saved["param_groups"][1]
    of_table[name], of_dense["eps"] = 5.0, 0.5
    optimizer.load_state_dict(saved)
    assert (of_dense["eps"], of_table[name]) == (1e-3, 3.0)
