"""A notebook whose cells are run again: each run begins anew, and the same seed gives the same."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trireme as tr
from tests.repo import tree
from trireme.bounded_queue import BoundedQueue
from trireme.errors import BadRequest, Stopped, Superseded
from trireme.job.default import default, is_default_set

CELLS = (Path(__file__).parent / "notebook.py").read_text().split("# %%\n")[1:]
BEGIN, TRAIN, SWEEP = CELLS


class Notebook:
    """Runs cells in one namespace, as a kernel does."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}

    def run(self, cell: str) -> None:
        exec(compile(cell, "<cell>", "exec"), self.names)

    def __getitem__(self, name: str) -> Any:
        return self.names[name]


@pytest.fixture
def notebook(caplog: pytest.LogCaptureFixture) -> Iterator[Notebook]:
    assert not is_default_set()
    caplog.set_level("INFO", "trireme")
    made = Notebook()
    made.run(BEGIN)
    try:
        yield made
    finally:
        if is_default_set():
            default().abandon()


def test_a_cell_that_is_run_again_begins_anew(
    notebook: Notebook, caplog: pytest.LogCaptureFixture
) -> None:
    notebook.run(TRAIN)
    first = notebook["untrained"], notebook["trained"]
    assert first[1] > first[0] + 0.1
    assert "begins anew" not in caplog.text
    notebook.run(BEGIN)  # with tr.init()
    notebook.run(TRAIN)
    assert (notebook["untrained"], notebook["trained"]) == first
    assert "drops the rows of table 'ids' (60 steps), of another model" in caplog.text
    assert "`Trainer(fresh=False)` keeps them" in caplog.text


@pytest.mark.parametrize(
    "strategy",
    ['"sync"', '"async"', '"bounded", staleness=2', '"geo", k=4', '"hybrid"', '"collective"'],
)
def test_a_sweep_gives_the_same_bits_for_the_same_seed(notebook: Notebook, strategy: str) -> None:
    notebook.run(BEGIN.replace('"sync"', strategy))
    notebook.run(TRAIN)
    notebook.run(SWEEP)
    assert strategy.startswith(f'"{notebook["trainer"].optimizer.strategy.mode}"')
    once, again = notebook["results"][1]
    assert once == again
    assert notebook["results"][2] != [once]


@pytest.mark.parametrize(
    "change",
    ["dim=4", "dim=8", "torch.optim.SGD", "tr.Strategy('async')", "nn.Linear(2 * dim, 5)"],
)
def test_a_changed_model_may_follow(notebook: Notebook, change: str) -> None:
    notebook.run(TRAIN)
    begin = BEGIN.replace("torch.optim.Adam", change) if "optim" in change else BEGIN
    begin = begin.replace('tr.Strategy("sync")', change) if "Strategy" in change else begin
    if "Linear" in change:
        begin = begin.replace("nn.Linear(2 * dim, 8)", change).replace("(8, 1)", "(5, 1)")
    notebook.run(begin)
    notebook.run(TRAIN.replace("dim=8", change) if "dim=" in change else TRAIN)
    assert notebook["untrained"] < 0.6


def test_a_new_trainer_over_the_same_modules_continues(
    notebook: Notebook, caplog: pytest.LogCaptureFixture
) -> None:
    notebook.run(TRAIN)
    before = notebook["trainer"].evaluate(notebook["data"])
    continued = notebook["make_trainer"](notebook["model"])
    assert continued.optimizer.num_steps == 60
    assert continued.evaluate(notebook["data"])["loss"] == before["loss"]
    assert (
        "continues a model trained for 60 steps; `tr.reset()` or `Trainer(fresh=True)` begins anew"
        in caplog.text
    )
    anew = notebook["make_trainer"](notebook["model"], fresh=True)
    assert anew.optimizer.num_steps == 0
    assert anew.evaluate(notebook["data"])["loss"] != before["loss"]


def test_fresh_false_keeps_the_rows(notebook: Notebook) -> None:
    notebook.run(TRAIN)
    before = notebook["trainer"].evaluate(notebook["data"])
    kept = notebook["make_trainer"](notebook["Model"](dim=8), fresh=False)
    assert kept.evaluate(notebook["data"])["loss"] == before["loss"]


@pytest.mark.parametrize("use", ["forward", "fit", "evaluate", "save"])
def test_the_former_model_says_what_took_its_rows(
    notebook: Notebook, use: str, tmp_path: Path
) -> None:
    notebook.run(TRAIN)
    model, trainer, data = notebook["model"], notebook["trainer"], notebook["data"]
    notebook.run(TRAIN)
    uses = {
        "forward": lambda: model(data[0]),
        "fit": lambda: trainer.fit(data),
        "evaluate": lambda: trainer.evaluate(data),
        "save": lambda: trainer.save(tmp_path / "saved"),
    }
    with pytest.raises(Superseded, match=r"a new Model has begun anew .* other names, or each"):
        uses[use]()


