"""TopK: recall, hit rate, NDCG and MRR of the highest scores, merged over workers."""

from __future__ import annotations

import math

import pytest
import torch

from trireme.data.batch import Ragged
from trireme.errors import BadRequest
from trireme.metrics import TopK

SCORES = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0], [1.0, 4.0, 3.0, 2.0]])


def test_one_right_candidate_for_each_example() -> None:
    metric = TopK(2)
    metric.update(SCORES, torch.tensor([1.0, 3.0, 0.0]))  # second, first, last
    figures = metric.compute()
    assert figures["recall"] == figures["hit_rate"] == pytest.approx(2 / 3)
    assert figures["mrr"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert figures["ndcg"] == pytest.approx((1 / math.log2(3) + 1 + 0) / 3)
    assert metric.name == "top_2"


def test_several_right_candidates_and_examples_without_any() -> None:
    right = Ragged(torch.tensor([0, 1, 2, 3, 0]), torch.tensor([0, 3, 5, 5]))
    metric = TopK(2)
    metric.update(SCORES, right)
    figures = metric.compute()
    assert figures["recall"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert figures["hit_rate"] == 1.0
    ideal = 1 + 1 / math.log2(3)
    assert figures["ndcg"] == pytest.approx((1 + 1 / ideal) / 2)


def test_states_add_and_an_empty_metric_is_nan() -> None:
    whole, parts = TopK(2), [TopK(2), TopK(2)]
    places = torch.tensor([1, 3, 0])
    whole.update(SCORES, places)
    parts[0].update(SCORES[:1], places[:1])
    parts[1].update(SCORES[1:], places[1:])
    parts[0].merge(parts[1].state())
    assert parts[0].compute() == whole.compute()
    whole.reset()
    assert all(math.isnan(value) for value in whole.compute().values())
    with pytest.raises(BadRequest):
        TopK(3).merge(whole.state())


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        (SCORES[0], torch.tensor([0]), r"\(B, C\) scores, found shape \(4,\)"),
        (SCORES, torch.tensor([0, 1, 4]), "places from 0 to 3, found 0 to 4"),
        (SCORES, torch.tensor([0.0, 1.5, 2.0]), "whole numbers as places, found tensor"),
        (SCORES, torch.tensor([0.0, math.nan, 2.0]), "whole numbers as places, found tensor"),
        (SCORES, torch.tensor([0, 1]), "the places of 3 examples, found 2"),
        (SCORES * math.inf, torch.tensor([0, 1, 2]), "expected finite"),
    ],
)
def test_what_does_not_fit_is_refused(
    scores: torch.Tensor, labels: torch.Tensor, message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        TopK(2).update(scores, labels)


def test_whole_floats_are_places() -> None:
    """As a column of labels has them."""
    of_floats, of_integers = TopK(2), TopK(2)
    of_floats.update(SCORES, torch.tensor([0.0, 1.0, 2.0]))
    of_integers.update(SCORES, torch.tensor([0, 1, 2]))
    assert of_floats.compute() == of_integers.compute()


def test_k_is_at_least_one() -> None:
    with pytest.raises(BadRequest, match="expected k as an integer >= 1, found 0"):
        TopK(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("place", [0, 250, 499])
def test_of_equal_scores_the_wrong_candidates_are_higher(dtype: torch.dtype, place: int) -> None:
    """A model that tells nothing apart recalls nothing, wherever the right candidate is."""
    for k, recall in ((1, 0.0), (499, 0.0), (500, 1.0)):
        metric = TopK(k)
        metric.update(torch.zeros(3, 500, dtype=dtype), torch.full((3,), place))
        assert metric.compute()["recall"] == recall


def test_a_score_that_is_the_least_bit_higher_is_no_tie() -> None:
    below = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    metric = TopK(1)
    metric.update(torch.stack([below, torch.tensor(1.0), below])[None], torch.tensor([1]))
    assert metric.compute()["recall"] == 1.0


def test_scores_that_differ_by_the_least_bit_are_no_tie_and_equal_ones_are_one() -> None:
    """For whole numbers beyond float64's, doubles, and where numbers next to 0 count as 0."""
    many = torch.tensor([[2**53, 2**53 + 1, 0]])
    doubles = torch.tensor([[1 - 2**-53, 1.0, 1 - 2**-53]], dtype=torch.float64)
    for scores in (many, doubles):
        metric = TopK(1)
        metric.update(scores, torch.tensor([1]))
        assert metric.compute()["recall"] == 1.0
    try:
        torch.set_flush_denormal(True)
        metric = TopK(5)
        metric.update(torch.zeros(5, 5), torch.arange(5))
    finally:
        torch.set_flush_denormal(False)
    assert metric.compute()["mrr"] == pytest.approx(1 / 5)


def test_figures_equal_those_of_a_sort() -> None:
    random = torch.Generator().manual_seed(1)
    scores = torch.randint(0, 6, (200, 9), generator=random).float()
    num = torch.randint(0, 10, (200,), generator=random)
    right = [torch.randperm(9, generator=random)[:n].tolist() for n in num.tolist()]
    places = torch.tensor([place for each in right for place in each])
    for k in (1, 3, 9, 20):
        metric, expected = TopK(k), []
        metric.update(scores, Ragged(places, torch.cat([num.new_zeros(1), num.cumsum(0)])))
        for row, each in zip(scores.tolist(), right, strict=True):
            order = sorted(range(9), key=lambda c, r=row, e=each: (-r[c], c in e))  # type: ignore[misc]
            ranks = [i + 1 for i, c in enumerate(order[:k]) if c in each]
            if each:
                ideal = sum(1 / math.log2(i + 2) for i in range(min(k, len(each))))
                gain = sum(1 / math.log2(rank + 1) for rank in ranks) / ideal
                first = 1 / ranks[0] if ranks else 0.0
                expected.append((len(ranks) / len(each), float(bool(ranks)), gain, first))
        means = torch.tensor(expected, dtype=torch.float64).mean(0).tolist()
        assert list(metric.compute().values()) == pytest.approx(means)
