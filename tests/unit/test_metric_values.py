"""Every metric equals its definition in NumPy, and merges to the same bits in any order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tests.long import sampled
from tests.seeds import SEED
from tests.unit.test_metrics import drawn, exact_auc, sigmoid
from trireme import _core, metrics
from trireme.data import Ragged, Strings
from trireme.errors import BadRequest, ResourceExhausted
from trireme.metrics import (
    AUC,
    COPC,
    GAUC,
    MAE,
    PRAUC,
    RMSE,
    Accuracy,
    ActualCTR,
    BucketError,
    CTRMetricBundle,
    LogLoss,
    NormalizedEntropy,
    PrecisionRecall,
    PredictedCTR,
)

Array = np.ndarray[Any, Any]


def log_loss(p: Array, y: Array, w: Array) -> float:
    return float((-w * np.where(y == 1, np.log(p), np.log1p(-p))).sum() / w.sum())


def normalized_entropy(p: Array, y: Array, w: Array) -> float:
    rate = np.full(len(y), (w * y).sum() / w.sum())
    return log_loss(p, y, w) / log_loss(rate, y, w)


def average_precision(p: Array, y: Array, w: Array) -> float:
    total = 0.0
    for threshold in np.unique(p[w * y > 0]):
        precision = (w * y)[p >= threshold].sum() / w[p >= threshold].sum()
        total += precision * (w * y)[p == threshold].sum()
    return float(total / (w * y).sum())


def bucket_error(p: Array, y: Array, w: Array) -> float:
    """Over distinct predictions: the definition where no two share a bucket of ours."""
    errors = weights = begin = n = expected = clicks = 0.0
    values, at = np.unique(p, return_inverse=True)
    for value, total, hits in zip(values, np.bincount(at, w), np.bincount(at, w * y), strict=True):
        if total > 0 and (n == 0 or value - begin > 0.01):
            begin, n, expected, clicks = value, 0.0, 0.0, 0.0
        n, expected, clicks = n + total, expected + total * value, clicks + hits
        if n > 0 and math.sqrt((1 - expected / n) / expected) < 0.05:
            errors += abs(clicks / expected - 1) * n
            weights += n
            n = 0.0
    return errors / weights


def bundle(p: Array, y: Array, w: Array) -> dict[str, float]:
    n = w.sum()
    return {
        "mae": (w * abs(p - y)).sum() / n,
        "rmse": math.sqrt((w * (p - y) ** 2).sum() / n),
        "predicted_ctr": (w * p).sum() / n,
        "actual_ctr": (w * y).sum() / n,
        "copc": (w * y).sum() / (w * p).sum(),
        "mean_q": (w * sigmoid(p)).sum() / n,
        "ins_num": n,
    }


def precision_recall(p: Array, y: Array, w: Array) -> dict[str, float]:
    hits = (w * y)[p >= 0.3].sum()
    return {"precision": hits / w[p >= 0.3].sum(), "recall": hits / (w * y).sum()}


def accuracy(p: Array, y: Array, w: Array) -> float:
    return float((w * ((p >= 0.3) == (y == 1))).sum() / w.sum())


def gauc(p: Array, y: Array, w: Array, users: Array) -> float:
    areas, impressions = [], []
    for user in np.unique(users):
        is_own = users == user
        if len(np.unique(y[is_own & (w > 0)])) == 2:
            areas.append(exact_auc(p[is_own], y[is_own], w[is_own]))
            impressions.append(w[is_own].sum())
    return float(np.average(areas, weights=impressions))


# class, options -> the definition; a tolerance where scores are put into buckets.
DEFINITIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], float]] = {
    "AUC": (AUC, exact_auc, 1e-4),
    "PRAUC": (PRAUC, average_precision, 1e-4),
    "LogLoss": (LogLoss, log_loss, 1e-6),
    "NormalizedEntropy": (NormalizedEntropy, normalized_entropy, 1e-6),
    "MAE": (MAE, lambda p, y, w: bundle(p, y, w)["mae"], 1e-12),
    "RMSE": (RMSE, lambda p, y, w: bundle(p, y, w)["rmse"], 1e-12),
    "Accuracy": (lambda **o: Accuracy(0.3, **o), accuracy, 1e-12),
    "PredictedCTR": (PredictedCTR, lambda p, y, w: bundle(p, y, w)["predicted_ctr"], 1e-12),
    "ActualCTR": (ActualCTR, lambda p, y, w: bundle(p, y, w)["actual_ctr"], 1e-12),
    "COPC": (COPC, lambda p, y, w: bundle(p, y, w)["copc"], 1e-12),
    "BucketError": (BucketError, bucket_error, 5e-3),
    "CTRMetricBundle": (CTRMetricBundle, bundle, 1e-12),
    "PrecisionRecall": (lambda **o: PrecisionRecall(0.3, **o), precision_recall, 1e-12),
    "GAUC": (GAUC, gauc, 1e-12),
}
ALL = sorted(DEFINITIONS)


def update(metric: Any, *columns: Array) -> None:
    """Scores, labels, weights, and users where the metric takes them."""
    *rest, users = columns
    metric.update(*rest, **({"users": users} if isinstance(metric, GAUC) else {}))


def examples(seed: int, n: int, from_logits: bool) -> tuple[Array, Array, Array, Array]:
    rng = np.random.default_rng(seed)
    logits, labels = drawn(seed, n, mean=-1.0)
    logits = np.round(logits, 2).astype(np.float32)  # so that there are ties
    scores = logits if from_logits else sigmoid(logits.astype(np.float64)).astype(np.float32)
    return scores, labels, rng.integers(0, 4, n).astype(np.float32), rng.integers(0, n // 20, n)


def test_every_metric_is_defined_here() -> None:
    elsewhere = {"TopK"}  # of candidates, not of scores of one label: test_top_k.py
    assert set(ALL) == set(metrics.__all__) - {"Metric"} - elsewhere


@sampled(keep=len(ALL))
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_a_metric_equals_its_definition(name: str, from_logits: bool, weighted: bool) -> None:
    make, definition, tolerance = DEFINITIONS[name]
    num = 300_000 if name == "BucketError" else 10_000  # so that its groups are complete
    scores, labels, weights, users = examples(1, num, from_logits)
    metric = make(from_logits=from_logits)
    chosen = weights if weighted else None
    update(metric, scores, labels, chosen, users)
    p = scores.astype(np.float64)
    columns = [sigmoid(p) if from_logits else p, labels.astype(np.float64)]
    columns += [weights.astype(np.float64) if weighted else np.ones(len(p))]
    expected = definition(*columns, *([users] if name == "GAUC" else []))
    assert metric.compute() == pytest.approx(expected, rel=tolerance)
    if not isinstance(expected, dict):
        assert not math.isnan(expected)


@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
@pytest.mark.parametrize("name", ALL)
def test_any_split_and_any_order_of_merging_give_the_same_state(name: str, seed: int) -> None:
    make, _, _ = DEFINITIONS[name]
    print(f"seed {seed}: repeat with TRIREME_TEST_SEED={seed}")
    rng = np.random.default_rng(seed)
    num_workers = int(rng.integers(1, 7))
    columns = examples(seed, 3000, True)
    whole = make()
    update(whole, *columns)
    worker_of = rng.integers(0, num_workers, 3000)
    parts = [make() for _ in range(num_workers)]
    for worker, part in enumerate(parts):
        mine = rng.permutation(np.flatnonzero(worker_of == worker))
        for batch in np.array_split(mine, rng.integers(1, 9)):
            update(part, *(column[batch] for column in columns))
    states = [as_from_the_wire(part.state()) for part in parts]
    while len(states) > 1:  # a random tree of merges
        one, other = (states.pop(rng.integers(len(states))) for _ in range(2))
        merged = make()
        merged.merge(one)
        merged.merge(other)
        states.append(as_from_the_wire(merged.state()))
    last = make()
    last.merge(states[0])
    expected, actual = whole.state(), last.state()
    for key, array in expected.items():
        np.testing.assert_array_equal(actual[key], array)
    np.testing.assert_equal(last.compute(), whole.compute())
    last.reset()
    assert all((last.state()[key] == array).all() for key, array in make().state().items())


def as_from_the_wire(state: Mapping[str, Array]) -> dict[str, Array]:
    for array in state.values():
        array.flags.writeable = False
    return dict(state)


@pytest.mark.parametrize("name", ALL)
def test_nothing_to_compute_is_nan_and_options_are_attributes(name: str) -> None:
    make, _, _ = DEFINITIONS[name]
    metric = make(name="mine", output="click", label="clicked", weights="w")
    assert (metric.name, metric.output, metric.label) == ("mine", "click", "clicked")
    users = {"users": "user"} if name == "GAUC" else {}
    assert metric.columns == {"weights": "w", **users}
    assert make().columns == users
    assert (make().output, make().label) == (None, None)
    nothing = np.zeros(0)
    update(metric, nothing, nothing, None, np.zeros(0, np.int64))
    computed = metric.compute()
    values = list(computed.values()) if isinstance(computed, dict) else [computed]
    assert all(math.isnan(value) or value == 0 for value in values)
    with pytest.raises(BadRequest, match=r"update: expected labels 0 or 1, found 2\.0 at 0"):
        update(metric, np.zeros(1), np.full(1, 2.0), None, np.zeros(1, np.int64))
    with pytest.raises(BadRequest, match=r"from_logits \[1\], found \[0\]"):
        make().merge(make(from_logits=False).state())


@pytest.mark.parametrize("make", [MAE, RMSE])
def test_errors_of_regression_take_any_numbers(make: Any) -> None:
    metric = make(from_logits=None)
    metric.update(torch.tensor([3.0, -1.0, 7.5]), torch.tensor([1.0, -1.0, 9.5]))
    assert metric.compute() == pytest.approx({MAE: 4 / 3, RMSE: math.sqrt(8 / 3)}[make])
    with pytest.raises(BadRequest, match="expected finite labels, found nan at 0"):
        metric.update(np.zeros(1), np.full(1, np.nan))
    with pytest.raises(BadRequest, match="AUC: expected from_logits True or False, found None"):
        AUC(from_logits=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ALL)
def test_numbers_that_float32_does_not_hold_are_refused_and_nothing_is_added(name: str) -> None:
    metric = DEFINITIONS[name][0]()
    ones, huge, users = np.ones(1), np.full(1, 1e300), np.zeros(1, np.int64)
    with pytest.raises(BadRequest, match=r"update: expected finite logits, found 1e\+300 at 0"):
        update(metric, huge, ones, None, users)
    with pytest.raises(BadRequest, match=r"update: .* weights >= 0, found 1e\+300 at 0"):
        update(metric, ones, ones, huge, users)
    for key, array in DEFINITIONS[name][0]().state().items():
        np.testing.assert_array_equal(metric.state()[key], array)


def test_thresholds_are_checked_and_belong_to_the_state() -> None:
    metric = Accuracy()
    metric.update(np.array([0.0, -1e-6]), np.array([1, 0]))
    assert metric.compute() == 1.0, "sigmoid(0) is 1/2, which is at the threshold"
    with pytest.raises(BadRequest, match=r"Accuracy.merge: expected threshold \[0.5\], .*\[0.25\]"):
        metric.merge(Accuracy(0.25).state())
    with pytest.raises(BadRequest, match=r"in \[0, 1\], found 1.5"):
        PrecisionRecall(1.5)


def test_bucket_error_agrees_with_paddles_buckets_where_predictions_are_dense() -> None:
    """Paddle's: buckets even in p that stand for their lower edge; a million of them here."""
    logits, _ = drawn(5, 400_000, mean=-2.0)
    p = sigmoid(logits.astype(np.float64))
    labels = (np.random.default_rng(6).random(len(p)) < np.minimum(1, 1.2 * p)).astype(np.float32)
    metric = BucketError()
    metric.update(logits, labels)
    edges = np.floor(p * 1_000_000) / 1_000_000
    assert metric.compute() == pytest.approx(bucket_error(edges, labels, np.ones(len(p))), rel=0.02)
    assert metric.compute() == pytest.approx(0.19, abs=0.03)