def test_the_former_model_of_another_shape_says_so_too(notebook: Notebook) -> None:
    notebook.run(TRAIN)
    former = notebook["trainer"]
    notebook["make_trainer"](notebook["Model"](dim=4))
    with pytest.raises(Superseded, match="a new Model has begun anew"):
        former.fit(notebook["data"])


def test_a_cell_with_a_wrong_setting_leaves_the_rows(notebook: Notebook) -> None:
    notebook.run(TRAIN)
    figures = notebook["trainer"].evaluate(notebook["data"])
    model, loss = notebook["Model"](dim=8), nn.functional.mse_loss
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"strategy": "sync"}, r"strategy as a Strategy, such as tr.Strategy\('sync'\), found"),
        ({"metrics": "auc"}, r"metrics as a list, such as \['auc'\], found 'auc'"),
        ({"metrics": ["aucc"]}, "found 'aucc'"),
        ({"callbacks": tr.EarlyStopping("loss")}, "callbacks as a list .* found <trireme"),
        ({"callbacks": [tr.EarlyStopping]}, "callbacks as a list .* found the class EarlyStopping"),
    ]
    for options, expected in wrong:
        with pytest.raises(BadRequest, match=expected):
            tr.Trainer(model, torch.optim.Adam(model.parameters()), loss=loss, **options)
    with pytest.raises(BadRequest, match=r"checkpoints as Checkpoints, such as .* found 'ckpt'"):
        notebook["trainer"].fit(notebook["data"], checkpoints="ckpt")
    assert notebook["trainer"].evaluate(notebook["data"])["loss"] == figures["loss"]


