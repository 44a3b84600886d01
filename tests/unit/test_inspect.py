"""`trireme inspect`: statistics and differences against NumPy, and its output."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.long import sampled
from trireme import _core, drawing, optim, policy
from trireme.commands import cli
from trireme.data import Bags, Batch
from trireme.inference import export_manifest as manifest
from trireme.inference.export import export_model
from trireme.inspect.difference import compare
from trireme.inspect.open_saved import open_saved
from trireme.inspect.saved_export import ExportTable
from trireme.inspect.value_statistics import QUANTILES, ValueStatistics
from trireme.inspect.wanted import Wanted, wanted_row
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.nn import EmbeddingBag
from trireme.protocol.routing import buckets_of
from trireme.rows.frozen_rows import encode
from trireme.table import Table
from trireme.train import Trainer

DAY_S = 86_400


def test_values_agree_with_numpy_in_any_parts() -> None:
    rng = np.random.default_rng(3)
    scales = 10.0 ** rng.integers(-9, 9, 50_000)
    numbers = (rng.normal(size=50_000) * scales).astype(np.float32)
    numbers[:100] = 0.0
    others = np.array([np.nan, np.inf, -np.inf, np.nan], np.float32)
    for part_size in (1 << 20, 999):
        values = ValueStatistics()
        everything = rng.permutation(np.concatenate([numbers, others]))
        for low in range(0, len(everything), part_size):
            values.add(everything[low : low + part_size])
        assert (values.count, values.num_nan, values.num_infinite) == (50_000, 2, 2)
        assert values.lowest == numbers.min()
        assert values.highest == numbers.max()
        double = numbers.astype(np.float64)
        np.testing.assert_allclose([values.mean, values.std], [double.mean(), double.std()], 1e-9)
        exact = np.quantile(double, QUANTILES, method="lower")
        np.testing.assert_allclose(values.quantiles(), exact, rtol=1 / 128, atol=1e-40)
    empty = ValueStatistics()
    empty.add(others)
    assert not empty.count
    assert np.isnan([empty.mean, empty.std, *empty.quantiles()]).all()


def test_drawing() -> None:
    assert drawing.bars(["a", "bb"], [1, 80]) == [
        " a   1   1.2 %  #",
        "bb  80  98.8 %  " + "#" * 40,
    ]
    assert drawing.bars(["a"], [0]) == ["a  0  0.0 %"]
    assert drawing.columns([["x", "rows"], ["longer", "1"]]) == ["x       rows", "longer     1"]
    sizes = [drawing.size(n) for n in (0, 1023, 1536, 5 * 2**30, 2**60)]
    assert sizes == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB", "1024.0 PiB"]


@pytest.fixture
def home() -> Iterator[Cluster]:
    with embedded(threads=2) as cluster:
        set_default(cluster)
        yield cluster


class Model(torch.nn.Module):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        scored = policy.ScorePolicy(
            show_click=policy.ShowClick("show", "click"),
            decay_rate=0.5,
            delete_threshold=0.4,
            pulls_statistics=True,
        )
        adagrad = optim.Adagrad(lr=0.1)
        self.scored = EmbeddingBag(
            Table("scored", dim=dim, optimizer=adagrad, policy=scored), features=["a"]
        )
        self.plain = EmbeddingBag(
            Table("plain", dim=2, optimizer=optim.SGD(lr=0.1)), features=["b"]
        )
        self.linear = torch.nn.Linear(2 + dim + 2, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        rows = [self.scored(batch)[:, 0], self.plain(batch)[:, 0]]
        return self.linear(torch.cat(rows, 1))[:, 0]


def batch_of(ids: list[int]) -> Batch:
    n = len(ids)
    offsets = torch.arange(n + 1)
    dense = {"label": torch.ones(n), "show": torch.full((n,), 2.0), "click": torch.ones(n)}
    both = torch.tensor(ids + [-1] * n)
    return Batch(dense, Bags(("a", "b"), both, torch.cat([offsets, offsets[1:] + n])))


def make_trainer() -> Trainer:
    model = Model()
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    return Trainer(model, adam, loss=loss)


def inspected(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    capsys.readouterr()
    assert cli.main(["inspect", *map(str, argv)]) == 0
    return capsys.readouterr().out


def test_a_checkpoint_is_described(
    home: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer()
    trainer.set_time(10 * DAY_S)
    trainer.fit([batch_of([1, 1, 2])])
    trainer.set_time(11 * DAY_S)
    trainer.fit([batch_of([2, 3])])
    trainer.save(tmp_path / "one")
    text = inspected(capsys, tmp_path / "one")
    assert f"checkpoint {tmp_path / 'one'}: full, version " in text
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert lines["scored"][1:3] == ["3", "0"]
    assert lines["plain"][1:3] == ["1", "0"]
    assert "dense: 9 weights of 2 parameters in 2 blocks, optimizer Adam" in text
    assert "last pushes at data time 1970-01-11 00:00:00 to 1970-01-12 00:00:00" in text
    # Shows 4 fade to 2, 2 to 1 and then 2 more, 2: scores (show - click) * 0.1 + click.
    scores = [1 * 0.1 + 1, 1.5 * 0.1 + 1.5, 1 * 0.1 + 1]
    number = drawing.number(float(np.mean(np.float32(scores))))
    assert lines["score"][1:3] == ["3", number]
    assert "1 to 2  3  100.0 %  " + "#" * 40 in text
    assert "0 rows are below delete_threshold 0.4" in text
    weights = trainer.model.scored.eval()(batch_of([1, 2, 3]))[:, 0, 2:].detach().numpy()
    assert drawing.number(float(weights.max())) in text
    brief = inspected(capsys, tmp_path / "one", "--brief")
    assert text.startswith(brief)
    assert "delete_threshold" in text
    assert "delete_threshold" not in brief


@pytest.mark.parametrize(
    ("rule", "num_state"),  # of one row with all four weights and one with a head
    [(optim.FleetAdam(scale="loss"), 10), (optim.FleetSharedAdam(scale="loss"), 8)],
    ids=["adam", "shared adam"],
)
def test_counts_and_missing_tails_are_no_numbers_of_state(
    home: Cluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rule: optim.FleetRule,
    num_state: int,
) -> None:
    headed = policy.SparseAccessor(embedx_threshold=2.0, nonclk_coeff=1.0)
    table = Table("t", dim=4, optimizer=rule, policy=headed, absent="zeros")
    trainer = Trainer(EmbeddingBag(table, features=["a"]), None, loss=lambda rows, _: rows.sum())
    for ids in ([1, 2], [1], [1]):
        bags = Bags(("a",), torch.tensor(ids), torch.arange(len(ids) + 1))
        trainer.fit([Batch({"label": torch.ones(len(ids))}, bags)])
    trainer.save(tmp_path / "one")
    lines = {
        line.split()[0]: line.split()
        for line in inspected(capsys, tmp_path / "one").splitlines()
        if line
    }
    assert lines["weights"][1] == "5"  # four of the one row, the head of the other
    assert lines["state"][1] == str(num_state)
    text = inspected(capsys, tmp_path / "one", "--key", 1)
    assert "updates: 3, " in text
    assert "e-4" not in text  # no integer taken for a float


def test_rows_of_keys_are_shown(
    home: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer()
    batch = batch_of([5])
    batch.hashed = {"a": False}
    trainer.fit([batch])
    trainer.save(tmp_path / "one")
    text = inspected(capsys, tmp_path / "one", "--key", "q=5", "--table", "scored")
    assert "table scored, q=5, key 5 (no feature that training noted, which are a)\n" in text
    text = inspected(capsys, tmp_path / "one", "--key", "5", "--key", "-1", "--key", "0x7")
    assert f"table scored, key {2**64 - 1}: no row" in text
    assert "table scored, key 7: no row" in text
    assert "table plain, key 5: no row" in text
    weights = trainer.model.scored.eval()(batch_of([5]))[0, 0, 2:].tolist()
    shown = " ".join(drawing.number(np.float32(w)) for w in weights)
    assert f"weights (4): {shown}\n" in text
    assert "show 2, click 1, " in text
    assert "table scored, key 5\n" in text
    assert "class 0" not in text  # of a table with one


def test_differences_are_counted(
    home: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer()
    trainer.fit([batch_of(list(range(100)))])
    trainer.save(tmp_path / "one")
    before = open_saved(str(tmp_path / "one"))
    same = compare(before, open_saved(str(tmp_path / "one")), lambda _: None)
    assert (same.tables["scored"].same, same.tables["scored"].changed) == (100, 0)
    assert not any(dense.changed for dense in same.dense.values())
    trainer.fit([batch_of([*range(90, 120), 7])])
    trainer.save(tmp_path / "two")
    actual = compare(before, open_saved(str(tmp_path / "two")), lambda _: None)
    counts = actual.tables["scored"]
    assert (counts.added, counts.removed, counts.same) == (20, 0, 89)
    assert counts.changed + counts.touched == 11
    back = compare(open_saved(str(tmp_path / "two")), before, lambda _: None).tables["scored"]
    assert (back.added, back.removed, back.largest) == (0, 20, counts.largest)
    assert counts.largest > 0
    assert counts.largest_key in {7, *range(90, 100)}
    assert actual.dense["linear.weight"].changed == 8
    assert actual.dense["linear.weight"].others == 0
    text = inspected(capsys, tmp_path / "two", "--diff", tmp_path / "one", "--table", "scored")
    line = next(line.split() for line in text.splitlines() if line.startswith("scored"))
    assert line[1:3] == ["20", "0"]
    assert line[-1] == str(counts.largest_key)
    assert "plain" not in text


@pytest.mark.timeout(300)  # the first to load what traces models
def test_an_export_is_described(
    home: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer()
    batch = batch_of(list(range(1, 40)))
    trainer.fit([batch])
    weights = trainer.model.scored.eval()(batch_of(list(range(1, 40))))[:, 0, 2:].detach().numpy()
    for dtype in ("float32", "int8"):
        path = tmp_path / dtype
        export_model(trainer, path, batch=batch, dtype=dtype)
        actual = {}
        for rows in open_saved(str(path)).tables["scored"].rows():
            actual.update(zip(rows.keys.tolist(), rows.weights, strict=True))
        assert sorted(actual) == list(range(1, 40))
        for key, row in actual.items():
            np.testing.assert_allclose(
                row, weights[key - 1], atol=0.01 if dtype == "int8" else 1e-3
            )
        text = inspected(capsys, path)
        assert f"inference export {path}: base, version" in text
        assert dtype in text
    assert "table scored, a=5, key 5\n" in inspected(capsys, path, "--key", "a=5")
    assert cli.main(["inspect", str(path), "--key", "q=5"]) == 2
    assert "--key with one of the features a, b, found 'q'" in capsys.readouterr().err
    text = inspected(capsys, tmp_path / "int8", "--diff", tmp_path / "float32")
    assert next(line for line in text.splitlines() if line.startswith("scored")).split()[1] == "0"


@sampled(keep=3)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("is_delta", [False, True])
def test_rows_of_an_export_are_read_whatever_stands_before_them(
    tmp_path: Path, dtype: str, is_delta: bool
) -> None:
    n, dim = 500, 3
    rng = np.random.default_rng(2)
    keys = np.arange(n, dtype=np.uint64)
    shows = rng.integers(0, 9, (n, 2)).astype(np.float32)
    weights, stored = encode(rng.normal(size=(n, dim)).astype(np.float32), dtype, "t")
    is_removed = (keys % 3 == 0) if is_delta else np.zeros(n, bool)
    flags = is_removed.astype(np.uint64)[:, None].view(np.uint8)
    parts = [flags] if is_delta else []
    values = np.concatenate([*parts, shows.view(np.uint8), weights], axis=1)
    writer = _core.FrozenWriter(encoding=dtype, dim=dim, statistics=2, has_flags=is_delta)
    padded = np.zeros((n, writer.value_bytes), np.uint8)
    padded[:, : values.shape[1]] = values
    buckets = buckets_of(keys)
    pieces = [
        writer.add(keys[buckets == b], padded[buckets == b]) for b in range(_core.NUM_BUCKETS)
    ]
    data = b"".join(piece.tobytes() for piece in [*pieces, writer.finish()])
    (tmp_path / "t.rows").write_bytes(data)
    file = manifest.ExportFile("t.rows", len(data), "")
    num_removed = int(is_removed.sum())
    uniform = ("uniform", 0.0, 1.0)
    part = manifest.ExportedTable(
        *("t", dim, 2, dtype, uniform, 0, 0, "float32", False),
        *(n - num_removed, num_removed, 0.0, 0.0, (file,)),
    )
    (rows,) = ExportTable(tmp_path, "t", part, is_delta=is_delta).rows()
    order = np.argsort(rows.keys)
    assert (rows.keys[order] == keys[~is_removed]).all()
    assert (rows.statistics["show"][order] == shows[~is_removed, 0]).all()
    assert (rows.statistics["click"][order] == shows[~is_removed, 1]).all()
    np.testing.assert_array_equal(rows.weights[order], stored[~is_removed])


def test_memory_is_bounded(home: Cluster, tmp_path: Path) -> None:
    model = EmbeddingBag(
        Table("wide", dim=128, optimizer=optim.Adagrad(lr=0.1)), features=["a"], mode="sum"
    )
    loss = lambda outputs, labels: outputs.sum()  # noqa: E731
    trainer = Trainer(model, None, loss=loss)
    ids = torch.arange(90_000)
    offsets = torch.tensor([0, len(ids)])
    trainer.fit([Batch({"label": torch.ones(1)}, Bags(("a",), ids, offsets))])
    trainer.save(tmp_path / "one")
    source = open_saved(str(tmp_path / "one"))
    assert source.tables["wide"].num_bytes > 85 << 20
    tracemalloc.start()
    compare(source, open_saved(str(tmp_path / "one")), lambda _: None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60 << 20, peak


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0x10", 16),
        ("-1", 2**64 - 1),
        ("movie=50", ("movie", 50)),
        ("movie=-50", ("movie", -50)),
        ("movie='50'", ("movie", "50")),
        ("movie=007", ("movie", "007")),  # as in columns of strings: 7 is another value
        ("movie=1_000", ("movie", "1_000")),
        ("movie= 50", ("movie", " 50")),
        ("movie=a=b", ("movie", "a=b")),
    ],
)
def test_what_names_a_row(text: str, wanted: Wanted) -> None:
    assert wanted_row(text) == wanted


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{}/none"], "inspect: error: expected {}/none/manifest.json, found none"),
        (["{}"], "error: expected {}/manifest.json, found none; folders there: one"),
        (["{}/one", "--table", "x"], "expected --table to be one of plain, scored of {}/one"),
        (["{}/one", "--key", "1", "--brief"], "one of --key, --diff and --brief"),
        (
            ["{}/one", "--key", "x"],
            "argument --key: expected a 64-bit number or FEATURE=VALUE, found 'x'",
        ),
        (["{}/one", "--key", "=3"], "expected a 64-bit number or FEATURE=VALUE, found '=3'"),
    ],
)
def test_errors_say_what_was_expected(
    home: Cluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    message: str,
) -> None:
    trainer = make_trainer()
    trainer.fit([batch_of([5])])
    trainer.save(tmp_path / "one")
    try:
        code = cli.main(["inspect", *(word.format(tmp_path) for word in argv)])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2
    assert message.format(tmp_path) in capsys.readouterr().err
