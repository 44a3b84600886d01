"""`trireme stream`: trains on days of data, pass by pass, from a configuration."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from trireme.config import Config
from trireme.data.prepared import PreparedDataset
from trireme.data.sources import filesystem
from trireme.errors import BadRequest
from trireme.launch.init import log_to_stderr
from trireme.run import runner
from trireme.run.data import ReaderOptions, dataset_of, files_below, located
from trireme.run.online_settings import OnlineSettings
from trireme.run.server_role import make_folder
from trireme.run.settings import Settings
from trireme.run.unused_keys import warn_of_unused_in_stream
from trireme.train import Recipe, Trainer
from trireme.train.online.passes import Pass, next_day, seconds_of_day
from trireme.train.online.publishing import Publishing
from trireme.train.online.train_passes import PassReport, train_passes

log = logging.getLogger("trireme")

OpenFiles = Callable[[list[str]], Iterable[Any] | None]


def passes_of(settings: Settings, online: OnlineSettings, open_files: OpenFiles) -> Iterator[Pass]:
    """Every pass of the configured days, in order.

    Args:
        open_files: makes this worker's dataset from the files of a pass.

    Raises:
        BadRequest: the configuration names no folder of data.
    """
    return _passes(_Folders(settings, online), online, open_files)


def _passes(folders: _Folders, online: OnlineSettings, open_files: OpenFiles) -> Iterator[Pass]:
    def opened(names: list[str]) -> Iterable[Any] | None:
        return open_files(folders.files(names))

    for day in _days(online.start_day, online.end_day):
        for number in range(1, online.passes_per_day + 1):
            names = [f"{day}/{split}" for split in online.splits(number)]
            yield Pass(
                day=day,
                number=number,
                open=partial(opened, names),
                is_ready=partial(folders.are_ready, names),
                time=seconds_of_day(day) + online.begin_s(number),
                ends_day=number == online.passes_per_day,
                where=folders.describe(names),
            )


def _days(start: str, end: str | None) -> Iterator[str]:
    day = start
    while end is None or day <= end:
        yield day
        day = next_day(day)


class _Folders:
    """The folders DAY/HHMM of a stream's data."""

    def __init__(self, settings: Settings, online: OnlineSettings) -> None:
        if len(settings.train.paths) != 1:
            raise BadRequest(
                f"{settings.train.key}: expected one folder of days, found"
                f" {', '.join(settings.train.paths) or 'none'}"
            )
        self._base, self._options = located(settings.train.paths[0].rstrip("/"), settings)
        self._donefile = online.data_donefile

    def are_ready(self, names: list[str]) -> bool:
        return all(self._is_ready(f"{self._base}/{name}") for name in names)

    def describe(self, names: list[str]) -> str:
        """The condition under which folders are ready, for messages."""
        last = f" to {names[-1]}" if len(names) > 1 else ""
        contents = self._donefile or "files"
        return f"{self._base}/{names[0]}{last}, each with {contents}"

    def _is_ready(self, folder: str) -> bool:
        if not self._donefile:
            return bool(files_below(folder, self._options))
        where, path = filesystem(f"{folder}/{self._donefile}", self._options)
        where.invalidate_cache()
        return bool(where.exists(path))

    def files(self, names: list[str]) -> list[str]:
        """Files with data, in the order of the folders."""
        listed = itertools.chain.from_iterable(
            files_below(f"{self._base}/{name}", self._options).items() for name in names
        )
        data = {path: size for path, size in listed if path.rpartition("/")[2] != self._donefile}
        if empty := [path for path, size in data.items() if size == 0]:
            log.info("stream: %d empty files are skipped, %s first", len(empty), empty[0])
        return [path for path, size in data.items() if size]


def stream(config: Config) -> int:
    """Train on the passes of the days as a worker or embedded; the environment states the role.

    Returns:
        Number of passes that this process has trained on.

    Raises:
        BadRequest: a wrong configuration. DataError: wrong data. DeadlineExceeded: data that did
        not come.
    """
    log_to_stderr()
    settings, online = Settings.read(config), OnlineSettings.read(config)
    _check(settings, online)
    with runner.joined(config, settings) as job:
        is_first, num_passes = job[1].cluster.worker == 0, 0
        for report in _reports(config, settings, online, *job):
            num_passes += 1
            if is_first:
                _log_pass(report)
        if is_first:
            log.info("stream: %d passes done, up to runner.end_day %s", num_passes, online.end_day)
        return num_passes


def _check(settings: Settings, online: OnlineSettings) -> None:
    if settings.in_passes:
        raise BadRequest(
            "runner.sync_mode: expected another mode than gpubox in `trireme stream`, whose stops"
            " leave checkpoints within a pass: use sync, or `trireme run`"
        )
    if online.prefetch and settings.reader_type != "InMemoryDataset":
        raise BadRequest(
            "runner.prefetch: expected reader_type: InMemoryDataset with it, which loads a pass"
            f" ahead, found reader_type: {settings.reader_type}"
        )


def _reports(
    config: Config, settings: Settings, online: OnlineSettings, recipe: Recipe, trainer: Trainer
) -> Iterator[PassReport]:
    def open_files(files: list[str]) -> Iterable[Any] | None:
        reader = ReaderOptions.of(recipe)
        dataset = dataset_of(
            files, config, settings, settings.train, recipe.schema, trainer.cluster, reader
        )
        if dataset is None or recipe.prepare is None:
            return dataset
        return PreparedDataset(dataset, recipe.prepare)

    passes = passes_of(settings, online, open_files)
    publishing = _publishing(settings, online, trainer)
    if trainer.cluster.worker == 0:
        warn_of_unused_in_stream(config)
    runner.warm_start(trainer, settings)
    return train_passes(
        trainer,
        passes,
        publishing=publishing,
        prefetch=online.prefetch,
        preload_threads=online.preload_threads,
        poll_s=online.poll_s,
        timeout_s=online.timeout_s,
        training=partial(_training, settings, trainer),
        evaluating=lambda one: {
            "dump": runner.dump_of(settings.infer_dump, f"infer-{one.day}-{one.number}")
        },
    )


def _publishing(settings: Settings, online: OnlineSettings, trainer: Trainer) -> Publishing | None:
    if settings.save_path is None:
        if trainer.cluster.worker == 0:
            log.warning("stream: nothing is saved: runner.model_save_path names no folder")
        return None
    if trainer.cluster.worker == 0:
        make_folder("runner.model_save_path: cannot write", settings.save_path)
    return Publishing(
        path=str(settings.save_path),
        checkpoint_per_pass=online.checkpoint_per_pass,
        save_delta_frequency=online.save_delta_frequency,
        save_first_base=online.save_first_base,
        keep=online.checkpoint_keep,
    )


def _training(settings: Settings, trainer: Trainer, one: Pass) -> dict[str, Any]:
    return {
        "report": runner.report_of(trainer, settings, f"pass {one.day}/{one.number}"),
        "dump": runner.dump_of(settings.train_dump, f"{one.day}-{one.number}"),
    }


def _log_pass(report: PassReport) -> None:
    parts = [
        f"{what} {_text(figures)}"
        for what, figures in (("before:", report.evaluated), ("training:", report.trained))
        if figures
    ]
    parts += [f"written {path}" for path in report.written]
    parts += [f"{table}: {_text(counts)}" for table, counts in report.removed.items()]
    where = f"{report.point.day}/{report.point.number}"
    log.info("stream: pass %s: %s", where, "; ".join(parts) or "no data")


def _text(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in figures.items())