def test_two_models_with_other_tables_keep_their_rows(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(TRAIN)
    first, data = notebook["trainer"], notebook["data"]
    figures = first.evaluate(data)
    notebook.run(BEGIN.replace('"ids"', '"others"'))
    notebook.run(TRAIN)
    assert first.evaluate(data)["loss"] == figures["loss"]
    with pytest.raises(Superseded, match="make a new Trainer over it first"):
        first.save(tmp_path / "saved")
    with pytest.raises(BadRequest, match="with a new Trainer"):
        first.fit(data)
    again = notebook["make_trainer"](first.model)
    assert again.evaluate(data)["loss"] == figures["loss"]
    again.save(tmp_path / "saved")


def test_two_models_with_a_cluster_each_train_in_turn(notebook: Notebook) -> None:
    notebook.run(TRAIN)
    first, data = notebook["trainer"], notebook["data"]
    with tr.embedded() as cluster:
        torch.manual_seed(1)
        second = notebook["make_trainer"](notebook["Model"](dim=8), cluster=cluster)
        for trainer in (second, first, second, second):
            trainer.fit(data)
        first.fit(data)
        for trainer in (first, second):
            assert trainer.optimizer.num_steps == {0: 100, 1: 60}[trainer is second]
        assert first.model.eval()(data[0]).tolist() != second.model.eval()(data[0]).tolist()


def test_a_closed_cluster_keeps_no_rows(notebook: Notebook) -> None:
    notebook.run(TRAIN)
    with tr.embedded() as cluster:
        trainer = notebook["make_trainer"](notebook["Model"](dim=8), cluster=cluster)
        trainer.fit(notebook["data"])
        assert cluster.server.tables
    assert not cluster.server.tables
    for call in (trainer.fit, trainer.evaluate, trainer.predict):
        with pytest.raises(Superseded, match="cluster closed; make the model and its Trainer"):
            call(notebook["data"])


def test_reset_empties_the_process(notebook: Notebook) -> None:
    notebook.run(TRAIN)
    first = notebook["untrained"], notebook["trained"]
    model = notebook["model"]
    cluster = tr.reset()
    assert default() is cluster
    assert not cluster.server.tables
    with pytest.raises(Superseded, match="cluster closed"):
        model(notebook["data"][0])
    notebook.run(TRAIN)
    assert (notebook["untrained"], notebook["trained"]) == first


def test_a_second_init_gives_the_same_cluster_or_says_what_to_do(notebook: Notebook) -> None:
    assert tr.init() is default()
    with pytest.raises(BadRequest, match=r"expected \{'memory': None\}, found \{'memory': '1GiB'"):
        tr.init(memory="1GiB")


def test_a_checkpoint_is_loaded_into_a_new_model(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(TRAIN)
    trainer, data = notebook["trainer"], notebook["data"]
    trainer.save(tmp_path / "run" / "1")
    figures = trainer.evaluate(data)
    for load in ("load", "resume"):
        notebook.run(BEGIN)
        new = notebook["make_trainer"](notebook["Model"](dim=8))
        getattr(new, load)(tmp_path / "run" / "1" if load == "load" else tmp_path / "run")
        assert new.evaluate(data)["loss"] == figures["loss"]
        assert new.optimizer.num_steps == 60
        new.fit(data)


def test_a_cell_that_fails_leaves_nothing_behind(notebook: Notebook) -> None:
    notebook.run(TRAIN)
    first = notebook["untrained"], notebook["trained"]
    failing = TRAIN + "loss = model(data[0]).sum()\nloss.backward()\n1 / 0"
    with pytest.raises(ZeroDivisionError):
        notebook.run(failing)
    notebook.run(TRAIN)
    assert (notebook["untrained"], notebook["trained"]) == first


@pytest.mark.parametrize("mode", ["sync", "async", "collective"])
def test_the_cells_after_an_interrupted_one_go_on(notebook: Notebook, mode: str) -> None:
    notebook.run(BEGIN.replace('tr.Strategy("sync")', f'tr.Strategy("{mode}")'))
    notebook.run(TRAIN)
    data = notebook["data"]

    class Interrupt(tr.Callback):
        def step(self, fit: tr.FitState) -> None:
            if fit.step == 65:
                signal.raise_signal(signal.SIGINT)

    trainer = notebook["make_trainer"](notebook["model"], callbacks=[Interrupt()])
    with pytest.raises(Stopped):
        trainer.fit(data, epochs=2)
    before = trainer.optimizer.num_steps
    trainer.evaluate(data)  # asks the servers, which still know of the stop
    trainer.fit(data)
    assert trainer.optimizer.num_steps == before + 20


@pytest.mark.parametrize("method", ["start", "join"])
def test_another_loop_follows_one_that_was_interrupted_at_its_threads(
    notebook: Notebook, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook.run(BEGIN)
    notebook.run(TRAIN)
    trainer, data = notebook["make_trainer"](notebook["model"]), notebook["data"]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(BoundedQueue, method, interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(data)
    trainer.fit(data)


def test_clusters_that_a_sweep_drops_leave_no_thread(notebook: Notebook) -> None:
    async_cell = BEGIN.replace('tr.Strategy("sync")', 'tr.Strategy("async")')
    notebook.run(async_cell)
    before = set(threading.enumerate())
    for _ in range(3):
        trainer = notebook["make_trainer"](notebook["Model"](dim=4), cluster=tr.embedded())
        trainer.fit(notebook["data"])
    left = [thread for thread in threading.enumerate() if thread not in before]
    assert left  # the newest cluster pushes in a thread
    del trainer
    gc.collect()
    for thread in left:
        thread.join(30)
        assert not thread.is_alive(), thread.name


def test_the_page_runs_from_top_to_bottom(notebook: Notebook) -> None:
    page = (tree.ROOT / "docs/notebooks.md").read_text()
    cells = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    assert len(cells) > 3
    for cell in cells:
        notebook.run(cell)


def test_a_table_with_rows_on_ssd_begins_anew_too(tmp_path: Path) -> None:
    ids = torch.randint(0, 20_000, (20, 2000), generator=torch.Generator().manual_seed(1))
    data = [{"id": some, "label": (some % 2).float()} for some in ids]

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = tr.Table("ids", dim=64, optimizer=tr.optim.Adagrad(lr=0.1))
            self.rows = tr.nn.EmbeddingBag(table, features="id")

        def forward(self, batch: Any) -> torch.Tensor:
            return self.rows(batch).flatten(1).sum(1)

    losses, on_ssd = [], []
    cluster = tr.init(memory="4MiB", ssd_dir=str(tmp_path))
    try:
        for _ in range(3):
            trainer = tr.Trainer(
                Wide(),
                None,
                loss=torch.nn.functional.mse_loss,
                strategy=tr.Strategy("sync"),
                progress=False,
            )
            losses.append(trainer.fit(data)["loss"])
            [stats] = cluster.client.stats()
            on_ssd.append(stats["tables"]["ids"]["tier"]["rows"])
    finally:
        cluster.abandon()
    assert min(on_ssd) > 1000
    assert losses == [losses[0]] * 3
    assert list(tmp_path.iterdir()) == []
