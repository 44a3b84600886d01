"""Models of user behaviour (histories, conversions, choices, words) each learn a signal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from examples.planted.behaviour import choices, clicks_after_history, clicks_and_conversions
from examples.planted.clicks import exact_auc
from tests import plain_loop
from trireme.data import ArrayDataset, Bags, Batch, Ragged, Schema, SkipGramDataset
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.models import DIN, ESMM, LR, SkipGram, Tower, TwoTower
from trireme.models.esmm import esmm_loss
from trireme.models.layers import TargetAttention
from trireme.models.tasks import logit_of_both
from trireme.models.two_tower import InBatchSoftmax
from trireme.models.word2vec import skip_gram_loss

HISTORY, TARGET = ("hist_item_seq", "hist_cat_seq"), ("target_item", "target_cat")
FEATURES = ("a", "b", "c")


def table(name: str, dim: int, lr: float = 0.02) -> tr.Table:
    return tr.Table(name, dim=dim, optimizer=tr.optim.Adam(lr=lr))


def train(cluster: Cluster, model: nn.Module, loss: Any, dataset: Any, epochs: int = 1) -> None:
    set_default(cluster)
    plain_loop.train(model, loss, list(dataset), epochs=epochs)


def all_of(planted: Any, schema: Schema) -> Batch:
    """Every example in one batch."""
    return next(iter(ArrayDataset(planted.columns, schema=schema, batch_size=1 << 30)))


def click_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])


def test_din_learns_from_histories_what_lr_cannot() -> None:
    torch.manual_seed(0)
    schema = Schema([*map(tr.data.Sparse, (*HISTORY, *TARGET)), tr.data.Label("label")])
    train_set, test_set = (clicks_after_history(n, seed=s) for n, s in ((12_000, 1), (4000, 2)))
    dataset = ArrayDataset(train_set.columns, schema=schema, batch_size=200)
    batch = all_of(test_set, schema)
    labels = batch["label"].numpy() > 0
    best = exact_auc(test_set.logits["label"] + 1e-6 * np.arange(len(labels)) % 1, labels)
    actual = {}
    din = DIN(table("items", 4), table("categories", 4), attention=(16,), layers=(16,))
    lr = LR(table("weights", 1), features=TARGET, num_dense=0)
    for name, model, epochs in (("din", din, 3), ("lr", lr, 1)):
        with embedded() as cluster:
            train(cluster, model, click_loss, dataset, epochs)
            with torch.no_grad():
                actual[name] = exact_auc(model.eval()(batch).double().numpy(), labels)
    assert actual["lr"] < 0.55
    assert best - 0.04 < actual["din"] < best + 0.01


def din_batch(history: list[list[int]]) -> Batch:
    """Examples with these histories, the candidate always item 3 of category 4."""
    values = torch.tensor([i for bag in history for i in bag], dtype=torch.int64)
    offsets = torch.tensor([0, *map(len, history)]).cumsum(0)
    ids = {name: Ragged(values, offsets) for name in HISTORY}
    num = len(history)
    return Batch({**ids, "target_item": torch.full((num,), 3), "target_cat": torch.full((num,), 4)})


def test_din_takes_padding_for_nothing_and_empty_histories_for_zeros() -> None:
    model = DIN(table("items", 4), table("categories", 4), attention=(5,), layers=(5,)).eval()
    with embedded() as cluster, torch.no_grad():
        set_default(cluster)
        actual = model(din_batch([[7, 8], [7, 0, 8, 0], [], [0], [8]]))
        torch.testing.assert_close(actual[0], actual[1])
        torch.testing.assert_close(actual[2], actual[3])
        assert len({float(x) for x in actual[[0, 2, 4]]}) == 3
        alone = model(din_batch([[8]]))
        torch.testing.assert_close(alone[0], actual[4])


def test_din_reads_histories_out_of_common_bags() -> None:
    model = DIN(table("items", 4), table("categories", 4)).eval()
    apart = din_batch([[7, 8], [], [9]])
    names = (*HISTORY, *TARGET)
    values = torch.tensor([7, 8, 9, 7, 8, 9, 3, 3, 3, 4, 4, 4])
    offsets = torch.tensor([0, 2, 2, 3, 5, 5, 6, 7, 8, 9, 10, 11, 12])
    with embedded() as cluster, torch.no_grad():
        set_default(cluster)
        together = model(Batch({}, Bags(names, values, offsets)))
        torch.testing.assert_close(together, model(apart))


def test_din_refuses_histories_that_do_not_fit() -> None:
    model = DIN(table("items", 4), table("categories", 4)).eval()
    batch = din_batch([[7, 8], [9]])
    batch.columns["hist_cat_seq"] = Ragged(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]))
    with pytest.raises(
        BadRequest, match=r"'hist_cat_seq' as in 'hist_item_seq' .* found 1 and 2 in example 0"
    ):
        model(batch)
    batch.columns["hist_cat_seq"] = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(BadRequest, match="expected 'hist_cat_seq' as Ragged, found Tensor"):
        model(batch)


def test_attention_sums_each_history_times_its_relevance() -> None:
    attention = TargetAttention(3, layers=(4,))
    candidate, events = torch.randn(2, 3), torch.randn(5, 3)
    actual = attention(candidate, events, torch.tensor([4, 6, 9]))
    for b, part in ((0, events[:2]), (1, events[2:])):
        expected = torch.zeros(3)
        for event in part:
            pair = [candidate[b], event, candidate[b] - event, candidate[b] * event]
            expected += attention.relevance(torch.cat(pair)) * event
        torch.testing.assert_close(actual[b], expected)


def test_esmm_learns_clicks_and_conversions() -> None:
    torch.manual_seed(0)
    labels = [tr.data.Label("click"), tr.data.Label("conversion")]
    schema = Schema([*labels, *map(tr.data.Sparse, FEATURES)])
    train_set, test_set = (
        clicks_and_conversions(n, seed=s, features=FEATURES) for n, s in ((20_000, 1), (8000, 2))
    )
    dataset = ArrayDataset(train_set.columns, schema=schema, batch_size=200)
    model = ESMM(table("rows", 8), features=FEATURES, num_dense=0, layers=(32,))
    batch = all_of(test_set, schema)
    with embedded() as cluster:
        train(cluster, model, esmm_loss, dataset)
        with torch.no_grad():
            outputs = model.eval()(batch)
    for output, label, margin in (("ctr", "click", 0.02), ("ctcvr", "conversion", 0.04)):
        is_positive = batch[label].numpy() > 0
        best = exact_auc(test_set.logits[label], is_positive)
        assert best - margin < exact_auc(outputs[output].numpy(), is_positive) < best + 0.01
    p = {name: torch.sigmoid(logit) for name, logit in outputs.items()}
    torch.testing.assert_close(p["ctcvr"], p["ctr"] * p["cvr"])


def test_the_logit_of_both_is_exact_where_probabilities_are_not() -> None:
    a, b = torch.tensor([-200.0, 30.0, 0.3]), torch.tensor([-100.0, 40.0, -1.0])
    actual = logit_of_both(a, b)
    torch.testing.assert_close(actual[:2], torch.tensor([-300.0, 30.0]), rtol=1e-4, atol=1e-3)
    product = torch.sigmoid(a) * torch.sigmoid(b)
    torch.testing.assert_close(actual[2], torch.logit(product[2]))


def test_two_towers_find_what_users_choose() -> None:
    torch.manual_seed(0)
    names = ("user_id", "item_id", "item_cat")
    schema = Schema([*map(tr.data.Sparse, names), tr.data.Dense("item_share", 1)])
    made = choices(20_000, seed=1, users=100)
    dataset = ArrayDataset(made.columns, schema=schema, batch_size=200)
    model = TwoTower(table("users", 8), table("items", 8), layers=(16,))
    items = {name: torch.as_tensor(column) for name, column in made.items.items()}
    test = choices(2000, seed=2, users=100)
    with embedded() as cluster:
        train(cluster, model, InBatchSoftmax(), dataset, epochs=3)
        with torch.no_grad():
            model.eval()
            index = model.item(items)
            users = model.user({"user_id": torch.as_tensor(test.columns["user_id"])})
    torch.testing.assert_close(index.norm(dim=1), torch.ones(len(index)))
    top = (users @ index.T).topk(40).indices  # of 400
    chosen = torch.as_tensor(test.columns["item_id"]) - 1
    assert (top == chosen[:, None]).any(1).float().mean() > 0.4  # 0.1 by chance


def test_in_batch_softmax_corrects_by_share_and_forgets_repetitions() -> None:
    logits = torch.randn(4, 4)
    share = torch.tensor([[0.5], [0.1], [0.5], [0.2]])
    batch = Batch({"item_id": torch.tensor([1, 2, 1, 3]), "item_share": share})
    corrected = logits - share.log().T
    corrected[0, 2] = corrected[2, 0] = -torch.inf
    expected = -torch.log_softmax(corrected, 1).diagonal().mean()
    torch.testing.assert_close(InBatchSoftmax()(logits, batch), expected)
    for ends in ([0, 1, 2, 3, 3], [0, 1, 1, 3, 4]):
        batch.columns["item_id"] = Ragged(
            torch.tensor([1, 2, 1, 3])[: ends[-1]], torch.tensor(ends)
        )
        with pytest.raises(BadRequest, match="expected one id in 'item_id' of each of 4 examples"):
            InBatchSoftmax()(logits, batch)


def test_skip_gram_puts_words_of_one_topic_together() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(5)
    sentences = [[f"{rng.choice(10)}{'xy'[i % 2]}" for _ in range(20)] for i in range(500)]
    dataset = SkipGramDataset(sentences, batch_size=500, subsample=0, seed=1)
    model = SkipGram(table("words", 8), table("contexts", 8))
    with embedded() as cluster:
        train(cluster, model, skip_gram_loss, dataset)
        with torch.no_grad():
            vectors = model.eval().center({"center": torch.arange(20)})[:, 0]
    topics = np.array([word[1] for word in dataset.words])
    alike = nn.functional.normalize(vectors, dim=1)
    nearest = (alike @ alike.T - 2 * torch.eye(20)).argmax(1)
    assert (topics[nearest.numpy()] == topics).mean() > 0.9


def test_skip_gram_takes_negatives_as_bags_or_as_a_tensor() -> None:
    model = SkipGram(table("words", 3), table("contexts", 3)).eval()
    ids = {"center": torch.tensor([1, 2]), "context": torch.tensor([3, 4])}
    negatives = torch.tensor([[5, 6], [7, 5]])
    ragged = Ragged(negatives.flatten(), torch.tensor([0, 2, 4]))
    with embedded() as cluster, torch.no_grad():
        set_default(cluster)
        actual = model({**ids, "negatives": negatives})
        assert actual.shape == (2, 3)
        torch.testing.assert_close(model({**ids, "negatives": ragged}), actual)
        words, contexts = (
            tr.nn.Embedding(part.table, features="k").eval()
            for part in (model.center, model.context)
        )
        center, [context, *others] = (
            rows({"k": torch.tensor(keys)}) for rows, keys in ((words, [1]), (contexts, [3, 5, 6]))
        )
        expected = torch.stack([center[0] @ other for other in (context, *others)])
        torch.testing.assert_close(actual[0], expected)
    uneven = Ragged(negatives.flatten(), torch.tensor([0, 1, 4]))
    with pytest.raises(BadRequest, match="'negatives' in every example, found between 1 and 3"):
        model({**ids, "negatives": uneven})
    logits = torch.tensor([[0.5, -1.0, 2.0]])
    log_sigmoid = nn.functional.logsigmoid
    expected = -(log_sigmoid(logits[0, 0]) + log_sigmoid(-logits[0, 1:]).sum())
    torch.testing.assert_close(skip_gram_loss(logits, Batch({})), expected)


def test_a_tower_is_a_model_of_its_own() -> None:
    tower = Tower(table("items", 4), features=("item_id", "item_cat"), layers=(5, 3)).eval()
    with embedded() as cluster, torch.no_grad():
        set_default(cluster)
        actual = tower({"item_id": torch.tensor([1, 2]), "item_cat": torch.tensor([1, 1])})
    torch.testing.assert_close(actual.norm(dim=1), torch.ones(2))
    assert actual.shape == (2, 3)
