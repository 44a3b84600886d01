"""Fleet's names for layers, metrics and the dense optimizer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.jobs import Job
from tests.unit.test_metrics import drawn, exact_auc
from trireme import fleet, initializer, nn, optim
from trireme.data import Bags, Batch
from trireme.errors import BadRequest, SchemaMismatch
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.nn.distinct_keys import feature_numbers
from trireme.policy import (
    CountFilter,
    CtrCommonAccessor,
    Policy,
    Probability,
    ShowClick,
    SparseAccessor,
)


@pytest.fixture
def home() -> Iterator[Cluster]:
    with embedded(threads=2) as cluster:
        set_default(cluster)
        fleet.init()
        yield cluster


# ---- sparse_embedding ----


def make(*args: Any, **options: Any) -> Any:
    return fleet.sparse_embedding(*args, **{"size": [0, 4], "param_attr": "embedding", **options})


def test_layers_of_one_parameter_share_a_table_until_the_next_job(home: Cluster) -> None:
    one, two = make("a"), make(["b", "c"], param_attr=fleet.ParamAttr("embedding"), pool="sum")
    assert (type(one), type(two)) == (nn.Embedding, nn.EmbeddingBag)
    assert one.table is two.table
    declared = [fleet.static.data(name, [None, 1], "int64", lod_level=1) for name in "bc"]
    assert make(declared[0]).features == ("b",)
    assert make(declared, pool="sum").features == two.features
    assert one.table.optimizer == optim.FleetAdagrad()
    assert one.table.schema.absent == "zeros"
    assert one.table.schema.initializer == initializer.TailUniform().spec()
    for other in ({"size": [7, 5]}, {"optimizer": optim.SGD(lr=1.0)}):
        with pytest.raises(SchemaMismatch, match=r"table 'embedding' as declared .* found \("):
            make("a", **other)
    with pytest.raises(SchemaMismatch):
        make("a", param_attr=fleet.ParamAttr("embedding", initializer.Constant(1.0)))
    fleet.init()
    assert make("a", size=[7, 5], optimizer=optim.SGD(lr=1.0)).table.schema.absent == "initial"
    for pool, mode in (("average", "mean"), ("sqrt", "sqrt"), ("sum", "sum")):
        assert make("a", param_attr="other", pool=pool).mode == mode


def test_a_model_without_dense_parameters_has_none_to_cut(home: Cluster) -> None:
    rows_of = make("a", optimizer=optim.SGD(lr=0.5))
    config = fleet.DistributeTranspilerConfig()
    optimizer = fleet.distributed_optimizer(None, config, model=rows_of)
    assert optimizer.strategy == config.strategy()


def test_padding_gives_zeros_and_is_not_pushed(home: Cluster) -> None:
    ids = torch.tensor([0, 5, 0, 0, 6, 5])
    batch = Batch({}, Bags(("a",), ids, torch.tensor([0, 3, 4, 6])))
    begin = fleet.ParamAttr("embedding", initializer.Constant(1.0))
    options = {"param_attr": begin, "optimizer": optim.SGD(lr=0.5), "padding_idx": 0}
    rows_of = make("a", **options)
    optimizer = fleet.distributed_optimizer(None, model=rows_of)
    rows = rows_of(batch)
    assert rows.detach().eq((ids != 0).float()[:, None]).all()
    nn.sequence_pool(rows, batch["a"].offsets, "sqrt").sum().backward()
    optimizer.step()
    assert home.client.stats()[0]["tables"]["embedding"]["rows"] == 2
    five, six = 1 - 0.5 * (3**-0.5 + 2**-0.5), 1 - 0.5 * 2**-0.5
    expected = torch.tensor([0, five, 0, 0, six, five])[:, None].expand(6, 4)
    torch.testing.assert_close(rows_of.eval()(batch), expected)
    # The pool of one operation does not count padding.
    fused = make("a", pool="average", **options).eval()(batch)[:, 0]
    torch.testing.assert_close(fused[:, 0], torch.tensor([five, 0, (five + six) / 2]))


def test_entries_decide_which_keys_get_a_row(home: Cluster) -> None:
    ids = torch.arange(1, 1001).repeat_interleave(2)
    batch = Batch({}, Bags(("a",), ids, torch.tensor([0, len(ids)])))
    entries = {
        "all": fleet.CountFilterEntry(0),
        "first": fleet.CountFilterEntry(1),
        "third": fleet.CountFilterEntry(3),
        "drawn": fleet.ProbabilityEntry(0.25),
    }
    num_rows: dict[str, list[int]] = {name: [] for name in entries}
    for name, entry in entries.items():
        rows_of = make("a", param_attr=name, entry=entry, pool="sum")
        optimizer = fleet.distributed_optimizer(None, model=rows_of)
        for _ in range(2):
            rows_of(batch).sum().backward()
            optimizer.step()
            num_rows[name].append(home.client.stats()[0]["tables"][name]["rows"])
    assert num_rows["all"] == num_rows["first"] == [1000, 1000]
    assert num_rows["third"] == [0, 1000]
    drawn = num_rows["drawn"]
    assert 200 < drawn[0] < 300
    assert 380 < drawn[1] < 490
    with pytest.raises(SchemaMismatch, match="CountFilter"):
        make("a", param_attr="third", entry=fleet.CountFilterEntry(4))
    with pytest.raises(BadRequest, match=r"CountFilter: expected n from 1 to .*, found -1"):
        make("a", param_attr="other", entry=fleet.CountFilterEntry(-1))


SHOWN = fleet.ShowClickEntry("show", "click")


def test_entries_say_what_rows_count_and_which_keys_get_one(home: Cluster) -> None:
    table = make("a", entry=SHOWN).table
    python = {"base_threshold": 0.0, "delta_threshold": 0.0, "decay_rate": 1.0}
    expected = SparseAccessor(
        show_click=ShowClick("show", "click"),
        delete_threshold=0.0,
        embedx_threshold=None,
        **python,
    )
    assert (table.policy, table.schema.admission, table.width) == (expected, None, 4)
    own = make("a", entry=SHOWN, policy=CtrCommonAccessor(), param_attr="own", size=[0, 11]).table
    assert own.policy == CtrCommonAccessor(show_click=ShowClick("show", "click"))
    assert (own.dim, own.width) == (9, 11)
    counted = make("a", entry=fleet.CountFilterEntry(5), param_attr="counted").table
    assert counted.schema.admission == CountFilter(5).fixed()
    assert (
        make("a", entry=fleet.CountFilterEntry(0), param_attr="all").table.schema.admission is None
    )
    drawn = make("a", entry=fleet.ProbabilityEntry(0.5), param_attr="drawn").table
    assert drawn.schema.admission == Probability(0.5).fixed()
    with pytest.raises(SchemaMismatch, match="as declared before"):
        make("a")


def test_a_slot_is_what_rows_remember(home: Cluster) -> None:
    table = make("a", entry=SHOWN, slot=77).table
    make("9", entry=SHOWN)
    names = ("b", "9", "a")
    assert feature_numbers(table, names).tolist() == [0, 9, 77]
    with pytest.raises(BadRequest, match="expected slot 77 of 'a' as before, found 78"):
        make("a", entry=SHOWN, slot=78)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"param_attr": None}, "expected param_attr, the name of the table"),
        ({"size": [4]}, r"size=\[ignored, D\], found \[4\]"),
        ({"padding_idx": -1}, "padding_idx >= 0, found -1"),
        ({"is_test": True}, r"is_test=False; call model.eval\(\)"),
        ({"entry": "none"}, r"expected entry of trireme\.fleet, found str"),
        ({"entry": SHOWN, "policy": Policy()}, "expected a ScorePolicy .* beside ShowClickEntry"),
        ({"table_class": "MemorySparseGeoTable"}, "mode geo is the strategy's"),
        ({"table_class": "Mine"}, "'Mine': known are MemorySparseTable"),
        ({"dtype": "float64"}, "dtype 'float32', found 'float64'"),
        ({"slot": 3}, "slot of one feature of a table whose rows count shows, found 3"),
        ({"slot": -1, "entry": SHOWN}, r"expected 0 <= slot < 2\*\*32, found -1"),
        ({"pool": "max"}, r"one of \('sum', 'average', 'sqrt'\), found 'max'"),
    ],
)
def test_settings_without_a_meaning_are_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest, match=rf"fleet\.sparse_embedding: .*{message}"):
        make("a", **options)


def test_rows_of_an_ssd_sparse_table_may_lie_on_ssd() -> None:
    table = make("a", param_attr="cold", table_class="SSDSparseTable").table
    assert table.schema.tier is not None
    assert make("b", param_attr="other").table.schema.tier is None


# ---- adam_d2sum ----


def test_adam_d2sum_follows_its_formula() -> None:
    rng = np.random.default_rng(1)
    w, n, s, v = rng.normal(size=50), 0.0, np.zeros(50), np.zeros(50)
    weights = torch.nn.Parameter(torch.from_numpy(w.copy()))
    optimizer = fleet.AdamD2Sum([weights], lr=0.01)
    for _ in range(30):
        g = rng.normal(size=50)
        n, s, v = n * 0.9999 + 1, s * 0.9999 + g * g, (v + g) * 0.99 - g
        w = w + 0.01 * v * np.sqrt((n + 1e-8 * n) / (s + 1e-8 * n))
        weights.grad = torch.from_numpy(g)
        optimizer.step()
    np.testing.assert_allclose(weights.detach(), w, rtol=1e-6, atol=1e-9)
    for options in ({"lr": -1.0}, {"eps": 0.0}, {"moment_decay": 1.0}, {"sum_decay": -0.1}):
        with pytest.raises(BadRequest, match=f"AdamD2Sum: expected {next(iter(options))} as a"):
            fleet.AdamD2Sum([weights], **options)


def test_a_strategy_with_adam_d2sum_trains_the_dense_part_by_it(home: Cluster) -> None:
    def steps(model: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().sum().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    def linear() -> torch.nn.Module:
        torch.manual_seed(4)
        return torch.nn.Linear(3, 2)

    strategy = fleet.DistributedStrategy()
    assert strategy.adam_d2sum is False
    strategy.adam_d2sum = True
    model = linear()
    groups = [{"params": [model.weight], "lr": 0.02}, {"params": [model.bias]}]
    adam = torch.optim.Adam(groups, lr=0.01)
    actual = steps(model, fleet.distributed_optimizer(adam, strategy, model=model))
    alone = linear()
    groups = [{"params": [alone.weight], "lr": 0.02}, {"params": [alone.bias]}]
    expected = steps(alone, fleet.AdamD2Sum(groups, lr=0.01))
    torch.testing.assert_close(actual, expected)
    sgd = torch.optim.SGD(model.parameters())
    with pytest.raises(BadRequest, match=r"expected torch\.optim\.Adam .* found SGD"):
        fleet.distributed_optimizer(sgd, strategy, model=model)
    adam = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    with pytest.raises(BadRequest, match=r"no other option of Adam, found {'weight_decay': 0.1}"):
        fleet.distributed_optimizer(adam, strategy, model=model)
    with pytest.raises(BadRequest, match="adam_d2sum as a bool, found 1"):
        strategy.adam_d2sum = 1  # type: ignore[assignment]


def test_a_strategy_names_the_folder_of_dumps() -> None:
    strategy = fleet.DistributedStrategy()
    with pytest.raises(BadRequest, match=r"found .*'dump_fields'.*; .* dump=trireme\.Dump\("):
        strategy.trainer_desc_configs = {"dump_fields": ["auc"]}


# ---- metrics ----


def on_three_workers(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[int], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Workers are threads here, so each has a default cluster of its own."""
    of_thread = threading.local()

    def place(cluster: Cluster) -> dict[str, Any]:
        of_thread.cluster = cluster
        return work(cluster.worker)

    with Job(1) as job:
        monkeypatch.setattr("trireme.fleet.util.default", lambda: of_thread.cluster)
        return job.run(3, place)


