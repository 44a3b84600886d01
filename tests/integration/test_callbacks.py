"""Callbacks of a fit: when they are called, on which workers, how they end it and go on."""

from __future__ import annotations

import contextlib
import math
import os
import runpy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trireme as tr
from tests.integration.planted_model import Linear, bce, loader
from tests.jobs import Job
from tests.repo import tree
from trireme.errors import BadRequest, Stopped
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded


class Recorder(tr.Callback):
    """Notes every call. fails: raises in this one."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[Any] = []
        self.fails = fails

    def note(self, name: str, *values: Any) -> None:
        self.calls.append((name, *values))
        if name == self.fails:
            raise ArithmeticError(f"in {name}")

    def begin_fit(self, fit: tr.FitState) -> None:
        self.note("begin_fit", fit.epoch, fit.end, fit.resumes)

    def step(self, fit: tr.FitState) -> None:
        assert fit.loss > 0
        assert fit.examples > 0
        self.note("step", fit.step)

    def epoch(self, fit: tr.FitState) -> None:
        self.note("epoch", fit.epoch, dict(fit.figures), dict(fit.valid))

    def end_fit(self, fit: tr.FitState, error: BaseException | None) -> None:
        self.note("end_fit", type(error).__name__ if error else "")


class EveryWorkers(Recorder):
    on_all_workers = True


class Told(tr.EarlyStopping):
    """Sees figures that the test chooses, in the place of the fit's."""

    def __init__(self, losses: list[float], **options: Any) -> None:
        super().__init__("loss", **options)
        self.losses = losses

    def epoch(self, fit: tr.FitState) -> None:
        fit.valid = {"loss": self.losses[fit.epoch - 1]}
        super().epoch(fit)


KNOBS: dict[str, dict[str, int]] = {"bounded": {"staleness": 1}, "geo": {"k": 2}}


def trainer_with(cluster: Cluster, *callbacks: tr.Callback, mode: str = "sync") -> tr.Trainer:
    model = Linear()
    return tr.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=tr.Strategy(mode, **KNOBS.get(mode, {})),
        loss=bce,
        metrics=["auc"],
        callbacks=callbacks,
        progress=False,
        cluster=cluster,
    )


def test_a_callback_sees_steps_epochs_and_validation() -> None:
    with embedded() as cluster:
        recorder = Recorder()
        trainer = trainer_with(cluster, recorder)
        fitted = trainer.fit(loader(500), epochs=2, valid=loader(200, seed=1))
        evaluated = trainer.evaluate(loader(200, seed=1))
    names = [call[0] for call in recorder.calls]
    assert names == ["begin_fit", *["step"] * 10, "epoch", *["step"] * 10, "epoch", "end_fit"]
    assert [call[1] for call in recorder.calls if call[0] == "step"] == list(range(1, 21))
    assert recorder.calls[0] == ("begin_fit", 0, 2, False)
    _, epoch, figures, valid = recorder.calls[-2]
    assert epoch == 2
    assert valid["loss"] == evaluated["loss"] == fitted["valid_loss"]
    assert valid["auc"] == evaluated["auc"] == fitted["valid_auc"]
    assert figures == {name: fitted[name] for name in figures}
    assert recorder.calls[-1] == ("end_fit", "")


class Evaluating(tr.Callback):
    """Evaluates after each third step, on all workers."""

    on_all_workers = True

    def step(self, fit: tr.FitState) -> None:
        if fit.step % 3 == 0:
            fit.trainer.evaluate(loader(100))


def test_an_evaluation_within_an_epoch_leaves_the_metrics_of_training_as_they_are() -> None:
    def train(cluster: Cluster, *callbacks: tr.Callback) -> tuple[float, float]:
        figures = trainer_with(cluster, *callbacks).fit(loader(1000), epochs=2)
        return figures["auc"], figures["loss"]

    results = []
    for callbacks in ((), (Evaluating(),)):
        with Job(1) as job:
            results += job.run(2, lambda cluster, own=callbacks: train(cluster, *own))
    assert len(results) == 4
    assert len({*results}) == 1


def test_rates_are_those_of_tables_and_dense_parameters() -> None:
    rates = {}

    class Rates(tr.Callback):
        def step(self, fit: tr.FitState) -> None:
            rates.update(fit.rates)

    with embedded() as cluster:
        trainer = trainer_with(cluster, Rates())
        for group in trainer.optimizer.param_groups:
            group["lr"] = 0.25
        trainer.fit(loader(100))
        names = {table.name for table in trainer.optimizer.tables}
    assert rates == dict.fromkeys({*names, "dense"}, 0.25)


