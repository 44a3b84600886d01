"""`trireme run`: epochs of training, or evaluation of saved epochs, from a configuration."""

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from trireme.config import Config
from trireme.data.prepared import PreparedDataset
from trireme.errors import BadRequest, DataError, writing
from trireme.inference.export import export_model
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.launch.init import connect, log_to_stderr
from trireme.launch.process_role import read_role
from trireme.metrics import AUC, Metric
from trireme.metrics.by_name import metric_of
from trireme.run.data import ReaderOptions, make_dataset
from trireme.run.model import create_recipe
from trireme.run.server_role import keeping_models
from trireme.run.settings import DataSettings, DumpSettings, Settings
from trireme.run.unused_keys import warn_of_unused
from trireme.train import Dump, Evaluation, Recipe, Report, Trainer
from trireme.train.checkpointing.save import own_folder
from trireme.train.first_worker import let_first_worker
from trireme.train.loop.worker_batches import Closable

log = logging.getLogger("trireme")


def run(config: Config, *, infer: bool = False) -> list[dict[str, float]]:
    """Train as a worker or embedded; the environment states the role.

    Args:
        infer: evaluate the epochs that `infer_load_path` holds instead of training.

    Returns:
        Loss, metrics and counts of each epoch.

    Raises:
        BadRequest: a wrong configuration.
        DataError: wrong data.
    """
    log_to_stderr()
    settings = Settings.read(config)
    with joined(config, settings) as job:
        worker = _RunWorker(config, settings, *job)
        return worker.infer() if infer else worker.train()


@contextmanager
def joined(config: Config, settings: Settings) -> Iterator[tuple[Recipe, Trainer]]:
    """Join the job as the environment states, which does not make this process a server."""
    process = read_role()
    log.info("%s", process.describe())
    if process.role == "embedded" and settings.alone() is not settings:
        settings = settings.alone()
        log.info(
            "run: alone, a worker has nobody to be asynchronous with: mode sync;"
            " -o runner.sync_mode=async has the same results"
        )
    if process.hosts:
        process = keeping_models(process, settings)
    if settings.wants_compute_workers and not process.heter:
        log.warning(
            "runner.sync_mode: heter is async here: the job has no compute workers, which trireme"
            " launch --heter_worker_num starts, and this worker runs the model itself"
        )
    with connect(process) as cluster:
        set_default(cluster)
        if settings.seed is not None:
            torch.manual_seed(settings.seed)
        recipe = create_recipe(config, settings)
        if settings.use_gpu:
            _move_to_gpu(recipe.model, cluster)
        yield recipe, make_trainer(recipe, settings)


def _move_to_gpu(model: torch.nn.Module, cluster: Cluster) -> None:
    """Where there is no GPU, PaddleRec's files that say use_gpu train on the CPU."""
    try:
        model.to(cluster.device("gpu"))
    except BadRequest as error:
        log.warning("runner.use_gpu: %s: the CPU computes", error)