def test_metrics_are_of_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = drawn(1, 3000)
    buckets = np.digitize(logits, np.linspace(-3, 3, 99))
    m = fleet.metrics

    def work(worker: int) -> dict[str, Any]:
        mine = slice(worker, None, 3)
        counts = [
            np.bincount(buckets[mine][labels[mine] == label], minlength=100)[None]
            for label in (1, 0)
        ]
        return {
            "sum": m.sum(np.array([worker, 1.0])),
            "max": m.max(torch.tensor([worker, -worker])),
            "min": m.min(worker, None, fleet.util),
            "auc": m.auc(*counts),
            "mae": m.mae(np.array([6.0 * worker]), np.array([worker])),
            "mse": m.mse(4.0, 1.0),
            "rmse": m.rmse(4.0, 1),
            "acc": m.acc(torch.tensor([worker]), torch.tensor([4])),
            "none": m.acc(0, 0),
            "half": m.auc(np.ones(4), np.zeros(4)),
        }

    expected = {
        "sum": [3, 3],
        "max": [2, 0],
        "min": 0,
        "auc": exact_auc(buckets, labels),
        "mae": 6,
        "mse": 4,
        "rmse": 2,
        "acc": 0.25,
        "none": np.nan,
        "half": 0.5,
    }
    for actual in on_three_workers(monkeypatch, work):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(actual[name], value, rtol=1e-12)


def test_metrics_refuse_values_that_are_no_numbers(home: Cluster) -> None:
    with pytest.raises(BadRequest, match=r"metrics\.sum: expected numbers .*, found str"):
        fleet.metrics.sum("auc_0.tmp_0")
    with pytest.raises(BadRequest, match=r"metrics\.mae: expected scope=None"):
        fleet.metrics.mae(1.0, 1.0, scope=object())  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=r"one number each, found shapes \(2,\) and \(\)"):
        fleet.metrics.acc(np.ones(2), 3)
    with pytest.raises(BadRequest, match="of one size, found 3 and 2"):
        fleet.metrics.auc(np.ones(3), np.ones(2))
    assert fleet.ctr_metric_bundle().name == "ctr_metric_bundle"
