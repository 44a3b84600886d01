"""MIND learns a signal, follows its formulas, and draws what it compares with."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import trireme as tr
from tests.plain_loop import ragged, train
from tests.seeds import SEED
from trireme.data import ArrayDataset, Batch, Ragged
from trireme.data.prepared import PreparedDataset
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.models import MIND
from trireme.models.mind import (
    AllItems,
    Interests,
    Recall,
    SampledItems,
    SampledSoftmax,
    log_uniform,
    squash,
)


def table(name: str, dim: int, lr: float = 0.02) -> tr.Table:
    return tr.Table(name, dim=dim, optimizer=tr.optim.Adam(lr=lr))


def test_routing_is_that_of_the_paper(cluster: Cluster) -> None:
    interests = Interests(table("items", 3), size=2, num_interests=2, num_rounds=3, length=4).eval()
    batch = Batch({"hist_item": ragged([5, 6, 0, 7])})
    with torch.no_grad():
        rows = interests.events(batch).rows[0]
        actual = interests(batch)[0]
        kept = [0, 1, 3]
        events = rows[kept] @ interests.map
        weights = interests.first_weights[:, kept].clone()
        for _ in range(3):
            shares = torch.softmax(weights, 0)
            capsules = torch.stack(
                [squash(sum(s * e for s, e in zip(part, events, strict=True))) for part in shares]
            )
            weights = weights + capsules @ events.T
        expected = torch.relu(interests.layer(capsules))
    torch.testing.assert_close(actual, expected)
    vector = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(squash(vector), vector / 5 * 25 / 26)
    again = Interests(table("others", 3), size=2, num_interests=2, length=4)
    assert torch.equal(again.first_weights, interests.first_weights)


def test_draws_are_log_uniform_and_the_same_again() -> None:
    chances = log_uniform(torch.arange(1, 50), 50)
    assert float(chances.sum()) == pytest.approx(1, rel=1e-6)
    sample = SampledItems(50, 200_000)
    batch = Batch({"x": torch.zeros(3)}, stream=1, position=(7,))
    drawn = sample(batch)["sampled_items"]
    assert isinstance(drawn, Ragged)
    assert drawn.offsets.tolist() == [0, 200_000, 200_000, 200_000]
    shares = torch.bincount(drawn.values, minlength=50)[1:] / 200_000
    torch.testing.assert_close(shares, chances, rtol=0.1, atol=1e-3)
    again = SampledItems(50, 200_000)(Batch({"x": torch.zeros(2)}, stream=1, position=(7,)))
    assert torch.equal(again["sampled_items"].values, drawn.values)
    other = sample(Batch({"x": torch.zeros(3)}, stream=1, position=(8,)))
    assert not torch.equal(other["sampled_items"].values, drawn.values)


def test_all_of_many_items_can_be_drawn() -> None:
    num = 10_000_000
    batch = Batch({"x": torch.zeros(1)}, position=(1,))
    drawn = SampledItems(num, 2_000_000)(batch)["sampled_items"].values
    large = drawn[drawn > num // 2]
    # float32 has one in seven of these items: 6 of 100 draws would be repetitions.
    chance = math.log(2) / math.log(num)
    assert len(large) == pytest.approx(2_000_000 * chance, rel=0.02)
    assert len(large.unique()) > 0.97 * len(large)


def test_items_are_drawn_anew_in_each_epoch_and_as_before_when_it_is_resumed() -> None:
    data = ArrayDataset({"x": np.arange(6)}, batch_size=2)

    def drawn(epoch: int, start: tuple[int, ...] | None = None) -> list[list[int]]:
        stream = PreparedDataset(data, SampledItems(1000, 5)).stream(0, 1, epoch=epoch, start=start)
        return [batch["sampled_items"].values.tolist() for batch in stream]

    first, second = drawn(0), drawn(1)
    assert len({tuple(items) for items in (*first, *second)}) == 6
    assert drawn(1) == second
    assert drawn(1, start=(2,)) == second[1:]


def test_batches_without_a_position_are_counted() -> None:
    def drawn() -> list[list[int]]:
        sample = SampledItems(1000, 5)
        batches = [sample(Batch({"x": torch.zeros(1)})) for _ in range(2)]
        return [batch["sampled_items"].values.tolist() for batch in batches]

    first, second = drawn()
    assert first != second
    assert drawn() == [first, second]


def test_sampled_softmax_corrects_and_forgets_repetitions() -> None:
    products = torch.randn(2, 4)
    target, sampled = torch.tensor([3, 9]), torch.tensor([1, 3, 8])
    ends = torch.tensor([0, 3, 3])
    batch = Batch({"target_item": ragged([3], [9]), "sampled_items": Ragged(sampled, ends)})
    losses = []
    for b in range(2):
        logits = [
            products[b, 0]
            - math.log(3 * math.log((int(target[b]) + 1) / int(target[b])) / math.log(20))
        ]
        for j, item in enumerate(sampled.tolist()):
            if item != int(target[b]):
                chance = math.log((item + 1) / item) / math.log(20)
                logits.append(products[b, j + 1] - math.log(3 * chance))
        losses.append(torch.logsumexp(torch.stack(logits), 0) - logits[0])
    torch.testing.assert_close(SampledSoftmax(20)(products, batch), torch.stack(losses).mean())
    for wrong in (0, 20):
        batch.columns["target_item"] = ragged([3], [wrong])
        with pytest.raises(BadRequest, match=f"'target_item' of 1 to 19.* found {wrong} in ex.*1"):
            SampledSoftmax(20)(products, batch)
    batch.columns["target_item"] = ragged([3, 4], [9])
    with pytest.raises(
        BadRequest, match="1 ids in 'target_item' of every example, found 2 in example 0"
    ):
        SampledSoftmax(20)(products, batch)


def test_mind_recalls_what_follows_from_either_of_two_interests(cluster: Cluster) -> None:
    """Histories of two topics; what follows is of one of them."""
    items = table("items", 8, 0.05)
    interests = Interests(items, size=8, num_interests=2, length=6)
    model = MIND(items, interests)
    draw = np.random.default_rng(SEED)
    sample, num_items = SampledItems(41, 30), 41

    def batch(number: int, num: int, following: str) -> Batch:
        """Topic t has the items t + 1, t + 5, ..., t + 37."""
        topics = np.stack([draw.permutation(4)[:2] for _ in range(num)])
        places = draw.integers(0, 10, (num, 7))
        events = 1 + topics[:, [0, 1, 0, 1, 0, 1]] + 4 * places[:, :6]
        right = 1 + topics[np.arange(num), draw.integers(0, 2, num)] + 4 * places[:, 6]
        columns = {
            "hist_item": ragged(*events.tolist()),
            following: ragged(*[[int(item)] for item in right]),
        }
        return Batch(columns, position=(number,))

    batches = [sample(batch(n, 100, "target_item")) for n in range(60)]
    train(model, SampledSoftmax(num_items), batches, epochs=4)
    tested = AllItems(num_items)(batch(0, 500, "eval_item"))
    with torch.no_grad():
        scores = Recall(items, interests).eval()(tested)
    assert scores.shape == (500, num_items)
    assert int(scores.argmax(1).min()) > 0
    metric = tr.metrics.TopK(20)
    metric.update(scores, tested["answers"])
    assert metric.compute()["recall"] > 0.75  # 0.5 by chance


def test_answers_of_a_recall_are_without_padding() -> None:
    batch = AllItems(4)(Batch({"eval_item": ragged([2, 0], [0, 0], [3, 1, 0])}))
    answers = batch["answers"]
    assert isinstance(answers, Ragged)
    assert answers.values.tolist() == [2, 3, 1]
    assert answers.offsets.tolist() == [0, 1, 1, 3]
    assert batch["all_items"].values.tolist() == [0, 1, 2, 3]
    with pytest.raises(BadRequest, match=r"'eval_item' of 0 to 3, .* found 4 in example 1"):
        AllItems(4)(Batch({"eval_item": ragged([3], [4])}))
