"""Models that match texts, or fill in ratings, learn a signal, and follow their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import trireme as tr
from tests.plain_loop import ragged, train
from tests.seeds import SEED
from trireme.config import Config
from trireme.data import Batch
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.models import DeepRec, MatchPyramid, MultiviewSimnet, zoo
from trireme.models.deeprec import rating_loss
from trireme.models.losses import MarginLoss
from trireme.models.match_pyramid import halves_loss
from trireme.models.multiview_simnet import QueryTitle


def words_table(dim: int) -> tr.Table:
    normal = tr.initializer.Normal(std=dim**-0.25)
    return tr.Table("words", dim=dim, optimizer=tr.optim.Adam(lr=0.02), initializer=normal)


def texts(num: int, draw: np.random.Generator) -> dict[str, list[list[int]]]:
    """Queries of a topic's words, a title of the same topic, and one of another; all padded."""
    topics = np.stack([draw.permutation(5)[:2] for _ in range(num)])[:, [0, 0, 1]]
    words = 1 + topics[:, :, None] + 5 * draw.integers(0, 6, (num, 3, 4))
    padded = np.pad(words, ((0, 0), (0, 0), (0, 2)))
    names = ("query", "pos_title", "neg_title")
    return {name: padded[:, i].tolist() for i, name in enumerate(names)}


def pairs(num: int, draw: np.random.Generator) -> Batch:
    drawn = texts(num, draw)
    right = ragged(*drawn["pos_title"], *drawn["neg_title"])
    return Batch({"sentence_left": ragged(*drawn["query"] * 2), "sentence_right": right})


def test_match_pyramid_finds_the_document_of_a_query(cluster: Cluster) -> None:
    model = MatchPyramid(
        words_table(8), lengths=(6, 6), window=(2, 3), kernels=4, pool=(3, 3), stride=(3, 3)
    )
    draw = np.random.default_rng(SEED)
    train(model, halves_loss, [pairs(50, draw) for _ in range(60)])
    with torch.no_grad():
        scores = model(pairs(200, draw))
    assert scores.shape == (400,)
    assert (scores[:200] > scores[200:]).float().mean() > 0.95


def test_match_pyramid_equals_its_formula(cluster: Cluster) -> None:
    model = MatchPyramid(
        words_table(3), lengths=(4, 5), window=(2, 3), kernels=2, pool=(2, 3), stride=(2, 2)
    ).eval()
    batch = Batch({"sentence_left": ragged([4, 5, 0]), "sentence_right": ragged([7, 4, 8, 9, 1])})
    with torch.no_grad():
        left, right = (part(batch).rows[0] for part in model.sentences)
        products = torch.zeros(4 + 1, 5 + 2)
        products[:4, 1:6] = left @ right.T
        weight, bias = model.convolution.weight, model.convolution.bias
        made = torch.zeros(2, 4, 5)
        for k, i, j in np.ndindex(2, 4, 5):
            made[k, i, j] = (products[i : i + 2, j : j + 3] * weight[k, 0]).sum() + bias[k]
        made = made.relu()
        fields = [
            made[k, 2 * i : 2 * i + 2, 2 * j : 2 * j + 3].max() for k, i, j in np.ndindex(2, 2, 2)
        ]
        torch.testing.assert_close(model(batch), model.mlp(torch.stack(fields)))


def test_match_pyramid_refuses_what_does_not_fit() -> None:
    scores = torch.tensor([3.0, 0.5, 1.0, 2.0])
    assert float(halves_loss(scores, Batch({}))) == pytest.approx((0 + 2.5) / 2)
    with pytest.raises(BadRequest, match="as many wrong ones behind them, found 3 examples"):
        halves_loss(scores[:3], Batch({}))
    for values, message in (
        ({"conv_act": "tanh"}, "conv_act: expected 'relu', found 'tanh'"),
        ({"pool_size": [6, 50, 1]}, "pool_size: expected two sizes, found"),
        ({"pool_size": [6]}, "pool_size: expected a list of positive integers, at least 2"),
        ({"pool_size": [21, 50]}, r"a pool within \(20, 500\) words, found \(21, 50\)"),
    ):
        with pytest.raises(BadRequest, match=message):
            zoo.load("match_pyramid").create(Config({"hyper_parameters": values}))


def test_multiview_simnet_finds_the_title_of_a_query(cluster: Cluster) -> None:
    model = MultiviewSimnet(words_table(8), lengths=(6, 6, 5), size=8, hidden=8)
    draw = np.random.default_rng(SEED)

    def batch(num: int) -> Batch:
        return Batch({name: ragged(*bags) for name, bags in texts(num, draw).items()})

    train(model, MarginLoss(0.5), [batch(100) for _ in range(60)])
    tested = batch(200)
    with torch.no_grad():
        cosines = model(tested)
        torch.testing.assert_close(QueryTitle(model).eval()(tested), cosines[:, 0])
        drawn = texts(3, draw)
        padded, short = (
            {name: ragged(*(bag[:size] for bag in bags)) for name, bags in drawn.items()}
            for size in (6, 4)
        )
        torch.testing.assert_close(model(Batch(padded)), model(Batch(short)))
        empty = model(Batch({**short, "query": ragged([], [0], [1])}))
    assert (cosines[:, 0] > cosines[:, 1]).float().mean() > 0.95
    torch.testing.assert_close(empty[0].isfinite(), torch.tensor([True, True]))


def test_deeprec_fills_in_ratings(cluster: Cluster) -> None:
    """Users like or dislike the even items, and the opposite of the odd ones."""
    model = DeepRec(layers=(12, 16, 4), dropout=0.0)
    draw = np.random.default_rng(SEED)

    def batch(num: int) -> tuple[Batch, torch.Tensor]:
        taste = torch.from_numpy(draw.integers(0, 2, (num, 1)))
        ratings = 1.0 + 4 * ((torch.arange(12) % 2) == taste)
        rated = ratings * torch.from_numpy(draw.random((num, 12)) < 0.5)
        return Batch({"ratings": rated.float()}), ratings

    train(model, rating_loss, [batch(50)[0] for _ in range(120)])
    tested, ratings = batch(200)
    with torch.no_grad():
        outputs = model(tested)
    assert list(outputs) == ["ratings"]
    is_missing = tested["ratings"] == 0
    is_right = (outputs["ratings"] > 3) == (ratings > 3)
    assert is_right[is_missing].float().mean() > 0.8  # 0.5 by chance


def test_a_rating_loss_is_of_given_ratings_and_of_what_is_made_again() -> None:
    model = DeepRec(layers=(3, 2), dropout=0.0, refeeds=2)
    batch = Batch({"ratings": torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]])})
    x, y, z = model(batch).values()
    torch.testing.assert_close(y, model.layers(x))
    errors = x[[0, 0, 1], [0, 2, 1]] - torch.tensor([1.0, 2.0, 3.0])
    expected = errors.square().mean() + (y - x).square().mean() + (z - y).square().mean()
    torch.testing.assert_close(rating_loss(model(batch), batch), expected)
    for key, value, message in (
        ("hyper_parameters.optimizer.class", "Adam", "expected SGD, found 'Adam'"),
        (
            "hyper_parameters.dp_drop_prob",
            -1,
            "dp_drop_prob: expected a number >= 0 and < 1, found -1",
        ),
        ("runner.aug_step", 0.5, "aug_step: expected an integer >= 0, found 0.5"),
    ):
        with pytest.raises(BadRequest, match=message):
            zoo.load("deeprec").create(Config({key: value}))
