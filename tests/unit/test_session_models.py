"""Models of news, sessions and sequences learn a signal from the inputs that PaddleRec's readers
yield, and follow their formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from examples.planted.clicks import exact_auc
from tests import plain_loop
from tests.plain_loop import ragged
from tests.seeds import SEED
from trireme.config import Config
from trireme.data import Batch, Ragged
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.models import dmr, dsin, iprec, tisas, zoo
from trireme.models.columns import ids_of
from trireme.models.fastformer import AdditiveAttention
from trireme.models.layers import BatchNorm, compared
from trireme.models.naml import Pooling
from trireme.models.sequences import shares_of


def bags(array: Any) -> Ragged:
    """A column of B bags of the same size."""
    values = torch.as_tensor(np.asarray(array)).reshape(len(array), -1)
    return Ragged(values.flatten(), torch.arange(len(array) + 1) * values.shape[1])


def train(recipe: Any, batches: list[Batch], epochs: int) -> None:
    def loss(outputs: Any, batch: Batch) -> torch.Tensor:
        return recipe.loss(outputs, batch if recipe.label is None else batch[recipe.label])

    prepared = batches if recipe.prepare is None else list(map(recipe.prepare, batches))
    plain_loop.train(recipe.model, loss, prepared, epochs=epochs, optimizer=recipe.optimizer)


def news(num: int, draw: np.random.Generator) -> Batch:
    """Articles of four topics: of each article a word of the title has it. A user reads one topic,
    and clicks the candidate of it.
    """
    topics = np.stack([draw.permutation(4)[:3] for _ in range(num)])
    place = draw.integers(0, 3, num)
    topic = topics[np.arange(num), place]
    columns: dict[str, Any] = {"label": nn.functional.one_hot(torch.from_numpy(place), 3).float()}
    for part, of_articles in (("sample", topics), ("visit", np.repeat(topic[:, None], 2, 1))):
        shape = of_articles.shape
        others = draw.integers(4, 20, shape)
        columns |= {
            f"cate_{part}": bags(draw.integers(0, 2, shape)),
            f"sub_cate_{part}": bags(draw.integers(0, 3, shape)),
            f"title_{part}": bags(np.stack([of_articles, others], 2)),
            f"content_{part}": bags(draw.integers(4, 21, (*shape, 3))),
        }
    return Batch(columns)


def sessions(num: int, draw: np.random.Generator) -> Batch:
    """Users whose sessions, one to five, are of an odd category click, whatever the candidate."""
    category, length = draw.integers(1, 6, num), draw.integers(1, 6, num)
    events = np.zeros((num, 5, 2, 10), np.int64)
    is_there = np.arange(5) < length[:, None]
    events[..., :4] = (category[:, None] * is_there)[..., None, None]
    ids = np.ones((num, 15), np.int64)
    ids[:, dsin.FEATURES.index("cate_id")] = draw.integers(1, 6, num)
    columns = {
        "sparse_input": bags(ids),
        "price": torch.rand(num, 1),
        "sess_input": bags(events),
        "sess_length": torch.from_numpy(length).float(),
        "label": torch.from_numpy(category % 2).float(),
    }
    return Batch(columns)


def lines(num: int, draw: np.random.Generator) -> Batch:
    """A click is on the category of all events of the history."""
    category = draw.integers(1, 6, num)
    wanted = np.where(draw.random(num) < 0.4, category, draw.integers(1, 6, num))
    parts = {name: np.repeat(category[:, None], 50, 1) for name in ("cate_his", "brand_his")}
    parts |= dict.fromkeys(("btag_his", "mask", "match_mask"), np.ones((num, 50)))
    features = dict.fromkeys(dmr.FEATURES, np.ones(num))
    features |= {"cate_id": wanted, "label": wanted == category, "price": draw.random(num)}
    arrays = [*(parts[name] for name in dmr.HISTORY), *(features[n][:, None] for n in dmr.FEATURES)]
    return Batch({"line": torch.from_numpy(np.concatenate(arrays, 1)).float()})


def circle(num: int, draw: np.random.Generator, length: int = 6) -> np.ndarray[Any, Any]:
    """Sequences of the items 1 to 20, each one more than the one before."""
    return (draw.integers(0, 20, (num, 1)) + np.arange(length + 1)) % 20 + 1


def followed(num: int, draw: np.random.Generator) -> Batch:
    items, size = circle(num, draw), draw.integers(2, 7, num)
    is_there = np.arange(6) >= 6 - size[:, None]
    times = np.abs(np.arange(6)[:, None] - np.arange(6))
    others = draw.integers(1, 21, (num, 6))
    return Batch(
        {
            "seq": bags(items[:, :6] * is_there),
            "time_matrix": torch.from_numpy(times).float().flatten().expand(num, -1),
            "pos": bags(items[:, 1:] * is_there),
            "neg": bags(np.where(others == items[:, 1:], others % 20 + 1, others) * is_there),
        }
    )


MASK = 21


def masked(num: int, draw: np.random.Generator) -> Batch:
    items = circle(num, draw, length=5)
    place = draw.integers(0, 6, num)
    answers = items[np.arange(num), place].copy()
    items[np.arange(num), place] = MASK
    return Batch(
        {
            "src_ids": bags(items),
            "pos_ids": bags(np.tile(np.arange(6), (num, 1))),
            "input_mask": bags(np.ones((num, 6), np.int64)),
            "mask_pos": bags(place[:, None]),
            "mask_label": bags(answers[:, None]),
        }
    )


def packages(num: int, draw: np.random.Generator) -> Batch:
    """A click is on an article of the parity of those of the user."""
    kind, wanted = draw.integers(0, 2, (2, num))

    def articles(parity: np.ndarray[Any, Any], *shape: int) -> np.ndarray[Any, Any]:
        parity = parity.reshape(num, *[1] * len(shape))
        return 2 * draw.integers(1, 9, (num, *shape)) + parity

    def packs(parity: np.ndarray[Any, Any], count: int) -> Ragged:
        friends = draw.integers(1, 20, (num, count, 2))
        parts = [articles(parity, count, 1), draw.integers(1, 5, (num, count, 1)), friends]
        return bags(np.concatenate(parts, 2))

    columns = {
        **{name: bags(draw.integers(1, 20, (num, 1))) for name in ("user", "biz")},
        "item": bags(articles(wanted, 1)),
        "friends": bags(draw.integers(0, 20, (num, 2))),
        "user_items": bags(articles(kind, 4)),
        "user_bizs": bags(draw.integers(0, 5, (num, 4))),
        "user_friends": bags(draw.integers(0, 20, (num, 3))),
        "user_packages": packs(kind, 3),
        **{name: packs(wanted, 2) for name in ("pack_neighbors_b", "pack_neighbors_f")},
        "label": torch.from_numpy(kind == wanted).float(),
    }
    return Batch(columns)


def titles(num: int, draw: np.random.Generator) -> Batch:
    """A user reads titles of one of four topics, and clicks the one of that topic."""
    topics = np.stack([draw.permutation(4)[:3] for _ in range(num)]) + 1
    place = draw.integers(0, 3, num)
    read = np.repeat(topics[np.arange(num), place][:, None], 2, 1)
    columns: dict[str, Any] = {"label": nn.functional.one_hot(torch.from_numpy(place), 3).float()}
    for user, of_articles in (("", topics), ("user_", read)):
        count = of_articles.shape[1]
        others = draw.integers(5, 20, of_articles.shape)
        columns[f"{user}title"] = bags(np.stack([of_articles, others], 2))
        columns[f"{user}entity"] = 0.1 * torch.randn(num, count * 2 * 100)
        columns[f"{user}one_hop"] = 0.1 * torch.randn(num, count * 4 * 100)
    return Batch(columns)


NEWS = {
    "article_title_size": 2, "article_content_size": 3, "browse_size": 2, "word_dict_size": 20,
    "neg_condidate_sample_size": 2, "category_size": 2, "sub_category_size": 3, "hidden_size": 16,
}  # fmt: skip
Maker = Callable[[int, np.random.Generator], Batch]
# Hyper-parameters, data, batches, epochs.
LEARNING: dict[str, tuple[dict[str, Any], Maker, int, int]] = {
    "naml": (NEWS, news, 20, 3),
    "fastformer": (
        {**NEWS, "num_attention_heads": 4, "hidden_dropout_prob": 0.0, "intermediate_size": 16,
         "num_hidden_layers": 1},
        news, 20, 3,
    ),
    "kim": (
        {"embedding_size": 8, "hidden_size": 20, "npratio": 2, "max_sents": 2, "max_sentence": 2,
         "max_entity_num": 2, "init_range": 0.5, "optimizer": {"learning_rate": 0.01}},
        titles, 50, 1,
    ),
    "dsin": ({"init_range": 0.5}, sessions, 20, 3),
    "dmr": ({"main_embedding_size": 8, "other_embedding_size": 2, "cate_size": 7}, lines, 15, 4),
    "tisas": (
        {"hidden_units": 16, "maxlen": 6, "time_span": 8, "num_heads": 2, "num_blocks": 1,
         "dropout_rate": 0.0},
        followed, 20, 4,
    ),
    "bert4rec": (
        {"_emb_size": 16, "_voc_size": 22, "_max_position_seq_len": 6, "_n_layer": 1,
         "_dropout": 0.0, "_attention_dropout": 0.0, "_param_initializer": 0.3,
         "optimizer": {"learning_rate": 0.01}},
        masked, 20, 8,
    ),
    "iprec": (
        {"hidden_units": 8, "f_max_len": 2, "u_max_i": 4, "u_max_f": 3, "u_max_pack": 3,
         "pack_max_nei_b": 2, "pack_max_nei_f": 2, "dropout_rate": 0.0, "k": 2},
        packages, 20, 4,
    ),
}  # fmt: skip


def recipe_of(name: str, **changed: Any) -> Any:
    hyper = {"optimizer": {"learning_rate": 0.02}, **LEARNING[name][0], **changed}
    return zoo.load(name).create(Config({"hyper_parameters": hyper}))


def share_right(name: str, outputs: Any, batch: Batch) -> float:
    """Of the answers, or, of clicks, the AUC."""
    if name in ("naml", "fastformer", "kim"):
        return float((outputs.argmax(1) == batch["place"]).float().mean())
    if name == "tisas":
        is_there = ids_of(batch, "pos", 6) != 0
        return float((outputs["right"] > outputs["wrong"])[is_there].float().mean())
    if name == "bert4rec":
        return float((outputs.argmax(1) == batch["mask_label"].values).float().mean())
    logits = outputs["click"] if name == "dmr" else outputs
    return exact_auc(logits.double().numpy(), batch["label"].numpy() > 0)


@pytest.mark.parametrize("name", LEARNING)
def test_a_model_learns_a_planted_signal(name: str, cluster: Cluster) -> None:
    _, make, num, epochs = LEARNING[name]
    recipe, draw = recipe_of(name), np.random.default_rng(SEED)
    size = 30 if name == "kim" else 100
    train(recipe, [make(size, draw) for _ in range(num)], epochs)
    tested = make(3 * size, draw)
    tested = recipe.prepare(tested) if recipe.prepare else tested
    with torch.no_grad():
        assert share_right(name, recipe.model(tested), tested) > 0.9


def outputs_of(recipe: Any, batch: Batch) -> Any:
    with torch.no_grad():
        return recipe.model.eval()(recipe.prepare(batch) if recipe.prepare else batch)


@pytest.mark.parametrize("name", ["naml", "fastformer"])
def test_padding_of_news_changes_nothing(name: str, cluster: Cluster) -> None:
    recipe, batch = recipe_of(name), news(4, np.random.default_rng(SEED))
    short, padded = dict(batch.columns), dict(batch.columns)
    for column, of_article, padding in (
        ("cate", 1, 2), ("sub_cate", 1, 3), ("title", 2, 20), ("content", 3, 20),
    ):  # fmt: skip
        first = ids_of(batch, f"{column}_visit", 2 * of_article)[:, :of_article]
        short[f"{column}_visit"] = bags(first)
        both = torch.cat([first, torch.full_like(first, padding)], 1)
        padded[f"{column}_visit"] = bags(both)
    expected = outputs_of(recipe, Batch(short))
    torch.testing.assert_close(outputs_of(recipe, Batch(padded)), expected)
    assert not torch.allclose(outputs_of(recipe, batch), expected)


def test_shares_are_of_what_is_there() -> None:
    scores, is_there = (
        torch.randn(3, 4),
        torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]]) > 0,
    )
    shares = shares_of(scores, is_there)
    torch.testing.assert_close(shares[0, [0, 2, 3]], scores[0, [0, 2, 3]].softmax(0))
    assert shares[0, 1] == 0
    assert shares[1:].tolist() == [[0, 0, 0, 0], [0, 1, 0, 0]]
    pooled = Pooling(5, 3)(vectors := torch.randn(3, 4, 5), is_there)
    assert not pooled[1].any()
    torch.testing.assert_close(pooled[2], vectors[2, 1])


def test_additive_attention_is_that_of_each_head() -> None:
    x, attention = torch.randn(2, 3, 4), AdditiveAttention(4, heads=2)
    is_there = torch.tensor([[True, True, True], [True, False, True]])
    actual = attention(x, is_there)
    for b, places in ((0, [0, 1, 2]), (1, [0, 2])):
        q, k = attention.query(x[b, places]), attention.key(x[b, places])
        q_scores, mean = attention.query_scores(q) / 2**0.5, []
        for head in range(2):
            mean.append(q_scores[:, head].softmax(0) @ q[:, 2 * head : 2 * head + 2])
        p = k * torch.cat(mean)
        p_scores, mean = attention.key_scores(p) / 2**0.5, []
        for head in range(2):
            mean.append(p_scores[:, head].softmax(0) @ p[:, 2 * head : 2 * head + 2])
        expected = attention.join(torch.cat(mean) * q) + q
        torch.testing.assert_close(actual[b, places], expected)


def test_time_attention_equals_its_formula() -> None:
    attention = tisas.TimeAttention(4, heads=2, dropout=0.0)
    queries, x, places = torch.randn(1, 3, 4), torch.randn(1, 3, 4), torch.randn(3, 8)
    times, is_seen = torch.randn(1, 3, 3, 8), torch.ones(1, 3, 3, dtype=torch.bool).tril()
    actual = attention(queries, x, places, times, is_seen)[0]
    q, (k, v) = attention.query(queries)[0], attention.keys_values(x)[0].chunk(2, 1)
    (place_k, place_v), (time_k, time_v) = places.chunk(2, 1), times[0].chunk(2, 2)
    for i in range(3):
        for head in (slice(0, 2), slice(2, 4)):
            keys = (k + place_k + time_k[i])[: i + 1, head]
            weights = (keys @ q[i, head] / 2**0.5).softmax(0)
            expected = weights @ (v + place_v + time_v[i])[: i + 1, head]
            torch.testing.assert_close(actual[i, head], expected)


def test_a_next_item_is_ranked_by_the_last_state(cluster: Cluster) -> None:
    recipe = recipe_of("tisas")
    batch = followed(3, np.random.default_rng(SEED))
    candidates = torch.arange(1, 102).remainder(20).add(1).expand(3, -1)
    tested = Batch({**batch.columns, "item_idx": bags(candidates)})
    evaluation = recipe.evaluation
    assert evaluation.reader_config == {"runner.mode": "test"}
    with torch.no_grad():
        scores = evaluation.model.eval()(evaluation.prepare(tested))
        right = recipe.model.eval()(Batch({**batch.columns, "pos": bags(candidates[:, :6])}))
    assert scores.shape == (3, 101)
    torch.testing.assert_close(scores[:, 5], right["right"][:, 5])
    assert recipe.schema.names == ("seq", "time_matrix", "pos", "neg")


def test_padding_before_or_behind_a_sequence_gives_equal_scores(cluster: Cluster) -> None:
    recipe = recipe_of("tisas")
    model = recipe.evaluation.model.eval()
    with torch.no_grad():
        model.sequence.places.fill_(0.5)  # an event stands at another place
    history, candidates = [[3, 4], [4, 3], [4]], bags(torch.arange(1, 102).expand(3, -1) % 20 + 1)

    def scores(*sequences: list[int], start: int = 0) -> torch.Tensor:
        times = torch.zeros(3, 6, 6)
        times[:, start, start + 1] = times[:, start + 1, start] = 2.0
        columns = {"seq": ragged(*sequences), "time_matrix": times.flatten(1)}
        with torch.no_grad():
            out: torch.Tensor = model(Batch({**columns, "item_idx": candidates}))
        return out

    short = scores(*history)
    behind = scores(*([*bag, *[0] * (6 - len(bag))] for bag in history))
    torch.testing.assert_close(behind, short)
    before = scores(*([*[0] * (6 - len(bag)), *bag] for bag in history), start=4)
    torch.testing.assert_close(before, short)
    assert not torch.allclose(short[0], short[1])


def test_times_above_the_span_count_as_it(cluster: Cluster) -> None:
    model = recipe_of("tisas").model.eval()
    batch = followed(3, np.random.default_rng(SEED))
    with torch.no_grad():
        right = [
            model(Batch({**batch.columns, "time_matrix": torch.full((3, 36), time)}))["right"]
            for time in (7.0, 8.0, 9.0, 1e6, -1e6)
        ]
    for longer in right[2:]:
        assert torch.equal(longer, right[1])
    assert not torch.allclose(right[0], right[1])


def test_candidates_are_ranked_as_among_all_items(cluster: Cluster) -> None:
    recipe = recipe_of("bert4rec")
    batch = masked(4, np.random.default_rng(SEED))
    candidates = torch.tensor([[3, 9, 1]]).expand(4, -1)
    with torch.no_grad():
        logits = recipe.model.eval()(recipe.prepare(batch))
        tested = recipe.evaluation.prepare(Batch({**batch.columns, "candidates": bags(candidates)}))
        scores = recipe.evaluation.model.eval()(tested)
    torch.testing.assert_close(scores, logits[:, [3, 9, 1]])
    # Two sequences of an example, one behind the other.
    double = {name: ids_of(batch, name, 6).view(2, 12) for name in ("src_ids", "pos_ids")}
    place = ids_of(batch, "mask_pos", 1).view(2, 2) + torch.tensor([0, 6])
    columns = {name: bags(ids) for name, ids in double.items()}
    columns |= {"input_mask": bags(torch.ones(2, 12).long()), "mask_pos": bags(place)}
    with torch.no_grad():
        again = recipe.model(recipe.prepare(Batch(columns)))
    torch.testing.assert_close(again, logits)
    with pytest.raises(BadRequest, match=r"expected 1 ids in 'mask_pos' .* found 2 in example 0"):
        recipe.evaluation.model(Batch({**columns, "candidates": bags(candidates[:2])}))


@pytest.mark.parametrize(
    ("column", "sizes", "message"),
    [
        ("mask_pos", [1, 2, 0, 1], "1 ids in 'mask_pos' of every example, found 2 in example 1"),
        ("candidates", [3, 3, 2, 4], "3 ids in 'candidates' of every example, found 2 in example"),
    ],
)
def test_what_is_ranked_does_not_mix_examples(
    cluster: Cluster, column: str, sizes: list[int], message: str
) -> None:
    recipe = recipe_of("bert4rec")
    batch = masked(4, np.random.default_rng(SEED))
    columns = {**batch.columns, "candidates": bags(torch.ones(4, 3, dtype=torch.int64))}
    columns[column] = Ragged(columns[column].values, torch.tensor([0, *sizes]).cumsum(0))
    with pytest.raises(BadRequest, match=message):
        recipe.evaluation.model(recipe.evaluation.prepare(Batch(columns)))


@pytest.mark.parametrize(
    ("column", "wrong", "limits"),
    [
        ("pos_ids", 6, "0 to 5, as the sequences have by hyper_parameters._max_position_seq_len"),
        ("mask_pos", 6, "0 to 5, as its example has ids"),
        ("mask_pos", -1, "0 to 5, as its example has ids"),
        ("mask_label", 22, "0 to 21, as hyper_parameters._voc_size says"),
    ],
)
def test_what_is_masked_is_within_its_limits(
    cluster: Cluster, column: str, wrong: int, limits: str
) -> None:
    recipe = recipe_of("bert4rec")
    batch = masked(4, np.random.default_rng(SEED))
    ids = batch[column]
    ids.values[int(ids.offsets[2])] = wrong
    with pytest.raises(BadRequest, match=f"{column!r} of {limits}, found {wrong} in example 2"):
        recipe.loss(recipe.model(recipe.prepare(batch)), batch)


def test_the_user_before_the_last_event_does_not_see_it(cluster: Cluster) -> None:
    recipe = recipe_of("dmr")
    batch = lines(3, np.random.default_rng(SEED))
    other = batch["line"].clone()
    other[:, [49, 149]] = 3  # kind and brand of the last event; its category is what is predicted
    first, second = (outputs_of(recipe, Batch({"line": line})) for line in (batch["line"], other))
    torch.testing.assert_close(first["auxiliary"], second["auxiliary"])
    assert not torch.equal(first["click"], second["click"])
    other[:, 50 * 4 + 48] = 0
    assert not outputs_of(recipe, Batch({"line": other}))["auxiliary"].any()
    other[0, 99] = 7
    with pytest.raises(BadRequest, match=r"cate_size: expected above 7, a category .* found 7"):
        recipe.prepare(Batch({"line": other}))


def test_a_user_without_sessions_has_a_logit(cluster: Cluster) -> None:
    batch = sessions(3, np.random.default_rng(SEED))
    none = {"sess_length": torch.zeros(3), "sess_input": bags(np.zeros((3, 100), np.int64))}
    recipe = recipe_of("dsin")
    logits = outputs_of(recipe, Batch({**batch.columns, **none}))
    assert torch.isfinite(logits).all()


def test_influence_of_friends_equals_its_formula() -> None:
    influence = iprec.FriendInfluence(3, views=2)
    items, rows = torch.randn(1, 3), torch.randn(1, 4, 3)
    is_there = torch.tensor([[True, False, True, True]])
    actual = influence(items, iprec.Sequences(rows, is_there))[0]
    for view in range(2):
        part = slice(3 * view, 3 * view + 3)
        friends = rows[0, [0, 2, 3]] @ influence.friend.weight[part].T
        item = items[0] @ influence.item.weight[part].T
        scores = torch.tanh(item @ influence.by_item[view] + friends @ influence.by_friend[view])
        torch.testing.assert_close(actual[view], scores.softmax(0) @ friends)


def test_one_example_is_normalized_by_the_batches_before() -> None:
    norm, x = BatchNorm(3), torch.randn(5, 3)
    twin = nn.BatchNorm1d(3)
    torch.testing.assert_close(norm(x), twin(x))
    twin.eval()
    torch.testing.assert_close(norm(x[:1]), twin(x[:1]))
    torch.testing.assert_close(norm.running_mean, twin.running_mean)


def test_what_does_not_fit_is_refused() -> None:
    for name, values, message in (
        (
            "fastformer",
            {"pooler_type": "mean"},
            "expected 'weightpooler', found 'mean'",
        ),
        (
            "fastformer",
            {"max_position_embeddings": 9},
            "max_position_embeddings: expected at least 30, the longest text or history, found 9",
        ),
        ("fastformer", {"hidden_size": 9}, "a width that is a multiple of 16 heads, found 9"),
        ("fastformer", {"hidden_dropout_prob": 1}, "expected a number >= 0 and < 1, found 1"),
        ("tisas", {"num_heads": 3}, "a width that is a multiple of 3 heads, found 50"),
        ("bert4rec", {"hidden_act": "tanh"}, "hidden_act: expected gelu or relu, found 'tanh'"),
    ):
        with pytest.raises(BadRequest, match=message):
            zoo.load(name).create(Config({"hyper_parameters": values}))
    uneven = ragged([0, 1], [2, 3, 4])
    with pytest.raises(BadRequest, match="2 ids in 'x' of every example, found 3 in example 1"):
        ids_of(Batch({"x": uneven}), "x", 2)
    with pytest.raises(BadRequest, match="expected 'x' as Ragged, found Tensor"):
        ids_of(Batch({"x": torch.ones(2)}), "x", 2)
    a, b = torch.randn(2, 3, 4)
    torch.testing.assert_close(compared(a, b)[:, 8:12], a - b)