@pytest.mark.parametrize("mode", ["sync", "async", "bounded", "geo", "hybrid"])
def test_early_stopping_ends_all_workers_after_the_same_epoch(mode: str, tmp_path: Path) -> None:
    def work(cluster: Cluster) -> tuple[Any, ...]:
        stopping = Told([3.0, 2.0, 2.5, 2.0, 1.0], patience=2)
        best = tr.BestCheckpoint(tmp_path / "best", monitor="loss")
        recorder = Recorder()
        trainer = trainer_with(cluster, stopping, best, recorder, mode=mode)
        trainer.fit(loader(300), epochs=5, valid=loader(100, seed=1))
        trainer.load(best.path)
        loaded = trainer.evaluate(loader(100, seed=1))["loss"]
        return trainer.num_epochs, stopping.best_epoch, best.path, loaded, len(recorder.calls)

    with Job(2) as job:
        first, second = job.run(2, work)
    assert first[:2] == (2, 2)  # num_epochs is that of the loaded checkpoint
    assert first[:4] == second[:4]
    assert first[4] > 0
    assert second[4] == 0
    assert [path.name for path in (tmp_path / "best").iterdir()] == [Path(first[2]).name]


def test_a_further_fit_keeps_the_best_and_a_new_model_is_refused_it(tmp_path: Path) -> None:
    """As of a cell of a notebook that is run again, where another one has made the callback."""
    best = tr.BestCheckpoint(tmp_path / "best", monitor="loss")
    with embedded() as cluster:
        trainer = trainer_with(cluster, best)
        trainer.fit(loader(300), epochs=2, valid=loader(100, seed=1))
        first = best.best
        trainer.fit(loader(300), epochs=2, valid=loader(100, seed=1))
        assert first is not None
        assert best.best is not None
        assert (best.best < first, best.best_epoch) == (True, 4)
        again = trainer_with(cluster, best)
        with pytest.raises(BadRequest, match=r"for a new model, found .*/best/4 of an earlier"):
            again.fit(loader(300), valid=loader(100, seed=1))
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["4"]


def test_the_best_checkpoint_is_that_of_the_best_epoch(tmp_path: Path) -> None:
    class Chosen(tr.BestCheckpoint):
        def epoch(self, fit: tr.FitState) -> None:
            fit.valid = {"auc": [0.6, 0.8, 0.7][fit.epoch - 1], "own": fit.valid["loss"]}
            super().epoch(fit)
            losses.append(fit.valid["own"])

    losses: list[float] = []
    with embedded() as cluster:
        best = Chosen(tmp_path / "best", monitor="auc")
        trainer = trainer_with(cluster, best)
        trainer.fit(loader(300), epochs=3, valid=loader(100, seed=1))
        assert (best.best, best.best_epoch, best.path) == (0.8, 2, str(tmp_path / "best" / "2"))
        assert trainer.evaluate(loader(100, seed=1))["loss"] == losses[2]
        trainer.load(best.path)
        assert trainer.evaluate(loader(100, seed=1))["loss"] == losses[1]
        assert trainer.num_epochs == 2
        again = trainer_with(cluster, tr.BestCheckpoint(tmp_path / "best", monitor="auc"))
        with pytest.raises(BadRequest, match=r"for a new model, found .*/best/2 of an earlier"):
            again.fit(loader(100))
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["2"]


