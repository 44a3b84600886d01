"""`trireme stream`: trains on days of data, pass by pass, from a configuration."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from trireme.config import Config
from trireme.data.prepared import PreparedDataset
from trireme.errors import BadRequest
from trireme.launch.init import log_to_stderr
from trireme.run import runner
from trireme.run.data import ReaderOptions, dataset_of
from trireme.run.day_folders import passes_of
from trireme.run.online_settings import OnlineSettings
from trireme.run.server_role import make_folder
from trireme.run.settings import Settings
from trireme.run.unused_keys import warn_of_unused_in_stream
from trireme.train import Recipe, Trainer
from trireme.train.online.passes import Pass
from trireme.train.online.publishing import Publishing
from trireme.train.online.train_passes import PassReport, train_passes

log = logging.getLogger("trireme")


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
