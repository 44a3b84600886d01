"""What programs under Fleet's names train and evaluate on: data, weights and days."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import trireme as tr
from tests.unit.test_fleet_programs import BATCH, FEED, Model, minimized
from trireme import fleet
from trireme.fleet import static

pytestmark = pytest.mark.usefixtures("fleet_job")


@pytest.mark.parametrize("k_steps", [0, 4])
def test_a_program_for_test_has_the_dense_weights_of_all_steps(k_steps: int) -> None:
    """A step changes them on the servers; alone, lookups bring newer rows beside the weights of
    the step before.
    """
    model, strategy = Model(), fleet.DistributedStrategy()
    strategy.a_sync_configs = {"k_steps": k_steps}
    loss = fleet.Loss(model, nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.distributed_optimizer(optimizer, strategy).minimize(loss)
    exe, program = static.Executor(), static.default_main_program()
    for _ in range(3):
        exe.run(feed=FEED)
    (tested,) = exe.run(program.clone(for_test=True), feed=FEED, fetch_list=[loss])
    assert tested == program.trainer.evaluate([BATCH])["loss"]


def test_variables_with_shows_and_clicks_are_numbers(tmp_path: Path) -> None:
    model = Model()
    entry = fleet.ShowClickEntry("show", "click")
    model.emb = fleet.sparse_embedding("a", [0, 2], param_attr="counted", entry=entry, pool="sum")
    minimized(model)
    (tmp_path / "part").write_text("1 3 1 2 1 0 1 5\n")
    dataset = fleet.QueueDataset()
    names = ("show", "click", "label", "a")
    dataset.init(use_var=[static.data(name, [None, 1], "int64") for name in names])
    dataset.set_filelist([str(tmp_path / "part")])
    static.Executor().train_from_dataset(None, dataset)
    fleet.save_one_table(0, str(tmp_path / "rows"))
    (rows,) = (tmp_path / "rows" / "counted").glob("*.parquet")
    row = pq.read_table(rows).to_pylist()[0]
    assert (row["key"], row["show"], row["click"]) == (5, 3, 2)


def test_the_day_of_a_dataset_ages_rows_after_its_training(tmp_path: Path) -> None:
    model = Model()
    policy = tr.policy.SparseAccessor(
        show_click=tr.policy.ShowClick(None, "label"), delete_after_unseen_days=2
    )
    emb = fleet.sparse_embedding("a", [0, 2], param_attr="aging", policy=policy, pool="sum")
    model.emb = emb
    minimized(model)
    program, exe = static.default_main_program(), static.Executor()
    for key, day in (1, "20190720"), (2, "20190725"):
        (tmp_path / day).write_text(f"1 {key} 1 1\n")
        dataset = fleet.InMemoryDataset()
        dataset.init(use_var=["a", "label"])
        dataset.set_filelist([str(tmp_path / day)])
        dataset.set_date(day)
        dataset.load_into_memory()
        exe.train_from_dataset(program, dataset)
    exe.infer_from_dataset(program.clone(for_test=True), dataset)
    assert fleet.shrink() == {"aging": {"expired": 1, "evicted": 0}}
    assert fleet.save_one_table(0, str(tmp_path / "rows")) == 1