def test_a_resumed_fit_continues_the_best_and_the_patience(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses = [3.0, 2.0, 2.5, 2.0, 1.0]
    checkpoints = tr.Checkpoints(tmp_path / "saved", every_steps=6)

    def fit(*callbacks: tr.Callback) -> tr.Trainer:
        with embedded() as cluster:
            trainer = trainer_with(cluster, *callbacks)
            trainer.fit(loader(300), epochs=5, checkpoints=checkpoints, resume=True)
            return trainer

    class Killed(tr.Callback):
        def step(self, fit: tr.FitState) -> None:
            if fit.step == 20:  # in the fourth epoch
                raise ArithmeticError("killed")

    def own() -> tuple[Told, tr.BestCheckpoint]:
        return Told(losses, patience=2), tr.BestCheckpoint(tmp_path / "best", monitor="loss")

    with pytest.raises(ArithmeticError):
        fit(*own(), Killed())
    stopping, best = own()
    assert fit(stopping, best).num_epochs == 4
    assert (stopping.best, stopping.best_epoch) == (2.0, 2)
    assert best.best_epoch == 2
    assert fit(*own()).num_epochs == 4  # stopped is stopped
    caplog.clear()
    fit(tr.EarlyStopping("auc", patience=9), Told(losses, patience=9))
    assert "EarlyStopping: the checkpoint has no state of it: it begins anew" in caplog.text


def test_a_fit_after_one_that_was_stopped_has_its_full_patience(tmp_path: Path) -> None:
    losses = [1.0, 2.0, 2.0, 2.0]
    with embedded() as cluster:
        trainer = trainer_with(cluster, Told(losses, patience=1))
        stopped = trainer.fit(
            loader(100), epochs=4, checkpoints=tr.Checkpoints(tmp_path, every_steps=9)
        )
    with embedded() as cluster:
        trainer = trainer_with(cluster, Told(losses, patience=1))
        trainer.resume(tmp_path)
        assert trainer.fit(loader(100), epochs=2) == stopped  # stopped is stopped
        trainer.fit(loader(100), epochs=2)
        assert trainer.num_epochs == 4


@pytest.mark.parametrize("fails", ["begin_fit", "step", "epoch", "end_fit"])
def test_an_error_in_a_callback_ends_the_fit_and_closes_all(fails: str) -> None:
    def work(cluster: Cluster) -> list[Any]:
        before, failing = EveryWorkers(), EveryWorkers(fails)
        with pytest.raises(ArithmeticError, match=f"in {fails}"):
            trainer_with(cluster, before, failing).fit(loader(300))
        return [before.calls[-1], failing.calls[-1]]

    with embedded() as cluster:
        assert work(cluster) == [
            ("end_fit", "ArithmeticError"),
            ("end_fit", "" if fails == "end_fit" else "ArithmeticError"),
        ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_closes_callbacks(number: signal.Signals) -> None:
    class Signalled(Recorder):
        def step(self, fit: tr.FitState) -> None:
            super().step(fit)
            if fit.step == 2:
                os.kill(os.getpid(), number)

    recorder = Signalled()
    with embedded() as cluster, pytest.raises(Stopped):
        trainer_with(cluster, recorder).fit(loader(500))
    assert recorder.calls[-1] == ("end_fit", "Stopped")
    assert recorder.calls[-2] in (("step", 2), ("step", 3))


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    for wrong in (tr.Callback, print):
        with embedded() as cluster, pytest.raises(BadRequest, match="list of objects of"):
            trainer_with(cluster, wrong)  # type: ignore[arg-type]
    twice = tr.EarlyStopping("loss")
    with embedded() as cluster, pytest.raises(BadRequest, match="each callback once"):
        trainer_with(cluster, twice, twice)
    with pytest.raises(BadRequest, match="mode 'min' or 'max', whether a lower or a higher 'copc'"):
        tr.EarlyStopping("copc")
    with pytest.raises(BadRequest, match="patience as an integer >= 1, found 0"):
        tr.EarlyStopping("auc", patience=0)
    with pytest.raises(BadRequest, match="min_delta as a finite number >= 0, found -1"):
        tr.BestCheckpoint(tmp_path, monitor="auc", min_delta=-1)
    with embedded() as cluster:
        trainer = trainer_with(cluster, tr.EarlyStopping("acu", mode="max"))
        with pytest.raises(BadRequest, match=r"one of loss, auc, .*found 'acu'"):
            trainer.fit(loader(100))
        with pytest.raises(BadRequest, match="expected valid that can be read 2 times"):
            trainer.fit(loader(100), epochs=2, valid=iter([]))


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [("min", [3, 2.5, 2.4, math.nan], 2.5), ("max", [1, 1.1, 1.6, 1.9], 1.6)],
)
def test_an_improvement_is_more_than_min_delta(mode: Any, values: list[float], best: float) -> None:
    class Figures(tr.EarlyStopping):
        def epoch(self, fit: tr.FitState) -> None:
            fit.valid = {"x": values[fit.epoch - 1]}
            super().epoch(fit)

    stopping = Figures("x", mode=mode, min_delta=0.3, patience=9)
    with embedded() as cluster:
        trainer_with(cluster, stopping).fit(loader(100), epochs=4)
    assert stopping.best == best


def test_a_best_without_an_epoch_has_no_path(tmp_path: Path) -> None:
    best = tr.BestCheckpoint(tmp_path / "best", monitor="loss")
    with pytest.raises(BadRequest, match=r"a checkpoint below .*best, found none: no epoch"):
        Path(best.path)


@pytest.mark.parametrize("method", ["begin_fit", "step", "epoch", "end_fit"])
def test_a_callback_cannot_fit(method: str) -> None:
    """Also after that the script can."""
    more = loader(100)

    class Fits(tr.Callback):
        def fit_again(self, fit: tr.FitState, *_: object) -> None:
            trainer.fit(more)

    setattr(Fits, method, Fits.fit_again)
    with embedded() as cluster:
        trainer = trainer_with(cluster, Fits())
        with pytest.raises(BadRequest, match="found fit under way: a callback cannot call it"):
            trainer.fit(more)
        trainer.callbacks = ()
        assert trainer.fit(more)["examples"] == 100


@pytest.mark.parametrize("load", [tr.Trainer.load, tr.Trainer.resume])
def test_a_callback_cannot_load(load: Callable[..., object], tmp_path: Path) -> None:
    """It would set back the epochs that the fit counts."""

    class Loads(tr.Callback):
        def step(self, fit: tr.FitState, *_: object) -> None:
            load(trainer, tmp_path / "saved")

    with embedded() as cluster:
        trainer = trainer_with(cluster, Loads())
        trainer.save(tmp_path / "saved")
        with pytest.raises(BadRequest, match=f"{load.__name__}: .* found fit under way"):
            trainer.fit(loader(100))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_two_best_checkpoints_are_apart(tmp_path: Path, num_workers: int) -> None:
    def work(cluster: Cluster) -> list[str]:
        auc = tr.BestCheckpoint(tmp_path / "auc", monitor="auc")
        loss = tr.BestCheckpoint(tmp_path / "loss", monitor="loss")
        trainer_with(cluster, auc, loss).fit(loader(100), epochs=2)
        return [str(Path(best.path).parent) for best in (auc, loss)]

    folders = [str(tmp_path / name) for name in ("auc", "loss")]
    if num_workers == 1:
        with embedded() as cluster:
            assert work(cluster) == folders
    else:
        with Job(2) as job:
            assert job.run(2, work) == [folders, folders]
    assert all(len(os.listdir(folder)) == 1 for folder in folders)


def test_the_folder_of_the_best_is_shared_with_nobody(tmp_path: Path) -> None:
    first = tr.BestCheckpoint(tmp_path, monitor="auc")
    second = tr.BestCheckpoint(tmp_path, monitor="loss")
    with embedded() as cluster:
        with pytest.raises(BadRequest, match=r"best loss \(min\) in .*found .*'monitor': 'auc'"):
            trainer_with(cluster, first, second).fit(loader(100))
        assert Path(first.path, "manifest.json").exists()
        with pytest.raises(BadRequest, match="another folder than that of the fit's checkpoints"):
            trainer_with(cluster, first).fit(
                loader(100), checkpoints=tr.Checkpoints(tmp_path, every_steps=1)
            )
    assert os.listdir(tmp_path) == ["1"]


def test_the_best_stays_in_its_folder_when_the_script_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaves(tr.Callback):
        def epoch(self, fit: tr.FitState) -> None:
            (tmp_path / "other").mkdir(exist_ok=True)
            monkeypatch.chdir(tmp_path / "other")

    monkeypatch.chdir(tmp_path)
    best = tr.BestCheckpoint("best", monitor="loss")
    with embedded() as cluster:
        trainer_with(cluster, best, Leaves()).fit(loader(100), epochs=3)
    assert os.listdir(tmp_path / "best") == [Path(best.path).name]
    assert os.listdir(tmp_path / "other") == []


def test_a_fit_that_was_done_gives_its_best_again(tmp_path: Path) -> None:
    results = []
    for _ in range(2):  # the second makes no step
        best = tr.BestCheckpoint(tmp_path / "best", monitor="loss")
        stopping, recorder = tr.EarlyStopping("loss"), Recorder()
        checkpoints = tr.Checkpoints(tmp_path / "saved", every_steps=6)
        with embedded() as cluster:
            trainer = trainer_with(cluster, best, stopping, recorder)
            figures = trainer.fit(loader(100), epochs=2, checkpoints=checkpoints, resume=True)
        kept = best.path, best.best, best.best_epoch, stopping.best
        results.append((*kept, figures["loss"]))
    assert results[0] == results[1]
    assert [call[0] for call in recorder.calls] == ["begin_fit", "end_fit"]


@pytest.mark.parametrize("state", [torch.ones(2), {1, 2}, math.nan])
def test_a_state_that_no_checkpoint_can_hold_is_refused(state: Any) -> None:
    class Odd(tr.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"odd": state}

    with embedded() as cluster, pytest.raises(BadRequest, match=r"Odd.state_dict: .*JSON values"):
        trainer_with(cluster, Odd()).fit(loader(100))


def test_the_page_shows_a_scheduler_that_goes_on_in_a_resumed_fit(tmp_path: Path) -> None:
    page = (tree.ROOT / "docs/callbacks.md").read_text()
    code = tmp_path / "plateau.py"
    shown = page.split("## Your own\n\n```python\n")[1].split("```")[0]
    code.write_text(f"import torch\nimport trireme as tr\n{shown}")
    plateau_class = runpy.run_path(str(code))["Plateau"]
    checkpoints = tr.Checkpoints(tmp_path / "ckpt", every_s=600)
    for epochs in (1, 2):
        plateau = plateau_class()
        with embedded() as cluster:
            trainer = trainer_with(cluster, plateau)
            valid = loader(100, seed=1)
            trainer.fit(
                loader(100), epochs=epochs, valid=valid, checkpoints=checkpoints, resume=True
            )
        if epochs == 1:
            first = plateau.rates.best
    assert plateau.rates.last_epoch == 1  # of this fit's own
    assert math.isfinite(first)
    assert plateau.rates.best < first


def test_the_page_shows_a_schedule_that_goes_on_in_a_resumed_fit(tmp_path: Path) -> None:
    page = (tree.ROOT / "docs/optimizers.md").read_text()
    shown = page.split("such as warm-up and cosine:\n\n```python\n")[1].split("trainer.fit(")[0]

    code = tmp_path / "schedule.py"

    def rates(folder: str, *, stops: bool) -> list[float]:
        class Noting(tr.Callback):
            def step(self, fit: tr.FitState) -> None:
                seen.append(fit.rates["dense"])
                if stops and fit.step == 7:
                    os.kill(os.getpid(), signal.SIGTERM)

        seen: list[float] = []
        with embedded() as cluster:
            trainer = trainer_with(cluster, Noting())
            code.write_text(f"import math, torch\n{shown}")
            runpy.run_path(str(code), {"trainer": trainer})
            checkpoints = tr.Checkpoints(tmp_path / folder, every_s=600)
            with pytest.raises(Stopped) if stops else contextlib.nullcontext():
                trainer.fit(loader(500), epochs=2, checkpoints=checkpoints, resume=True)
        return seen

    whole = rates("whole", stops=False)
    first = rates("stopped", stops=True)
    assert len(set(whole)) == len(whole)
    assert first + rates("stopped", stops=False) == whole


def test_the_page_shows_a_metric_of_ones_own(tmp_path: Path) -> None:
    page = (tree.ROOT / "docs/callbacks.md").read_text()
    shown = page.split("## Metrics of your own\n")[1].split("```python\n")[1].split("```")[0]
    code = tmp_path / "metric.py"
    code.write_text(f"import numpy as np\nimport trireme as tr\n{shown}")
    metric = runpy.run_path(str(code))["WeightedError"]()
    data = [
        {
            **{name: torch.tensor([3, 4]) for name in "ab"},
            "label": torch.zeros(2),
            "minutes": torch.tensor([minutes, 100.0]),
            "has_minutes": torch.tensor([1.0, 0.0]),
        }
        for minutes in (2.0, 5.0)
    ]
    with embedded() as cluster:
        trainer = trainer_with(cluster)
        outputs = trainer.predict(data)["output"][::2]
        evaluation = tr.Evaluation(model=trainer.model, metrics=[metric])
        error = trainer.evaluate(data, model=evaluation)["error"]
    expected = (outputs - torch.tensor([2.0, 5.0])).abs().mean()
    assert error == pytest.approx(float(expected))


def test_infinity_is_no_improvement(tmp_path: Path) -> None:
    class Figures(tr.BestCheckpoint):
        def epoch(self, fit: tr.FitState) -> None:
            fit.valid = {"x": [math.inf, 1.0, math.inf][fit.epoch - 1]}
            super().epoch(fit)

    best = Figures(tmp_path, monitor="x", mode="max")
    with embedded() as cluster:
        trainer_with(cluster, best).fit(loader(100), epochs=3)
    assert (best.best, best.best_epoch) == (1.0, 2)


def test_a_step_with_a_closure_is_a_step() -> None:
    batch = {"a": torch.tensor([3, 4]), "b": torch.tensor([5, 5])}
    weights = []
    for uses_closure in (False, True):
        with embedded() as cluster:
            model = Linear()
            dense = torch.optim.SGD(model.parameters(), lr=1.0)
            optimizer = tr.DistributedOptimizer(dense, model, cluster=cluster)

            def closure(model: Linear = model) -> torch.Tensor:
                loss: torch.Tensor = model(batch).sum()
                loss.backward()
                return loss

            if uses_closure:
                assert optimizer.step(closure).item() == 0.0
            else:
                closure()
                optimizer.step()
            weights.append([model.bias.item(), *model(batch).tolist()])
    assert weights[0] == weights[1]
    assert weights[0][0] == -2.0