class _RunWorker:
    """The part of a run that one worker does."""

    def __init__(
        self, config: Config, settings: Settings, recipe: Recipe, trainer: Trainer
    ) -> None:
        self._config, self._settings, self._recipe = config, settings, recipe
        self._trainer, self._is_first = trainer, trainer.cluster.worker == 0

    def train(self) -> list[dict[str, float]]:
        """Train every epoch, and save after each."""
        settings = self._settings
        for epoch in range(settings.epochs):
            path = self._saved(epoch)
            with writing(f"runner.model_save_path: cannot use {path}"):
                is_old = path is not None and path.exists()
            if is_old and not self._trainer.cluster.client.script.is_successor:
                raise BadRequest(
                    f"runner.model_save_path: expected no epoch there yet, found {path};"
                    " name another folder or remove it"
                )
        dataset = self._dataset(settings.train, self._recipe)
        self._warn()
        folder, cluster = settings.save_path, self._trainer.cluster
        # Fail now rather than after an epoch.
        with nullcontext() if folder is None else own_folder(cluster, folder):
            warm_start(self._trainer, self._settings)
            return [self._train_epoch(dataset, epoch) for epoch in range(settings.epochs)]

    def _train_epoch(self, dataset: Iterable[Any], epoch: int) -> dict[str, float]:
        trainer, settings = self._trainer, self._settings
        with trainer.on_device(dataset) if settings.in_passes else nullcontext():
            figures = trainer.fit(
                dataset,
                report=report_of(trainer, settings, f"epoch {epoch}"),
                dump=dump_of(settings.train_dump, str(epoch)),
            )
        where = "not saved: runner.model_save_path names no folder"
        if (path := self._saved(epoch)) is not None:
            self._trainer.save(path)
            where = f"saved to {path}"
            if self._settings.use_inference:
                where += f", for inference to {self._save_inference(dataset, epoch)}"
        self._report(f"epoch {epoch}", figures, where)
        return figures

    def _save_inference(self, dataset: Iterable[Any], epoch: int) -> Path:
        """Export beside the checkpoints, so that either may be removed alone."""
        assert self._settings.save_path is not None
        path = self._settings.save_path / "inference" / str(epoch)
        export_model(self._trainer, path, batch=_first(dataset))
        return path

    def infer(self) -> list[dict[str, float]]:
        """Load each saved epoch and evaluate it."""
        settings, results = self._settings, []
        if settings.load_path is None:
            raise BadRequest(
                "runner.infer_load_path: expected the folder of saved epochs, found none"
            )
        self._check_saved(settings.load_path)
        other = self._recipe.evaluation
        dataset = self._dataset(settings.infer, other or self._recipe)
        self._warn()
        for epoch in settings.infer_epochs:
            path = settings.load_path / str(epoch)
            self._trainer.load(path)
            dump = dump_of(settings.infer_dump, f"infer-{epoch}")
            report = Report(timing=settings.debug)
            figures = self._trainer.evaluate(dataset, model=other, report=report, dump=dump)
            if figures["examples"] == 0:
                raise DataError(
                    f"{settings.infer.key}: expected examples, found none at any worker"
                )
            results.append(figures)
            self._report(f"infer epoch {epoch}", results[-1], f"loaded from {path}")
        return results

    def _check_saved(self, folder: Path) -> None:
        """Raises BadRequest, on every worker: an epoch is not there, which costs no evaluation of
        those before it.
        """
        epochs = self._settings.infer_epochs

        def check() -> dict[str, Any]:
            with writing(f"runner.infer_load_path: cannot read {folder}"):
                there = [epoch for epoch in epochs if (folder / str(epoch)).exists()]
            if len(there) == len(epochs):
                return {}
            first = next(epoch for epoch in epochs if epoch not in there)
            until = next((n for n in there if n > first), first)
            path = folder / str(first)
            message = f"runner.infer_load_path: expected epoch {first} at {path}, found none"
            if first > epochs[0]:
                message += f"; -o runner.infer_end_epoch={first} evaluates those before it"
            elif until > first:
                message += f"; -o runner.infer_start_epoch={until} begins after it"
            raise BadRequest(message)

        let_first_worker(self._trainer.cluster, "check of runner.infer_load_path", check)

    def _dataset(self, part: DataSettings, source: Recipe | Evaluation) -> Iterable[Any]:
        schema, cluster = source.schema or self._recipe.schema, self._trainer.cluster
        reader = ReaderOptions.of(source)
        dataset = make_dataset(self._config, self._settings, part, schema, cluster, reader)
        return dataset if source.prepare is None else PreparedDataset(dataset, source.prepare)

    def _saved(self, epoch: int) -> Path | None:
        path = self._settings.save_path
        return None if path is None else path / str(epoch)

    def _warn(self) -> None:
        """Warn of unused keys, when the whole configuration has been read."""
        if self._is_first:
            warn_of_unused(self._config)

    def _report(self, title: str, figures: dict[str, float], where: str) -> None:
        if self._is_first:
            values = ", ".join(f"{name} {value:.6g}" for name, value in figures.items())
            log.info("run: %s: %s; %s", title, values, where)


def _first(dataset: Iterable[Any]) -> Any:
    """The first batch of the data, for its form."""
    batches = iter(dataset)
    try:
        return next(batches)
    finally:
        if isinstance(batches, Closable):
            batches.close()


def warm_start(trainer: Trainer, settings: Settings) -> None:
    """Load the model that runner.warmup_model_path names, if any."""
    path = settings.warm_path
    if path is None:
        return
    unloaded = trainer.load(path, dense="match")
    if trainer.cluster.worker == 0:
        note = f"; new, or of another shape: {', '.join(unloaded)}" if unloaded else ""
        log.info("run: starting from %s%s", path, note)


def dump_of(settings: DumpSettings | None, name: str) -> Dump | None:
    """The dump of one epoch or pass, in a folder of its own."""
    if settings is None:
        return None
    path = f"{settings.path}/{name}"
    return Dump(path=path, fields=settings.fields, params=settings.params)


def _figures(metric: Metric) -> tuple[str, ...]:
    """The names of what a metric, which has seen no example yet, computes: one, or several."""
    computed = metric.compute()
    if not isinstance(computed, Mapping):
        return (metric.name,)
    return tuple(f"{metric.name}.{key}" for key in computed)


def report_of(trainer: Trainer, settings: Settings, title: str) -> Report:
    """Loss, metrics and speed of training, and where the time goes if that is asked for."""
    return Report(
        values=("loss", *(name for metric in trainer.metrics for name in _figures(metric))),
        period=settings.print_interval,
        timing=settings.debug,
        title=title,
        speed=True,
    )


def make_trainer(recipe: Recipe, settings: Settings) -> Trainer:
    """A trainer in the configured mode, with an AUC if the configuration has use_auc."""
    metrics = [metric_of(metric) for metric in recipe.metrics]
    if settings.use_auc and not any(isinstance(metric, AUC) for metric in metrics):
        if recipe.label is None and metrics:
            names = ", ".join(metric.name for metric in metrics)
            log.warning("runner.use_auc: no effect: the metrics of the model are %s", names)
            return Trainer.from_recipe(recipe, strategy=settings.strategy)
        if recipe.label is None:
            raise BadRequest(
                "runner.use_auc: expected a Recipe with a label, or with metrics, found neither"
            )
        recipe = dataclasses.replace(recipe, metrics=[*metrics, AUC()])
    return Trainer.from_recipe(recipe, strategy=settings.strategy)
