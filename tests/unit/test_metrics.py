"""AUC and LogLoss against exact references; how metrics read scores, labels and weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from trireme import _core, metrics
from trireme.errors import BadRequest
from trireme.metrics import AUC, LogLoss
from trireme.metrics.by_name import better_of


def exact_auc(scores, labels, weights=None) -> float:
    """The rank statistic: Mann-Whitney's U over the number of pairs, ties half."""
    weights = np.ones(len(scores)) if weights is None else np.asarray(weights, np.float64)
    order = np.argsort(scores, kind="stable")
    scores, labels, weights = np.asarray(scores)[order], np.asarray(labels)[order], weights[order]
    _, group = np.unique(scores, return_inverse=True)
    positives = np.bincount(group, weights * (labels == 1))
    negatives = np.bincount(group, weights * (labels == 0))
    below = np.cumsum(negatives) - negatives
    pairs = positives.sum() * negatives.sum()
    return float((positives * (below + negatives / 2)).sum() / pairs)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def drawn(seed: int, n: int, *, mean: float = 0.0, sd: float = 1.0):
    """Logits and labels drawn from them."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(mean, sd, n)
    return logits.astype(np.float32), (rng.random(n) < sigmoid(logits)).astype(np.float32)


@pytest.mark.parametrize(
    ("mean", "sd"), [(0, 1), (-3, 1), (-6, 0.5), (5, 1), (-2, 0.01), (0, 1e-3), (0, 30)]
)
def test_auc_of_a_million_scores_is_within_1e5_of_the_exact_one(mean, sd):
    logits, labels = drawn(1, 1_000_000, mean=mean, sd=sd)
    expected = exact_auc(logits, labels)
    auc = AUC()
    auc.update(logits, labels)
    assert auc.compute() == pytest.approx(expected, abs=1e-5)
    if sd == 1e-3:  # all probabilities within a few buckets of 1/2
        return
    probabilities = sigmoid(logits.astype(np.float64)).astype(np.float32)
    expected = exact_auc(probabilities, labels)
    auc = AUC(from_logits=False)
    auc.update(probabilities, labels)
    assert auc.compute() == pytest.approx(expected, abs=1e-5)


def test_auc_of_uniform_scores_and_of_ties():
    rng = np.random.default_rng(3)
    scores = rng.random(1_000_000).astype(np.float32)
    labels = (rng.random(1_000_000) < scores).astype(np.int64)
    auc = AUC(from_logits=False)
    auc.update(scores, labels)
    assert auc.compute() == pytest.approx(exact_auc(scores, labels), abs=1e-5)
    tied = np.round(scores, 1)
    auc.reset()
    auc.update(tied, labels)
    assert auc.compute() == pytest.approx(exact_auc(tied, labels), abs=1e-12)


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 300.0, 1e9])
def test_auc_tells_small_and_large_logits_apart(scale):
    for sign in (1, -1):
        auc = AUC()
        auc.update(sign * scale * np.array([1.0, 1.01, 1.2, 2.0]), np.array([0, 0, 1, 1]))
        assert auc.compute() == (sign > 0)
    rare = AUC(from_logits=False)
    rare.update(np.array([1e-15, 1e-13, 1e-12, 2e-12]), np.array([0, 0, 1, 1]))
    assert rare.compute() == 1.0


def test_auc_follows_weights():
    rng = np.random.default_rng(4)
    logits, labels = drawn(5, 20_000)
    weights = rng.integers(0, 4, 20_000)
    auc = AUC()
    auc.update(logits, labels, weights)
    assert auc.compute() == pytest.approx(exact_auc(logits, labels, weights), abs=1e-4)
    doubled = AUC()
    doubled.update(np.repeat(logits, weights), np.repeat(labels, weights))
    assert doubled.compute() == auc.compute(), "a weight of 2 is the same example twice"


def test_more_buckets_are_closer_to_the_exact_area():
    logits, labels = drawn(6, 100_000)
    expected = exact_auc(logits, labels)
    errors = []
    for num_buckets in (2, 64, 1 << 12):
        auc = AUC(num_buckets=num_buckets)
        auc.update(logits, labels)
        errors.append(abs(auc.compute() - expected))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.01


def test_a_state_is_a_copy():
    auc = AUC(num_buckets=4)
    auc.update(np.array([1.0]), np.array([1]))
    state = auc.state()
    auc.update(np.array([1.0]), np.array([1]))
    assert state["positives"].sum() == 1
    auc.reset()
    assert auc.state()["positives"].sum() == 0


def test_log_loss_equals_torch():
    logits, labels = drawn(8, 5000, sd=5)
    x, y = torch.from_numpy(logits), torch.from_numpy(labels)
    expected = functional.binary_cross_entropy_with_logits(x.double(), y.double()).item()
    metric = LogLoss()
    metric.update(x, y)
    assert metric.compute() == pytest.approx(expected, rel=1e-12)
    metric = LogLoss(from_logits=False)
    metric.update(torch.sigmoid(x.double()), y)
    assert metric.compute() == pytest.approx(expected, rel=1e-5)
    weights = torch.rand(5000)
    metric = LogLoss()
    metric.update(x, y, weights)
    losses = functional.binary_cross_entropy_with_logits(x.double(), y.double(), reduction="none")
    expected = ((losses * weights.double()).sum() / weights.double().sum()).item()
    assert metric.compute() == pytest.approx(expected, rel=1e-12)


def test_log_loss_is_finite_at_the_ends():
    metric = LogLoss(from_logits=False)
    metric.update(np.array([0.0, 1.0]), np.array([1, 0]))
    assert metric.compute() == pytest.approx(24 * math.log(2))
    metric = LogLoss()
    metric.update(np.array([1e30, -1e30]), np.array([1, 0]))
    assert metric.compute() == 0


@pytest.mark.parametrize("make", [AUC, LogLoss])
def test_two_columns_are_the_outputs_of_cross_entropy(make):
    torch.manual_seed(9)
    outputs = torch.randn(500, 2)
    labels = torch.randint(0, 2, (500,))
    metric = make()
    metric.update(outputs, labels)
    probabilities = make(from_logits=False)
    probabilities.update(outputs.softmax(1), labels)
    if make is LogLoss:
        expected = functional.cross_entropy(outputs.double(), labels).item()
        tolerance = 1e-6
    else:
        expected = exact_auc((outputs[:, 1] - outputs[:, 0]).numpy(), labels.numpy())
        tolerance = 1e-4
    assert metric.compute() == pytest.approx(expected, abs=tolerance)
    assert probabilities.compute() == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("make", [AUC, LogLoss])
def test_any_form_of_the_same_values_counts_the_same(make):
    logits, labels = drawn(10, 100)
    logits = torch.from_numpy(logits).bfloat16().float()  # bfloat16 holds these
    labels = torch.from_numpy(labels)
    values = set()
    for scores in (
        logits,
        logits.bfloat16().requires_grad_(),
        logits[:, None],
        logits.double().numpy(),
        logits.repeat_interleave(2)[::2],
    ):
        for targets in (labels, labels.bool(), labels[:, None].long(), labels.numpy()):
            metric = make()
            metric.update(scores, targets)
            values.add(metric.compute())
    assert len(values) == 1


@pytest.mark.parametrize("make", [AUC, LogLoss])
def test_nothing_to_compute_is_nan(make):
    metric = make()
    assert math.isnan(metric.compute())
    metric.update(np.zeros(0), np.zeros(0))
    assert math.isnan(metric.compute())
    metric.update(np.ones(3), np.ones(3), np.zeros(3))
    assert math.isnan(metric.compute())
    metric.update(np.ones(3), np.array([0, 1, 1]))
    assert not math.isnan(metric.compute())
    metric.reset()
    assert math.isnan(metric.compute())


ONE = np.ones(2)


@pytest.mark.parametrize("make", [AUC, LogLoss])
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((np.array([1, np.nan]), ONE), {}, "expected finite logits, found nan at 1"),
        ((np.array([np.inf, 1]), ONE), {}, "expected finite logits, found inf at 0"),
        ((ONE, np.array([1, 2])), {}, "expected labels 0 or 1, found 2 at 1"),
        ((ONE, np.array([0.5, 1])), {}, "expected labels 0 or 1, found 0.5 at 0"),
        ((ONE, np.array([np.nan, 1])), {}, "expected labels 0 or 1, found nan at 0"),
        ((ONE, ONE, -ONE), {}, "expected finite weights >= 0, found -1.0 at 0"),
        ((ONE, ONE, ONE * np.inf), {}, "expected finite weights >= 0, found inf at 0"),
        ((ONE, np.ones(3)), {}, "expected 2 labels, one per score, found 3"),
        ((ONE, ONE, np.ones(1)), {}, "expected 2 weights, one per score, found 1"),
        ((np.ones((2, 3)), ONE), {}, r"\(B,\), \(B, 1\) or \(B, 2\), found \(2, 3\)"),
        ((ONE, np.ones((2, 2))), {}, r"labels of shape \(B,\) or \(B, 1\), found \(2, 2\)"),
        ((np.float32(1), ONE), {}, r"found \(\)"),
        ((np.array(["a", "b"]), ONE), {}, "expected numbers as scores, found <U1"),
        ((ONE * 1j, ONE), {}, "expected numbers as scores, found complex128"),
        ((ONE * 3, ONE), {"from_logits": False}, r"in \[0, 1\] \(for logits: .*\), found 3.0 at 0"),
        ((ONE * np.nan, ONE), {"from_logits": False}, "found nan at 0"),
    ],
)
def test_bad_values_are_refused_and_nothing_is_added(make, arguments, options, message):
    metric = make(**options)
    with pytest.raises(BadRequest, match=f"{make.__name__}.update: .*{message}"):
        metric.update(*arguments)
    assert math.isnan(metric.compute())
    assert all(
        (metric.state()[name] == array).all() for name, array in make(**options).state().items()
    )


def test_states_of_another_kind_are_refused():
    with pytest.raises(BadRequest, match=r"expected from_logits \[1\], found \[0\]"):
        AUC().merge(AUC(from_logits=False).state())
    with pytest.raises(BadRequest, match=r"positives as float64 \(4,\), found float64 \(8,\)"):
        AUC(num_buckets=4).merge(AUC(num_buckets=8).state())
    with pytest.raises(
        BadRequest, match=r"expected a state with \['from_logits', 'neg.* found \['"
    ):
        AUC().merge(LogLoss().state())
    for num_buckets in (0, 1, 3, -2):
        with pytest.raises(BadRequest, match=f"num_buckets >= 2 and even, found {num_buckets}"):
            AUC(num_buckets=num_buckets)


def test_metrics_have_names():
    assert (AUC().name, LogLoss().name, AUC(name="ctr_auc").name) == ("auc", "log_loss", "ctr_auc")


def test_core_refuses_arrays_that_do_not_fit():
    f32, f64 = np.ones(3, np.float32), np.zeros(4)
    with pytest.raises(BadRequest, match="one even size, found 4 and 3"):
        _core.histogram_add(f32, f32, None, True, f64, np.zeros(3))
    with pytest.raises(BadRequest, match="one even size, found 3 and 3"):
        _core.auc_area(np.zeros(3), np.zeros(3))
    with pytest.raises(BadRequest, match=r"as scores \(3\), found 2 and 3"):
        _core.histogram_add(f32, f32[:2], None, True, f64, np.zeros(4))
    with pytest.raises(BadRequest, match=r"as scores \(3\), found 3 and 1"):
        _core.histogram_add(f32, f32, f32[:1], True, f64, np.zeros(4))
    read_only = np.zeros(4)
    read_only.flags.writeable = False
    for arguments in [
        (f32.astype(np.float64), f32, None, True, f64, np.zeros(4)),
        (f32, f32, f32[None], True, f64, np.zeros(4)),
        (np.ones(6, np.float32)[::2], f32, None, True, f64, np.zeros(4)),
        (f32, f32, None, True, f64, read_only),
        (f32, f32, None, True, np.zeros(4, np.float32), f64),
    ]:
        with pytest.raises(TypeError):
            _core.histogram_add(*arguments)


def test_which_way_is_better_is_said_of_each_metric() -> None:
    names = [cls.NAME for cls in vars(metrics).values() if hasattr(cls, "NAME")]
    lower = ["bucket_error", "log_loss", "mae", "normalized_entropy", "rmse"]
    higher = ["accuracy", "auc", "gauc", "pr_auc"]
    several_or_neither = [
        "actual_ctr",
        "at_threshold",
        "copc",
        "ctr_metric_bundle",
        "predicted_ctr",
    ]
    assert sorted(names) == sorted(lower + higher + several_or_neither)
    expected = {**dict.fromkeys(lower, "min"), **dict.fromkeys(higher, "max")}
    assert {name: better_of(name) for name in names} == {name: expected.get(name) for name in names}
    assert better_of("of the user") is None
