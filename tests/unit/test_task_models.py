"""Multi-task models learn each of their tasks, and follow their formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from examples.planted.behaviour import clicks_and_conversions
from examples.planted.clicks import exact_auc
from trireme.config import Config
from trireme.data import ArrayDataset, Batch, Schema
from trireme.errors import BadRequest
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.models import AITM, ESCM2, PLE, DSelectK, MMoE, ShareBottom, zoo
from trireme.models.aitm import CalibratedLogLoss
from trireme.models.dselect_k import SelectionGate, class_losses
from trireme.models.escm2 import CounterfactualLoss
from trireme.models.inputs import Concatenated, Numbers
from trireme.models.tasks import Experts, Gate, LogLosses

FEATURES = ("a", "b", "c")
TASKS = ("click", "conversion")


def rows() -> tr.Table:
    return tr.Table("rows", dim=8, optimizer=tr.optim.Adam(lr=0.02))


def inputs() -> Concatenated:
    return Concatenated(rows(), features=FEATURES, num_dense=0)


MODELS: dict[str, Any] = {
    "mmoe": (lambda: MMoE(inputs(), tasks=TASKS, num_experts=4), LogLosses(TASKS)),
    "ple": (lambda: PLE(inputs(), tasks=TASKS, num_levels=2), LogLosses(TASKS)),
    "share_bottom": (lambda: ShareBottom(inputs(), tasks=TASKS, bottom_size=32), LogLosses(TASKS)),
    "aitm": (
        lambda: AITM(inputs(), layers=(32, 16), dropouts=(0.0, 0.0)),
        CalibratedLogLoss(),
    ),
    "escm2_dr": (
        lambda: ESCM2(rows(), expert_size=32, layers=(16,), features=FEATURES, num_dense=0),
        CounterfactualLoss(True, 0.1, 1.0),
    ),
    "escm2_ipw": (
        lambda: ESCM2(
            rows(), expert_size=32, layers=(16,), imputes=False, features=FEATURES, num_dense=0
        ),
        CounterfactualLoss(False, 0.1, 1.0),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_clicks_and_conversions(name: str) -> None:
    torch.manual_seed(0)
    labels = [tr.data.Label("click"), tr.data.Label("conversion")]
    schema = Schema([*labels, *map(tr.data.Sparse, FEATURES)])
    train_set, test_set = (
        clicks_and_conversions(n, seed=s, features=FEATURES) for n, s in ((20_000, 1), (8000, 2))
    )
    dataset = ArrayDataset(train_set.columns, schema=schema, batch_size=200)
    batch = next(iter(ArrayDataset(test_set.columns, schema=schema, batch_size=1 << 30)))
    make, loss = MODELS[name]
    model = make()
    with embedded() as cluster:
        set_default(cluster)
        trainer = tr.Trainer(
            model,
            torch.optim.Adam(model.parameters(), lr=0.01),
            loss=loss,
            label=None,
            progress=False,
            cluster=cluster,
        )
        trainer.fit(dataset, epochs=2 if name.startswith("escm2") else 1)
        with torch.no_grad():
            outputs = model.eval()(batch)
    named = ("ctr", "ctcvr") if name.startswith("escm2") else TASKS
    for output, label, margin in zip(named, TASKS, (0.02, 0.04), strict=True):
        is_positive = batch[label].numpy() > 0
        best = exact_auc(test_set.logits[label], is_positive)
        assert best - margin < exact_auc(outputs[output].numpy(), is_positive) < best + 0.01


def test_a_gate_mixes_experts() -> None:
    x = torch.randn(3, 5)
    experts, gate = Experts(5, 4, 2), Gate(5, 4)
    nn.init.normal_(experts.bias_EH)
    made = torch.stack(
        [
            torch.relu(x @ weight + bias)
            for weight, bias in zip(experts.weight_EWH, experts.bias_EH, strict=True)
        ],
        1,
    )
    torch.testing.assert_close(experts(x), made)
    shares = torch.softmax(gate.shares(x), 1)
    expected = sum(shares[:, e, None] * made[:, e] for e in range(4))
    torch.testing.assert_close(gate(x, made), expected)


def test_ple_keeps_the_experts_of_a_task_from_the_others() -> None:
    model = PLE(Numbers("x", 3), tasks=("a", "b"), num_levels=2, num_experts=1, num_shared=1)
    batch = Batch({"x": torch.randn(4, 3)})
    before = model(batch)
    with torch.no_grad():  # of the last level, which no shared gate mixes any more
        model.levels[1].own[0].bias_EH += 1
    after = model(batch)
    assert not torch.equal(after["a"], before["a"])
    assert torch.equal(after["b"], before["b"])
    with torch.no_grad():  # of the first level, whose shared gate mixes it for all
        model.levels[0].own[0].bias_EH += 1
    assert not torch.equal(model(batch)["b"], after["b"])


def test_counterfactual_losses_equal_their_formulas() -> None:
    click, conversion = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 0.0])
    batch = Batch({"click": click, "conversion": conversion})
    outputs = {
        "ctr": torch.tensor([0.3, -1.0, -6.0], requires_grad=True),
        "cvr": torch.tensor([0.2, 0.5, -0.4]),
        "ctcvr": torch.tensor([0.1, -2.0, -3.0]),
        "imputed": torch.tensor([0.7, 0.2, 0.9]),
    }
    log_loss = nn.functional.binary_cross_entropy_with_logits
    w = torch.tensor([1 / float(torch.sigmoid(torch.tensor(0.3))), 0.0, 15.0])
    d = log_loss(outputs["cvr"], conversion, reduction="none")
    e = outputs["imputed"]
    rest = log_loss(outputs["ctr"], click) + 0.5 * log_loss(outputs["ctcvr"], conversion)
    for is_doubly_robust, risk in ((False, w * d), (True, e + w * (d - e) + w * (d - e) ** 2)):
        loss = CounterfactualLoss(is_doubly_robust, 0.2, 0.5)(outputs, batch)
        torch.testing.assert_close(loss, rest + 0.2 * risk.mean())
    (slope,) = torch.autograd.grad(loss, outputs["ctr"])
    np.testing.assert_allclose(slope, (torch.sigmoid(outputs["ctr"].detach()) - click) / 3, 1e-5)


def test_aitm_hands_on_what_the_tower_of_clicks_knows() -> None:
    model = AITM(Numbers("x", 3), layers=(4, 2), dropouts=(0.5, 0.5)).eval()
    x = torch.randn(5, 3)
    outputs = model(Batch({"x": x}))
    click, conversion = (tower(x) for tower in model.towers)
    torch.testing.assert_close(outputs["click"], model.heads[0](click)[:, 0])
    both = torch.stack([conversion, model.hand_on(click)], 1)
    q, k, v = (both @ part.T for part in model.queries_keys_values.weight.chunk(3))
    shares = torch.softmax((q * k).sum(2) / 2**0.5, 1)
    expected = model.heads[1](shares[:, :1] * v[:, 0] + shares[:, 1:] * v[:, 1])[:, 0]
    torch.testing.assert_close(outputs["conversion"], expected)
    labels = {"click": torch.ones(5), "conversion": torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])}
    p, r = (torch.sigmoid(outputs[task]) for task in TASKS)
    loss = CalibratedLogLoss(0.6)(outputs, Batch(labels))
    rest = LogLosses(TASKS)(outputs, Batch(labels))
    torch.testing.assert_close(loss, rest + 0.6 * (r - p).clamp(min=0).mean())
    with pytest.raises(BadRequest, match="AITM: expected 2 dropouts, found 1"):
        AITM(Numbers("x", 3), layers=(4, 2), dropouts=(0.5,))


def test_a_gate_selects_as_many_experts_as_it_has_selectors() -> None:
    gate = SelectionGate(8, 2)
    shares = gate().detach()
    assert float(shares.sum()) == pytest.approx(1)
    assert (shares > 0.05).all()
    with torch.no_grad():
        gate.selectors_KN.copy_(torch.tensor([[0.7, -0.6, 0.9], [-0.8, 0.25, -3.0]]))
        first, second = torch.softmax(gate.shares_K, 0).tolist()
    bit = 0.5 + 1.5 * 0.25 - 2 * 0.25**3
    expected = {5: first, 2: second * bit, 0: second * (1 - bit)}
    assert gate().tolist() == pytest.approx([expected.get(e, 0.0) for e in range(8)])
    with pytest.raises(BadRequest, match="expected a power of 2 experts, found 6"):
        SelectionGate(6, 2)


def test_dselect_k_learns_both_digits_of_an_image() -> None:
    torch.manual_seed(0)
    patterns = torch.randn(2, 10, 256)

    def images(num: int) -> Batch:
        left, right = torch.randint(0, 10, (2, num))
        image = patterns[0, left] + patterns[1, right] + torch.randn(num, 256) / 2
        return Batch({"input": image, "label_left": left.float(), "label_right": right.float()})

    model = DSelectK(side=16, num_experts=2, expert_size=20, k=1, hidden=20)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        batch = images(64)
        optimizer.zero_grad()
        class_losses(model(batch), batch).backward()
        optimizer.step()
    tested = images(400)
    for task, logits in model.eval()(tested).items():
        assert (logits.argmax(1) == tested[task]).float().mean() > 0.8


def test_census_inputs_are_numbers_and_two_labels() -> None:
    for name in ("mmoe", "ple", "share_bottom"):
        recipe = zoo.load(name).create(Config({"hyper_parameters": {"feature_size": 7}}))
        assert recipe.schema.names == ("input", "income", "marital")
        outputs = recipe.model(Batch({"input": torch.randn(4, 7)}))
        assert {key: value.shape for key, value in outputs.items()} == {
            "income": (4,),
            "marital": (4,),
        }


def test_numbers_of_tasks_and_inputs_that_do_not_fit_are_refused() -> None:
    for name, values, message in (
        ("mmoe", {"gate_num": 3}, "gate_num: expected 2, for the tasks click, conversion, found 3"),
        ("ple", {"task_num": 2, "tasks": ["a"]}, "task_num: expected 1, for the tasks a, found 2"),
        ("escm2", {"feature_size": 7}, "feature_size: expected 247, .* found 7"),
        ("aitm", {"feature_vocabulary": ["a"]}, r"expected a list of \[name, number of ids\]"),
        ("aitm", {"drop_prob": [1]}, "drop_prob: expected a list of numbers >= 0 and < 1, found"),
        ("dselect_k", {"feature_size": 300}, "expected the square of 16 or more, found 300"),
        ("dselect_k", {"gate_num": 3}, "gate_num: expected 2, found 3"),
    ):
        with pytest.raises(BadRequest, match=message):
            zoo.load(name).create(Config({"hyper_parameters": values}))
    with pytest.raises(
        BadRequest, match="expected counterfact_mode as one of DR, IPW, found 'IPS'"
    ):
        zoo.load("escm2").create(Config({"runner": {"counterfact_mode": "IPS"}}))
