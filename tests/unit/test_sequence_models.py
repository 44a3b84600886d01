"""Models of histories, texts, users and items learn a signal, and follow their formulas."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import trireme as tr
from examples.planted.clicks import exact_auc
from tests.plain_loop import ragged, train
from tests.seeds import SEED
from trireme.config import Config
from trireme.data import Batch, Ragged
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.models import BST, DIEN, DPIN, DSSM, FLEN, NCF, SIGN, TagSpace, TextCNN, zoo
from trireme.models.bst import TransformerLayer
from trireme.models.columns import first_is_right
from trireme.models.dien import NOT_CLICKED, AttentionGRU
from trireme.models.dssm import Similarity
from trireme.models.inputs import ValuedVectors
from trireme.models.losses import ClickAndAuxiliaryLoss, MarginLoss
from trireme.models.sequences import SequenceRows
from trireme.models.sign import SignLoss, add_click
from trireme.models.textcnn import class_loss

log_loss = nn.functional.binary_cross_entropy_with_logits


def table(name: str, dim: int, lr: float = 0.02) -> tr.Table:
    return tr.Table(name, dim=dim, optimizer=tr.optim.Adam(lr=lr))


def test_sequences_are_padded_and_cut(cluster: Cluster) -> None:
    part = SequenceRows(table("t", 2), column="h", length=3).eval()
    free = SequenceRows(table("u", 2), column="h", length=3, padding_key=None).eval()
    whole = ragged([9, 9], [4, 0], [], [1, 2, 3, 4])
    batch = Batch({"h": Ragged(whole.values, whole.offsets[1:])})  # a part of longer values
    rows, is_there = part(batch)
    assert is_there.tolist() == [[True, False, False], [False] * 3, [True] * 3]
    one = part.embedding({"h": torch.tensor([4, 1, 2, 3])})
    expected = torch.zeros(3, 3, 2)
    expected[0, 0], expected[2] = one[0], one[1:]
    torch.testing.assert_close(rows, expected)
    assert free(batch).is_there.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert free(batch).rows[0, 1].any()
    empty = part(Batch({"h": ragged([], [])}))
    assert not empty.rows.any()
    assert not empty.is_there.any()
    with pytest.raises(BadRequest, match="expected 'h' as Ragged, found Tensor"):
        part(Batch({"h": torch.ones(2, 3, dtype=torch.int64)}))


def test_columns_side_by_side_have_as_many_ids() -> None:
    one, more = ragged([1], [1, 2]), ragged([1], [1, 2, 3])
    bst = BST(table("u", 4), (table("i", 4), table("c", 4), table("p", 4)), heads=2)
    dien = DIEN(table("i", 4), table("c", 4))
    model: nn.Module
    for name, model, columns in (
        ("cate", bst, ("history", "cate", "position")),
        ("hist_cat_seq", dien, (*HISTORY, *NOT_CLICKED)),
        ("neg_hist_item_seq", dien, (*HISTORY, *NOT_CLICKED)),
        ("hist_cat", small_dpin(), ("hist_item", "hist_cat", "target_pos")),
        ("neg", zoo.load("tisas").create(Config({})).model, ("seq", "pos", "neg")),
    ):
        batch = Batch({**dict.fromkeys(columns, one), "target_pos": ragged([1], [1]), name: more})
        message = f"as many ids in '{name}' as in .* of every .* found 3 and 2 in example 1"
        with pytest.raises(BadRequest, match=message):
            model(batch)


def test_values_belong_to_ids_of_each_example() -> None:
    fields = ValuedVectors(table("t", 2), num_fields=2)
    values = torch.ones(2, 2)
    batch = Batch({"feat_idx": ragged([1], [1, 2, 3]), "feat_value": values})
    with pytest.raises(BadRequest, match="2 ids in 'feat_idx' of every example, found 1 in exam"):
        fields(batch)
    columns = {"feat_idx": ragged([1, 2], [3, 4]), "feat_value": torch.ones(4, 1)}
    with pytest.raises(BadRequest, match=r"2 numbers in 'feat_value' .* found .* shape \(4, 1\)"):
        fields(Batch(columns))


HISTORY, TARGET = ("hist_item_seq", "hist_cat_seq"), ("target_item", "target_cat")


def histories(num: int, draw: np.random.Generator) -> Batch:
    """Histories of 2 to 5 events. The label is whether the candidate's category, of 5, is that of
    the last event, which no single column says.
    """
    sizes = draw.integers(2, 6, num)
    categories = [draw.integers(1, 6, size) for size in sizes]
    last = np.array([bag[-1] for bag in categories])
    wanted = np.where(draw.random(num) < 0.4, last, draw.integers(1, 6, num))
    bags = ragged(*(bag.tolist() for bag in categories))
    others = torch.from_numpy(draw.integers(1, 6, len(bags.values)))
    item = Ragged(
        bags.values + 5 * torch.from_numpy(draw.integers(0, 4, len(others))), bags.offsets
    )
    single = torch.ones(num, dtype=torch.int64)
    candidate = torch.from_numpy(wanted)
    return Batch(
        {
            **dict.fromkeys(("hist_item_seq", "history"), item),
            **dict.fromkeys(("hist_cat_seq", "cate"), bags),
            **{f"neg_{name}": Ragged(others, bags.offsets) for name in HISTORY},
            "position": Ragged(torch.cat([torch.arange(n, 0, -1) for n in sizes]), bags.offsets),
            **dict.fromkeys((*TARGET, "target", "target_cate"), candidate),
            **dict.fromkeys(("userid", "target_position"), single),
            "label": torch.from_numpy(wanted == last).float(),
        }
    )


LEARNING: dict[str, Any] = {
    "dien": (
        lambda: DIEN(table("items", 4, 0.05), table("categories", 4, 0.05), length=5, layers=(32,)),
        ClickAndAuxiliaryLoss(0.1),
    ),
    "bst": (
        lambda: BST(
            table("user", 4),
            tuple(table(name, dim, 0.05) for name, dim in (("item", 4), ("cat", 4), ("place", 2))),
            length=5, heads=2, inner=16, layers=(16,), dropout=0.0,
        ),
        lambda logits, batch: log_loss(logits, batch["label"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEARNING)
def test_a_model_learns_from_histories(name: str, cluster: Cluster) -> None:
    make, loss = LEARNING[name]
    model, draw = make(), np.random.default_rng(SEED)
    train(model, loss, [histories(200, draw) for _ in range(60)], epochs=3)
    tested = histories(2000, draw)
    with torch.no_grad():
        outputs = model(tested)
    logits = outputs["click"] if name == "dien" else outputs
    assert exact_auc(logits.double().numpy(), tested["label"].numpy() > 0) > 0.9


def test_padding_and_what_is_cut_off_change_nothing(cluster: Cluster) -> None:
    dien = DIEN(table("items", 4), table("categories", 4), length=3).eval()
    bags = [[7, 8], [7, 8, 0], [7, 8, 0, 5], []]
    names = (*HISTORY, "neg_hist_item_seq", "neg_hist_cat_seq")
    fixed = {name: torch.full((4,), 3) for name in TARGET}
    outputs = dien(Batch({**{name: ragged(*bags) for name in names}, **fixed}))
    for output in outputs.values():
        torch.testing.assert_close(output[1:3], output[:1].expand(2))
        assert torch.isfinite(output).all()
    bst = BST(
        table("user", 4), (table("item", 4), table("category", 4), table("position", 4)), length=3
    ).eval()
    columns = {name: ragged(*bags) for name in ("history", "cate", "position")}
    single = ("userid", "target", "target_cate", "target_position")
    logits = bst(Batch({**columns, **{name: torch.full((4,), 3) for name in single}}))
    torch.testing.assert_close(logits[1:3], logits[:1].expand(2))
    assert torch.isfinite(logits).all()


def clicks_at_positions(num: int, draw: np.random.Generator) -> Batch:
    """Events of 8 items at 3 positions, 0 to 2 at each. The label is whether the candidate's parity
    is that of the events at its position, all of one parity.
    """
    counts = draw.integers(0, 3, (num, 3))
    parities = draw.integers(0, 2, (num, 3))
    events = 2 * draw.integers(1, 5, (num, 3, 2)) + parities[:, :, None]
    events *= np.arange(2) < counts[:, :, None]
    position, item = draw.integers(1, 4, num), draw.integers(2, 10, num)
    at = np.arange(num), position - 1
    label = (item % 2 == parities[at]) & (counts[at] > 0)
    history = Ragged(torch.from_numpy(events.reshape(-1)), torch.arange(num + 1) * 6)
    single = torch.arange(num + 1)
    return Batch(
        {
            **dict.fromkeys(("hist_item", "hist_cat"), history),
            **dict.fromkeys(("target_item", "target_cat"), torch.from_numpy(item)),
            "target_pos": Ragged(torch.from_numpy(position), single),
            "label": torch.from_numpy(label).float(),
        }
    )


def small_dpin() -> DPIN:
    tables = [table(name, 4, 0.05) for name in ("events", "kinds", "items", "classes")]
    sizes: dict[str, Any] = {"size": 8, "num_layers": 1, "base": (16, 8)}
    return DPIN((tables[0], tables[1]), (tables[2], tables[3]), length=2, **sizes)


def test_dpin_learns_what_is_clicked_at_which_position(cluster: Cluster) -> None:
    model, draw = small_dpin(), np.random.default_rng(SEED)
    batches = [clicks_at_positions(200, draw) for _ in range(40)]
    train(model, lambda logits, batch: log_loss(logits, batch["label"]), batches, epochs=4)
    tested = clicks_at_positions(2000, draw)
    with torch.no_grad():
        logits = model(tested)
        everywhere = model.all_positions(tested)
        at = tested["target_pos"].values[:, None] - 1
        torch.testing.assert_close(logits, everywhere.gather(1, at)[:, 0])
    assert exact_auc(logits.double().numpy(), tested["label"].numpy() > 0) > 0.9


def test_dpin_averages_the_events_of_a_position_and_leaves_padding_out(cluster: Cluster) -> None:
    model = small_dpin().eval()
    batch = clicks_at_positions(3, np.random.default_rng(SEED))
    history = ragged([0, 0, 3, 0, 4, 5], [0, 0, 0, 3, 4, 5], [0, 0, 3, 3, 4, 5])
    for name in ("hist_item", "hist_cat"):
        batch.columns[name] = history
    same = torch.full((3,), 2)
    batch.columns |= dict.fromkeys(("target_item", "target_cat"), same)
    seen: list[torch.Tensor] = []
    model.join.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        logits = model.all_positions(batch)
        rows = [part.embedding({part.column: torch.tensor([4, 5])}) for part in model.events.parts]
        events = torch.cat(rows, 1)
        shares = torch.exp(model.shares(events))
    torch.testing.assert_close(logits[1:], logits[:1].expand(2, -1))
    assert not seen[0][0, 0, 4:].any()
    torch.testing.assert_close(seen[0][0, 2, 4:], (shares * events).sum(0) / shares.sum(0))
    batch.columns["target_pos"] = ragged([1], [4], [2])
    with pytest.raises(BadRequest, match=r"one 'target_pos' from 1 to 3 .* found \[1, 4, 2\]"):
        model(batch)


def graphs(num: int, draw: np.random.Generator) -> Batch:
    """Two or three features of 10, and all pairs of them. The label is whether the first two are of
    one parity.
    """
    nodes = [draw.integers(0, 10, draw.integers(2, 4)).tolist() for _ in range(num)]
    pairs = [list(itertools.combinations_with_replacement(range(len(n)), 2)) for n in nodes]
    ends = [[n[i] for pair in own for i in pair] for n, own in zip(nodes, pairs, strict=True)]
    yes = torch.tensor([float(n[0] % 2 == n[1] % 2) for n in nodes])
    return add_click(
        Batch(
            {
                "nodes": ragged(*nodes),
                "edges": ragged(*(list(itertools.chain(*own)) for own in pairs)),
                "ends": ragged(*ends),
                "label": torch.stack([1 - yes, yes], 1),
            }
        )
    )


def test_sign_learns_which_pairs_matter(cluster: Cluster) -> None:
    model, draw = SIGN(table("nodes", 8), table("edges", 8)), np.random.default_rng(SEED)
    train(model, SignLoss(1e-3, 1e-3), [graphs(100, draw) for _ in range(40)], epochs=5)
    tested = graphs(1000, draw)
    with torch.no_grad():
        no, yes = model(tested)["scores"].double().numpy().T
    assert exact_auc(yes - no, tested["click"].numpy() > 0) > 0.85


def test_sign_equals_its_formulas(cluster: Cluster) -> None:
    model = SIGN(table("nodes", 3), table("edges", 3), hidden=4).eval()
    batch = graphs(5, np.random.default_rng(SEED))
    loss = SignLoss(0.1, 0.2)
    expected = []
    with torch.no_grad():
        out = model(batch)
        for b in range(5):
            parts = {name: batch[name] for name in ("nodes", "edges", "ends")}
            nodes, edges, ends = (
                part.values[part.offsets[b] : part.offsets[b + 1]] for part in parts.values()
            )
            u, v = (part({name: ids}) for part, name, ids in (
                (model.nodes, "nodes", nodes), (model.ends, "ends", ends)))  # fmt: skip
            messages: list[list[torch.Tensor]] = [[] for _ in nodes]
            count = torch.zeros(())
            for e, (i, j) in enumerate(edges.view(-1, 2).tolist()):
                location = model.exists(v[2 * e] * v[2 * e + 1])[0]
                strength = (torch.sigmoid(location) * 1.2 - 0.1).clamp(0, 1)
                if strength > 0:
                    messages[j].append(strength * model.interaction(u[i] * u[j]))
                count += torch.sigmoid(location - 0.66 * math.log(0.1 / 1.1))
            became = [torch.stack(m).mean(0) if m else torch.zeros(3) for m in messages]
            scores = model.head(torch.stack(became).mean(0))
            torch.testing.assert_close(out["scores"][b], scores)
            error = (scores.clamp(0, 1) - batch["label"][b]).square().mean()
            expected.append(error + 0.1 * count + 0.2 * torch.stack(became).square().sum())
        torch.testing.assert_close(loss(out, batch), torch.stack(expected).mean())
    with pytest.raises(BadRequest, match="an interval around 0 and 1, found"):
        SIGN(table("nodes", 3), table("edges", 3), lowest=0.1)


def test_the_edges_that_sign_expects_are_as_many_as_it_draws(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [list(range(10))] * 400
    edges = [i for pair in itertools.product(range(10), repeat=2) for i in pair]
    model = SIGN(table("nodes", 3), table("edges", 3), hidden=4, dropout=0.0).train()
    with torch.no_grad():  # some edges likely, others not
        model.exists[-1].weight.fill_(6.0)
        model.exists[-1].bias.fill_(-3.0)
    strengths, draw = [], model._strength

    def recorded(location_E: torch.Tensor) -> torch.Tensor:
        strengths.append(draw(location_E))
        return strengths[-1]

    monkeypatch.setattr(model, "_strength", recorded)
    columns = {"nodes": ragged(*nodes), **{n: ragged(*[edges] * 400) for n in ("edges", "ends")}}
    torch.manual_seed(SEED)
    with torch.no_grad():
        expected = model(Batch(columns))["edges"]
    drawn = (strengths[0] > 0).view(400, 100).sum(1)
    assert 5 < expected[0] < 95
    assert float(drawn.float().mean()) == pytest.approx(float(expected[0]), abs=1.5)


def test_an_evolution_is_a_gru_whose_steps_shrink_with_the_attention() -> None:
    evolution = AttentionGRU(3)
    x, attention = torch.randn(2, 4, 3), torch.rand(2, 4)
    state, expected = torch.zeros(2, 3), []
    update, reset = evolution.gates[0].weight.chunk(2)
    new = evolution.candidate[0].weight
    for t in range(4):
        z, r = (torch.sigmoid(torch.cat([x[:, t], state], 1) @ w.T) for w in (update, reset))
        candidate = torch.tanh(torch.cat([x[:, t], r * state], 1) @ new.T)
        z = z * attention[:, t, None]
        state = (1 - z) * state + z * candidate
        expected.append(state)
    torch.testing.assert_close(evolution(x, attention), torch.stack(expected, 1))
    frozen = evolution(x, torch.tensor([[1.0, 0.0, 0.0, 1.0]] * 2))
    assert torch.equal(frozen[:, 0], frozen[:, 2])


def test_a_transformer_layer_is_torchs() -> None:
    own = TransformerLayer(6, heads=2, inner=5, dropout=0.0)
    twin = nn.TransformerEncoderLayer(
        6, 2, 5, dropout=0.0, activation=nn.functional.leaky_relu, batch_first=True
    )
    parts = own.queries_keys_values.weight.view(2, 3, 3, 6).transpose(0, 1).reshape(18, 6)
    biases = own.queries_keys_values.bias.view(2, 3, 3).transpose(0, 1).reshape(18)
    with torch.no_grad():
        twin.self_attn.in_proj_weight.copy_(parts)
        twin.self_attn.in_proj_bias.copy_(biases)
        for one, other in (
            (own.join, twin.self_attn.out_proj),
            (own.hidden[0], twin.linear1),
            (own.hidden[2], twin.linear2),
        ):
            other.load_state_dict(one.state_dict())
    x, is_there = torch.randn(3, 4, 6), torch.rand(3, 4) > 0.3
    is_there[:, -1] = True
    expected = twin(x, src_key_padding_mask=~is_there)
    torch.testing.assert_close(own(x, is_there), expected)
    is_there[1] = False  # on every kernel as if all were there
    everywhere = own(x, torch.ones_like(is_there))
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel([backend, SDPBackend.MATH]):
            out = own(x, is_there)
        torch.testing.assert_close(out[1], everywhere[1])
        torch.testing.assert_close(out[::2], expected[::2])


def test_flen_equals_its_formula(cluster: Cluster) -> None:
    model = FLEN(table("t", 3), fields=[["a", "b"], ["c"], ["d"]], layers=(4,)).eval()
    with torch.no_grad():
        model.between.copy_(torch.randn(3))
        model.within.copy_(torch.randn(3))
        batch = {name: torch.tensor([key]) for key, name in enumerate("abcd")}
        rows = model.embedding(batch)[0]
        a, b, c, d = rows[:, 1:]
        r, s = model.between, model.within
        h = r[0] * (a + b) * c + r[1] * (a + b) * d + r[2] * c * d + s[0] * 2 * a * b
        deep = torch.cat([model.interaction(h), model.mlp(torch.cat([a, b, c, d]))])
        expected = rows[:, 0].sum() + model.head(deep)[0]
        torch.testing.assert_close(model(batch)[0], expected)


def test_flen_learns_a_planted_signal(cluster: Cluster) -> None:
    """The label is whether ids of two fields are of the same kind, and those of one field, too."""
    model = FLEN(table("t", 9), fields=[["a", "b"], ["c"]], layers=(16, 8))
    draw = np.random.default_rng(SEED)
    ids = torch.from_numpy(draw.integers(0, 20, (4000, 3)))
    labels = ((ids[:, 0] % 2 == ids[:, 2] % 2) & (ids[:, 0] % 2 == ids[:, 1] % 2)).float()
    keys = ids + 20 * torch.arange(3)
    columns = {**dict(zip("abc", keys.T.contiguous(), strict=True)), "label": labels}
    parts = zip(*(column.split(200) for column in columns.values()), strict=True)
    batches = [Batch(dict(zip(columns, part, strict=True))) for part in parts]
    train(model, lambda logits, batch: log_loss(logits, batch["label"]), batches[:15], epochs=6)
    tested = {name: column[3000:] for name, column in columns.items()}
    with torch.no_grad():
        scores = model(Batch(tested)).double().numpy()
    assert exact_auc(scores, tested["label"].numpy() > 0) > 0.95


@pytest.mark.parametrize(("factors", "dim", "layers"), [(4, 8, (8, 4)), (4, 4, ()), (0, 4, (8,))])
def test_ncf_learns_who_takes_what(
    cluster: Cluster, factors: int, dim: int, layers: tuple[int, ...]
) -> None:
    """Users and items of two kinds: a user takes the items of the same kind."""
    model = NCF(
        table("users", dim, 0.05), table("items", dim, 0.05), factors=factors, layers=layers
    )
    draw = np.random.default_rng(SEED)
    users, items = (torch.from_numpy(draw.integers(0, 40, 4000)) for _ in range(2))
    labels = ((users % 2) == (items % 2)).float()
    columns = {"user_id": users, "item_id": items, "label": labels}
    parts = zip(*(column.split(200) for column in columns.values()), strict=True)
    batches = [Batch(dict(zip(columns, part, strict=True))) for part in parts]
    train(model, lambda logits, batch: log_loss(logits, batch["label"]), batches, epochs=4)
    with torch.no_grad():
        assert exact_auc(model(Batch(columns)).double().numpy(), labels.numpy() > 0) > 0.95


def test_ncf_refuses_what_does_not_fit() -> None:
    for dims, options in (((4, 5), {}), ((4, 4), {"factors": 4}), ((4, 4), {"layers": ()})):
        with pytest.raises(BadRequest, match="NCF: expected tables of one dim"):
            NCF(*(table(name, dim) for name, dim in zip("ui", dims, strict=True)), **options)
    for values, message in (
        ({"mode": "NCF"}, "mode: expected NCF_NeuMF or NCF_GMF or NCF_MLP, found 'NCF'"),
        ({"fc_layers": [7, 4]}, "fc_layers: expected an even number of inputs, found 7"),
    ):
        with pytest.raises(BadRequest, match=message):
            zoo.load("ncf").create(Config({"hyper_parameters": values}))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("textcnn", {"max_len": 2}, "expected texts of at least 3 words, .* found length 2"),
        ("tagspace", {"text_len": 4}, "expected texts of at least 5 words, .* found length 4"),
        ("bst", {"dropout_rate": 1.5}, "dropout_rate: expected a number >= 0 and < 1, found 1.5"),
        (
            "bst",
            {"dropout_rate": 0.1, "prepostprocess_dropout": 0.2},
            "prepostprocess_dropout: expected 0.1, as dropout_rate, found 0.2",
        ),
        ("bst", {"d_key": 4}, "d_key: expected 48, the 288 of an event by n_head 6, found 4"),
        ("deeprec", {"dp_drop_prob": 2}, "dp_drop_prob: expected a number >= 0 and < 1, found 2"),
        ("din", {"act": ["relu"]}, "act: expected relu or sigmoid, found \\['relu'\\]"),
    ],
)
def test_sizes_and_dropouts_that_do_not_fit_are_refused(
    name: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        zoo.load(name).create(Config({"hyper_parameters": values}))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("bst", ["dropout_rate"]),
        ("dcn", ["l2_reg_cross"]),
        ("dien", ["auxiliary_w"]),
        ("ensfm", ["negative_weight"]),
        ("escm2", ["counterfactual_w", "global_w"]),
        ("tagspace", ["margin"]),
        ("multiview_simnet", ["margin"]),
        ("sign", ["l0_weight", "l2_weight"]),
        ("autofis", ["grad_c", "grad_mu"]),
    ],
)
def test_a_zero_switches_a_part_off(name: str, keys: list[str]) -> None:
    config = Config({"hyper_parameters": dict.fromkeys(keys, 0)})
    assert zoo.load(name).create(config).model is not None


def test_dssm_finds_the_document_of_a_query(cluster: Cluster) -> None:
    config = Config({"hyper_parameters": {"trigram_d": 20, "neg_num": 2, "fc_sizes": [16, 8]}})
    recipe = zoo.load("dssm").create(config)
    model = recipe.model
    assert isinstance(model, DSSM)
    draw = np.random.default_rng(SEED)

    def batch(num: int) -> Batch:
        """A document has the terms of its query, shifted by ten; another one has others."""
        topics = draw.integers(0, 10, (4, num))
        terms = torch.nn.functional.one_hot(torch.from_numpy(topics), 20).float()
        columns = {"query": terms[0], "doc_pos": terms[0].roll(10, 1)}
        return Batch({**columns, **{f"doc_neg_{i}": terms[i + 1].roll(10, 1) for i in range(2)}})

    train(model, recipe.loss, [batch(100) for _ in range(60)] * 2)
    tested = batch(200)
    with torch.no_grad():
        cosines = model(tested)
        torch.testing.assert_close(recipe.evaluation.model(tested), cosines[:, 0])
    assert isinstance(recipe.evaluation.model, Similarity)
    assert (cosines[:, :1] >= cosines[:, 1:]).float().mean() > 0.97
    expected = -torch.log_softmax(cosines, 1)[:, 0].mean()
    torch.testing.assert_close(recipe.loss(cosines, tested), expected)
    for acts in (["relu"], ["relu", "tanh"], ["gelu", "gelu"]):
        values = {"fc_sizes": [16, 8], "fc_acts": acts}
        with pytest.raises(BadRequest, match="fc_acts: expected relu or tanh, 2 times, found"):
            zoo.load("dssm").create(Config({"hyper_parameters": values}))


def words(num: int, draw: np.random.Generator) -> tuple[list[list[int]], np.ndarray[Any, Any]]:
    """Texts in which one of two pairs of words, in their order, says the class."""
    classes = draw.integers(0, 2, num)
    texts = []
    for kind in classes:
        text = draw.integers(3, 30, draw.integers(3, 9)).tolist()
        place = int(draw.integers(0, len(text) - 1))
        text[place : place + 2] = [1, 2] if kind else [2, 1]
        texts.append(text)
    return texts, classes


def test_textcnn_learns_the_order_of_two_words(cluster: Cluster) -> None:
    model = TextCNN(table("words", 8), length=10, channels=8, hidden=8)
    draw = np.random.default_rng(SEED)

    def batch(num: int) -> Batch:
        texts, classes = words(num, draw)
        return Batch({"text": ragged(*texts), "label": torch.from_numpy(classes).float()})

    train(model, lambda out, b: class_loss(out, b["label"]), [batch(100) for _ in range(80)])
    tested = batch(500)
    with torch.no_grad():
        right = model(tested).argmax(1) == tested["label"]
    assert right.float().mean() > 0.95


def test_tagspace_puts_texts_near_their_tags(cluster: Cluster) -> None:
    model = TagSpace(table("words", 8), table("tags", 8), length=10, window=2, channels=16)
    draw = np.random.default_rng(SEED)

    def batch(num: int) -> Batch:
        texts, classes = words(num, draw)
        columns = {"text": ragged(*texts), "pos_tag": torch.from_numpy(classes)}
        return first_is_right(Batch({**columns, "neg_tag": ragged(*[[1 - c] for c in classes])}))

    train(model, MarginLoss(0.1), [batch(100) for _ in range(80)])
    tested = batch(500)
    with torch.no_grad():
        cosines = model(tested)
    assert (cosines[:, 0] > cosines[:, 1]).float().mean() > 0.95
    assert (cosines[:, 2:] == -1).all()
    expected = [max(0.0, 0.1 - float(c[0]) + float(c[1:].max())) for c in cosines]
    loss = float(MarginLoss(0.1)(cosines, tested))
    assert loss == pytest.approx(np.mean(expected), abs=1e-6)
