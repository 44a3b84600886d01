"""A live predictor follows a streaming run by its deltas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trireme as tr
from examples.planted.days import write_days
from trireme.errors import BadRequest
from trireme.inference import Predictor
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.metrics import AUC
from trireme.policy import ShowClick, SparseAccessor

FEATURES = ["2", "3", "4", "5"]
SCHEMA = tr.data.multislot([tr.data.Show(), tr.data.Label("click"), *map(tr.data.Sparse, FEATURES)])
DAYS = ("20190720", "20190721", "20190722")
PASSES = 4
POLICY = SparseAccessor(
    show_click=ShowClick("show", "click"),
    base_threshold=0.0,
    delta_threshold=0.0,
    delete_threshold=0.25,
    delete_after_unseen_days=1,
    embedx_threshold=0.0,
)


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    for _ in write_days(
        folder, start=DAYS[0], days=len(DAYS) + 1, minutes=360, num_examples=1500, seed=5
    ):
        pass
    return folder


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with embedded() as made:
        yield made


def dataset(files: str) -> Any:
    return tr.data.QueueDataset(files, schema=SCHEMA, batch_size=128)


def passes(days: Path) -> Iterator[tr.Pass]:
    for day in DAYS:
        for number in range(1, PASSES + 1):
            files = f"{days}/{day}/{(number - 1) * 6:02d}00/part-*"
            yield tr.Pass(
                day=day,
                number=number,
                open=lambda files=files: dataset(files),  # type: ignore[misc]
                ends_day=number == PASSES,
            )


def make_trainer(cluster: Cluster) -> tr.Trainer:
    torch.manual_seed(1)
    rule = tr.optim.Adagrad(lr=0.05)
    rows = tr.Table("clicks", dim=8, optimizer=rule, policy=POLICY, absent="zeros")
    model = tr.models.SlotDnn(rows, features=FEATURES, layers=[32])
    return tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), 5e-3),
        loss=nn.functional.binary_cross_entropy_with_logits,
        label="click",
        metrics=[AUC()],
        progress=False,
        cluster=cluster,
    )


def auc_of(predictor: Predictor, data: Any) -> float:
    metric = AUC()
    for batch in data:
        metric.update(predictor.predict(batch).outputs["output"], batch["click"])
    return metric.compute()


def test_deltas_keep_a_predictor_up_to_date_with_the_trainer(
    days: Path, cluster: Cluster, tmp_path: Path
) -> None:
    trainer = make_trainer(cluster)
    publishing = tr.Publishing(
        path=str(tmp_path / "models"), save_delta_frequency=1, save_first_base=True
    )
    predictor: Predictor | None = None
    before, differences, num_rows = [], [], []
    for report in tr.train_passes(trainer, passes(days), publishing=publishing):
        before.append(report.evaluated["auc"])
        for path in report.written:
            if Path(path).name == "base":  # of every day: deltas follow it
                predictor = Predictor(path)
            elif Path(path).name.startswith("delta"):
                assert predictor is not None
                predictor.apply(path)
        assert predictor is not None
        held_out = dataset(f"{days}/20190723/0000/part-*")
        trained = trainer.evaluate(held_out)["auc"]
        differences.append(abs(auc_of(predictor, held_out) - trained))
        num_rows.append(
            sum(table["rows"] for table in cluster.client.stats()[0]["tables"].values())
        )
    print("progressive AUC", before, "differences", differences, "rows", num_rows)
    assert sum(before[-4:]) / 4 > sum(before[:4]) / 4 + 0.03
    assert max(differences) <= 0.002
    assert num_rows[-1] < 0.85 * num_keys(days)


def test_passes_come_in_their_order(cluster: Cluster) -> None:
    backwards = [tr.Pass(day=day, number=1, open=lambda: None) for day in reversed(DAYS)]
    run = tr.train_passes(make_trainer(cluster), backwards)
    next(run)
    with pytest.raises(BadRequest, match=r"pass 20190721/1 behind 20190722/1"):
        next(run)


def test_impossible_preloading_is_logged_once(
    days: Path, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    first = list(passes(days))[:3]
    for _ in tr.train_passes(make_trainer(cluster), first, prefetch=True, evaluate=False):
        pass
    warnings = [text for text in caplog.messages if "prefetch: no effect" in text]
    assert len(warnings) == 1
    assert warnings[0].endswith("found QueueDataset")


def num_keys(days: Path) -> int:
    """Distinct keys of all days that were trained on."""
    keys = set()
    for day in DAYS:
        for batch in dataset(f"{days}/{day}/*/part-*"):
            for feature in FEATURES:
                keys.update(batch[feature].values.tolist())
    return len(keys - {0})
