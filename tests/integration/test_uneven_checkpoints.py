"""Checkpoints that servers wrote while a worker trained: some rows have seen pushes that others
lack. Every row of the table tells how often it was pushed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

import trireme as tr
from trireme.errors import BadRequest
from trireme.job.embedded import embedded

NUM_IDS, NUM_ATTEMPTS = 240, 60
STRATEGIES = {"async": tr.Strategy("async"), "geo": tr.Strategy("geo", k=4)}
TABLE = tr.Table(
    "ids", dim=1, optimizer=tr.optim.SGD(lr=1.0), initializer=tr.initializer.Constant(0.0)
)
DATA = [{"id": ids} for ids in torch.arange(NUM_IDS).split(10)]  # each id once


class Killed(Exception):
    """The run ends here."""


class KillAt(tr.Callback):
    """Ends the run after a step."""

    def __init__(self, step: int) -> None:
        self.last = step

    def step(self, fit: tr.FitState) -> None:
        if fit.step == self.last:
            raise Killed


@contextmanager
def trainer_of(mode: str, *callbacks: tr.Callback) -> Iterator[tr.Trainer]:
    with embedded(threads=1) as cluster:
        yield tr.Trainer(
            tr.nn.EmbeddingBag(TABLE, features=["id"]),
            None,
            loss=lambda rows, _: rows.sum(),
            label=None,
            strategy=STRATEGIES[mode],
            callbacks=callbacks,
            cluster=cluster,
            progress=False,
        )


def num_pushes(trainer: tr.Trainer) -> Tensor:
    """Of each id."""
    ids = list(range(NUM_IDS))
    return -tr.TableView(TABLE, "id", ids, cluster=trainer.cluster)[ids].flatten()


@pytest.fixture(params=STRATEGIES)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The mode of a run that was killed within its first epoch, and a folder with its uneven
    checkpoints. Whether one is uneven is a matter of time: in geo, most are not.
    """
    mode = request.param
    for attempt in range(NUM_ATTEMPTS):
        folder = tmp_path / str(attempt)
        with trainer_of(mode, KillAt(23)) as trainer, pytest.raises(Killed):
            trainer.fit(DATA, checkpoints=tr.Checkpoints(folder, every_steps=3))
        for path in folder.iterdir():
            if not is_uneven(mode, path):
                shutil.rmtree(path)
        if any(folder.iterdir()):
            return mode, folder
    pytest.fail(f"no uneven checkpoint in {NUM_ATTEMPTS} runs")


def is_uneven(mode: str, path: Path) -> bool:
    """Whether the rows of a batch have seen its push in part."""
    with trainer_of(mode) as trainer:
        trainer.load(path)
        pushes = num_pushes(trainer).view(len(DATA), -1)
        return bool((pushes.amin(1) != pushes.amax(1)).any())


def by_loop(trainer: tr.Trainer) -> None:
    """An epoch in a loop of one's own."""
    for batch in tr.prefetch(DATA, trainer.model, cluster=trainer.cluster):
        trainer.model(batch).sum().backward()
        trainer.optimizer.step()


@pytest.mark.parametrize("train", [by_loop, lambda trainer: trainer.fit(DATA)], ids=["loop", "fit"])
def test_an_epoch_after_a_load_reaches_every_row(
    saved: tuple[str, Path], train: Callable[[tr.Trainer], None]
) -> None:
    mode, folder = saved
    with trainer_of(mode) as trainer:
        for path in folder.iterdir():
            trainer.load(path)
            before = num_pushes(trainer)
            train(trainer)
            assert num_pushes(trainer).tolist() == (before + 1).tolist()


def test_pushes_of_other_steps_do_not_complete_it(saved: tuple[str, Path]) -> None:
    mode, folder = saved
    other = "geo" if mode == "async" else "async"
    with (
        trainer_of(other) as trainer,
        pytest.raises(BadRequest, match=r"expected a strategy whose pushes have [14] step\(s\)"),
    ):
        trainer.resume(folder)
    with trainer_of(mode) as trainer:
        trainer.fit(DATA, checkpoints=tr.Checkpoints(folder, every_s=600), resume=True)
        assert num_pushes(trainer).tolist() == [1] * NUM_IDS
    with trainer_of(other) as trainer:  # what was saved at the end of an epoch is even
        trainer.resume(folder)
        trainer.fit(DATA)
        assert num_pushes(trainer).tolist() == [2] * NUM_IDS


def test_a_loop_of_ones_own_does_not_complete_it(saved: tuple[str, Path]) -> None:
    mode, folder = saved
    with trainer_of(mode) as trainer:
        trainer.resume(folder)
        with pytest.raises(BadRequest, match=r"expected Trainer\.fit to continue the epoch"):
            by_loop(trainer)
        trainer.model(DATA[0]).sum().backward()
        with pytest.raises(BadRequest, match=r"expected Trainer\.fit to continue the epoch"):
            trainer.optimizer.step()