def test_exact_sums_are_those_of_integers() -> None:
    seed = 8
    rng = np.random.default_rng(seed)
    values = rng.normal(size=999) * 2.0 ** rng.integers(-900, 900, 999)
    limbs = np.zeros(_core.EXACT_LIMBS, np.int64)
    for part in np.array_split(values, 10):
        _core.exact_add(part, limbs)
    actual = sum(int(digit) << (32 * i) for i, digit in enumerate(limbs))
    assert actual == sum(int(n * 2**1074 // d) for n, d in map(float.as_integer_ratio, values))
    assert (limbs[:-1] >= 0).all()
    assert (limbs[:-1] < 2**32).all()
    with pytest.raises(BadRequest, match="expected finite values, found nan"):
        _core.exact_add(np.array([1.0, np.nan]), limbs)
    with pytest.raises(BadRequest, match="expected 67 limbs, found 66"):
        _core.exact_add(np.ones(1), limbs[:-1].copy())


# ---- GAUC: users of every form, and the bound of its memory ----


def test_users_of_any_form_are_the_same_users() -> None:
    scores, labels = np.array([0.0, 1, 2, 3, 4]), np.array([0, 1, 1, 0, 1])
    users = torch.tensor([7, -1, 7, -1, 7])
    names = [b"ann", b"", b"ann", b"", b"ann"]
    text = torch.frombuffer(bytearray(b"".join(names)), dtype=torch.uint8)
    strings = Strings(text, torch.tensor([0, 3, 3, 6, 6, 9]))
    ragged = Ragged(torch.cat([torch.tensor([5, 5]), users]), torch.arange(2, 8))
    values = set()
    for form in (users, users[:, None], users.numpy().view(np.uint64), strings, ragged):
        metric = GAUC()
        metric.update(scores, labels, users=form)
        values.add(metric.compute())
    assert values == {(3 * 1.0 + 2 * 0.0) / 5}


@pytest.mark.parametrize(
    ("users", "message"),
    [
        (torch.tensor([1]), "expected 2 users, one per score, found 1"),
        (torch.tensor([1.0, 2.0]), r"integers of shape .* found float32 of shape \(2,\)"),
        (np.zeros((2, 2), np.int64), r"found int64 of shape \(2, 2\)"),
        (Ragged(torch.tensor([1, 2]), torch.tensor([0, 2, 2])), "one user .* found 2 at 0"),
        (Ragged(torch.tensor([1]), torch.tensor([0, 1, 1])), "found 0 at 1; fill in those that"),
    ],
)
def test_wrong_users_are_refused_and_nothing_is_added(users: Any, message: str) -> None:
    metric = GAUC()
    with pytest.raises(BadRequest, match=message):
        metric.update(np.ones(2), np.ones(2), users=users)
    assert len(metric.state()["users"]) == 0


def test_gauc_names_its_limit_and_stays_usable() -> None:
    metric = GAUC(max_pairs=100)
    users = np.arange(60)
    for _ in range(3):
        metric.update(np.zeros(60), np.ones(60), users=users)
    assert len(metric.state()["users"]) == 60, "equal pairs are one"
    more = GAUC()
    more.update(np.zeros(60), np.zeros(60), users=users + 30)
    metric.merge(more.state())
    assert metric.compute() == 0.5
    far = GAUC()
    far.update(np.zeros(60), np.zeros(60), users=users + 100)
    with pytest.raises(ResourceExhausted, match=r"merge: .*max_pairs=100 .* found 150; raise max"):
        metric.merge(far.state())
    assert metric.compute() == 0.5
    num = (1 << 16) + 1
    with pytest.raises(ResourceExhausted, match="update: expected at most max_pairs=100"):
        metric.update(np.zeros(num), np.zeros(num), users=np.arange(num))
    assert metric.compute() == 0.5
    state = far.state()
    with pytest.raises(BadRequest, match=r"scores as float32 \(60,\), found float32 \(59,\)"):
        metric.merge({**state, "scores": state["scores"][1:]})
    with pytest.raises(BadRequest, match="max_pairs as an integer >= 1, found 0"):
        GAUC(max_pairs=0)
