"""Models that score all items of a user learn a signal, and follow their formulas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import trireme as tr
from tests.plain_loop import ragged, train
from tests.seeds import SEED
from trireme.config import Config
from trireme.data import Batch
from trireme.errors import BadRequest, DataError
from trireme.job.cluster import Cluster
from trireme.models import ENSFM, MHCN, zoo
from trireme.models.columns import AllIds
from trireme.models.ensfm import AllPairsLoss, ItemList, Scores
from trireme.models.mhcn import Hearing, PairAndContrastLoss, Recommendation
from trireme.models.social_graph import SocialGraph


def table(name: str, dim: int) -> tr.Table:
    normal = tr.initializer.Normal(std=0.1)
    return tr.Table(name, dim=dim, optimizer=tr.optim.Adam(lr=0.05), initializer=normal)


NUM_ITEMS = 12
FIELDS = [[100 + item, item % 3] for item in range(NUM_ITEMS)]


def shoppers(users: list[int], taken: list[list[int]]) -> Batch:
    """As PaddleRec's reader has them: all items, with the first one again; the place behind the
    last item fills up a user's items.
    """
    num = len(users)
    items = [value for fields in (*FIELDS, FIELDS[0]) for value in fields]
    longest = max(map(len, taken))
    padded = [[*row, *[NUM_ITEMS] * (longest - len(row))] for row in taken]
    columns = {
        "user": ragged(*[[1000 + user, user % 3] for user in users]),
        "items": ragged(*[items] * num),
        "taken": ragged(*padded),
        "num_items": torch.full((num,), float(NUM_ITEMS)),
    }
    return ItemList(2)(Batch(columns))


def test_ensfm_equals_its_formula_over_all_pairs(cluster: Cluster) -> None:
    model = ENSFM(table("users", 4), table("items", 4), user_fields=3).eval()
    with torch.no_grad():
        model.between.copy_(torch.randn(3))
        model.within.copy_(torch.randn(3))
        model.bias.fill_(0.3)
        taken = [[0, 5], [7], []]
        batch = shoppers([1, 2, 3], taken)
        scores = Scores(model).eval()(batch)
        rows = model.items(batch).unflatten(0, (NUM_ITEMS, 2))
        user = model.user(batch).rows[1, :2]
        a, b = rows[7]
        own = a[0] + b[0] + model.within @ (a[1:] * b[1:])
        own_user = user[0, 0] + user[1, 0] + model.within @ (user[0, 1:] * user[1, 1:])
        both = model.between @ ((a + b)[1:] * (user[0] + user[1])[1:])
        torch.testing.assert_close(scores[1, 7], 0.3 + own + own_user + both)
        loss = AllPairsLoss(0.25)(model(batch), batch)
        wanted, weights = torch.zeros(3, NUM_ITEMS), torch.full((3, NUM_ITEMS), 0.25)
        for user_number, places in enumerate(taken):
            wanted[user_number, places] = weights[user_number, places] = 1
        whole = (weights * (scores - wanted).square()).sum() - wanted.sum()
    torch.testing.assert_close(loss, whole / 3)


def test_ensfm_learns_who_takes_what(cluster: Cluster) -> None:
    """Users take some of the items whose second field is theirs."""
    model = ENSFM(table("users", 9), table("items", 9))
    draw = np.random.default_rng(SEED)

    def batch(num: int) -> Batch:
        users = draw.integers(0, 30, num).tolist()
        wanted = [[item for item in range(NUM_ITEMS) if item % 3 == user % 3] for user in users]
        return shoppers(users, [draw.permutation(items)[:3].tolist() for items in wanted])

    train(model, AllPairsLoss(0.5), [batch(50) for _ in range(50)])
    tested = batch(100)
    with torch.no_grad():
        scores = Scores(model).eval()(tested)
    metric = tr.metrics.TopK(4)
    metric.update(scores, tested["taken_places"])
    assert metric.compute()["recall"] > 0.9


def test_ensfm_refuses_items_of_other_fields() -> None:
    batch = shoppers([1], [[1, 2]])
    assert batch["taken_places"].values.tolist() == [1, 2]
    assert batch["all_items"].values.tolist() == [value for fields in FIELDS for value in fields]
    with pytest.raises(BadRequest, match=r"expected 4 fields of each item.*found 26 ids"):
        ItemList(4)(batch)
    with pytest.raises(BadRequest, match=r"expected 12 items and one more in 'items', .* found 26"):
        ItemList(1)(batch)
    taken = r"expected 'taken' of 0 to 12, as 'num_items' says, found {} in example 1"
    for place in (-1, 13):
        with pytest.raises(BadRequest, match=taken.format(place)):
            shoppers([1, 2], [[1, 2], [12, place]])
    alone = Batch({"user": batch["user"], "items": batch["items"]})
    assert "taken_places" not in ItemList(2, has_taken=False)(alone)
    recipe = zoo.load("ensfm").create(Config({"runner": {"mode": "test"}}))
    assert recipe.evaluation.schema.names == ("user", "items")
    assert list(recipe.evaluation.metrics) == []


def graph(folder: Path, *, num_users: int = 20) -> SocialGraph:
    """Users of two kinds trust each other and take items of their kind, in turn. Each fifth rating
    is held back.
    """
    taken = [
        (user, 2 * ((i + user // 2) % 5) + user % 2) for user in range(num_users) for i in range(5)
    ]
    trusts = [(user, (user + step) % num_users) for user in range(num_users) for step in (2, 4, -2)]
    (folder / "ratings").write_text("".join(f"u{user}\ti{item}\t3\n" for user, item in taken))
    (folder / "trusts").write_text("".join(f"u{one}\tu{other}\n" for one, other in trusts))
    return SocialGraph.read(folder / "ratings", folder / "trusts")


def test_a_graph_has_the_numbers_of_paddlerecs_reader(tmp_path: Path) -> None:
    ratings = ["a x 5", "a y 2", "b x 1", "c x 0.5", "b z 9", "b z 9", "c y 1", "c w 1", "b z 3"]
    lines = [line.replace(" ", "\t") + "\n" for line in ratings]
    (tmp_path / "ratings").write_text("".join(lines))
    (tmp_path / "trusts").write_text("a\tb\nb\ta\nb\td\nc\tb\na\tb\n")
    social = SocialGraph.read(tmp_path / "ratings", tmp_path / "trusts")
    # Of the ratings >= 1 the first and the sixth are held back.
    assert list(social.users) == ["a", "b", "c"]
    assert list(social.items) == ["y", "x", "z", "w"]
    assert social.taken.T.tolist() == [[0, 0], [1, 1], [1, 2], [2, 3]]
    assert social.trusts.T.tolist() == [[0, 1], [1, 0], [2, 1]]
    torch.testing.assert_close(social.taken_weights(), torch.tensor([1, 0.5**0.5, 0.5**0.5, 1]))


def test_a_graph_refuses_other_files(tmp_path: Path) -> None:
    (tmp_path / "ratings").write_text("a\tx\t5\n")
    (tmp_path / "trusts").write_text("a\n")
    for ratings, message in (
        ("none", "expected a file, found none at"),
        ("trusts", "trusts line 1: expected 3 values, found 'a"),
        ("ratings", "expected at least two ratings >= 1 in"),
    ):
        with pytest.raises(DataError, match=message):
            SocialGraph.read(tmp_path / ratings, tmp_path / "trusts")
    (tmp_path / "ratings").write_text("a\tx\tmuch\n")
    with pytest.raises(DataError, match="expected a number as a rating, found 'much'"):
        SocialGraph.read(tmp_path / "ratings", tmp_path / "trusts")
    with pytest.raises(BadRequest, match=r"runner\.rating_file: expected a file, found None"):
        zoo.load("mhcn").create(Config({}))


def test_motifs_are_triangles_of_trust_and_items_in_common(tmp_path: Path) -> None:
    """u0 -> u1 -> u2 -> u0 is a circle; u3 and u4 trust each other, and share two items; u5 and u6
    share two items alone, u0 and u1 one.
    """
    names = {0: "p", 1: "p", 2: "q", 3: "rs", 4: "rs", 5: "tv", 6: "tv"}
    taken = [f"{user}\t{item}\t1\n" for user, items in names.items() for item in items]
    held_back = "0\tp\t1\n"
    lines = [held_back if i % 5 == 0 else taken.pop(0) for i in range(14)]
    assert not taken
    (tmp_path / "ratings").write_text("".join(lines))
    (tmp_path / "trusts").write_text("0\t1\n1\t2\n2\t0\n3\t4\n4\t3\n")
    trust, jointly, alone = SocialGraph.read(tmp_path / "ratings", tmp_path / "trusts").motifs()
    for rows, pairs in (
        (trust, [(0, 1), (1, 2), (0, 2)]),
        (jointly, [(0, 1), (3, 4)]),
        (alone, [(5, 6)]),
    ):
        expected = torch.zeros(7, 7)
        for one, other in pairs:
            expected[one, other] = expected[other, one] = 1
        if rows is alone:  # a user shares two items with himself, too
            expected[range(3, 7), range(3, 7)] = 1
        expected /= expected.sum(1, keepdim=True).clamp(min=1)
        torch.testing.assert_close(rows.to_dense(), expected)
        x, weights = torch.randn(7, 3, requires_grad=True), torch.randn(7, 3)
        (Hearing(rows)(x) * weights).sum().backward()
        torch.testing.assert_close(Hearing(rows)(x), expected @ x)
        torch.testing.assert_close(x.grad, expected.T @ weights)


def test_motifs_of_many_users_take_no_memory_for_all_pairs() -> None:
    """A dense matrix of so many users would take 40 GB."""
    num = 100_000
    users = torch.arange(num)
    trusts = torch.stack([users, (users + 1) % num])
    social = SocialGraph(
        users=dict(zip(map(str, range(num)), range(num), strict=True)),
        items=dict(zip(map(str, range(num // 2)), range(num // 2), strict=True)),
        taken=torch.stack([users, users // 2]),
        trusts=torch.cat([trusts, trusts.flip(0)], 1),
    )
    by_trust, jointly, alone = social.motifs()
    assert by_trust._nnz() == alone._nnz() == 0  # a circle of that length has no triangle
    assert torch.equal(jointly.indices(), torch.stack([users, users ^ 1]))
    assert (jointly.values() == 1).all()


def test_mhcn_scores_items_on_the_device_of_its_rows(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    social = graph(tmp_path)
    model = MHCN(table("users", 8), table("items", 8), social)
    users, items = torch.randn(20, 8), torch.randn(10, 8)
    monkeypatch.setattr(model, "spread", lambda _: (users, items))
    asked = torch.tensor([7, 3, 7])
    expected = users[asked] @ items.T
    for b, user in enumerate(asked):
        expected[b, social.taken[1][social.taken[0] == user]] = torch.finfo(torch.float32).min
    # Not the device of the rows: a tensor of it would not fit.
    with torch.device("meta"):
        scores = Recommendation(model, also_taken=False)(Batch({"user": asked}))
    torch.testing.assert_close(scores, expected)


def test_mhcn_learns_what_users_of_a_kind_take(cluster: Cluster, tmp_path: Path) -> None:
    social = graph(tmp_path)
    model = MHCN(table("users", 8), table("items", 8), social)
    add = AllIds({"all_users": len(social.users), "all_items": len(social.items)})
    draw = np.random.default_rng(SEED)
    kinds = torch.tensor([int(name[1:]) % 2 for name in social.items])

    def batch(num: int) -> Batch:
        users, items = social.taken[:, draw.integers(0, social.taken.shape[1], num)]
        others = torch.tensor([int(draw.choice(torch.where(kinds != kinds[i])[0])) for i in items])
        columns = {"user": users, "item": items, "other_item": others}
        return add(Batch({name: column.float() for name, column in columns.items()}))

    loss = PairAndContrastLoss(0.01)
    train(model, loss, [batch(40) for _ in range(40)])
    tested = batch(40)
    with torch.no_grad():
        outputs = model(tested)
        scores = Recommendation(model, also_taken=True).eval()(tested)
        others = Recommendation(model, also_taken=False).eval()(tested)
    assert list(outputs) == ["right", "wrong"]
    assert (outputs["right"] > outputs["wrong"]).float().mean() > 0.95
    users, items = (tested[name].long() for name in ("user", "item"))
    torch.testing.assert_close(scores.gather(1, items[:, None])[:, 0], outputs["right"])
    lowest = torch.finfo(torch.float32).min
    assert (others[torch.arange(40), items] == lowest).all()
    is_taken = torch.zeros(20, 10, dtype=torch.bool)
    is_taken[social.taken[0], social.taken[1]] = True
    torch.testing.assert_close(others == lowest, is_taken[users])
    # An item that was held back is of the user's kind, as those taken are.
    best = others.argmax(1)
    assert (kinds[best] == kinds[items]).float().mean() > 0.9
