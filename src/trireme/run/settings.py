"""The settings of `trireme run` from the runner.* keys.

Nothing here loads torch: see `runner_keys`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trireme.config import Config
from trireme.errors import BadRequest
from trireme.run.runner_keys import RunnerKeys
from trireme.strategy import KNOBS, Strategy
from trireme.threads import THREADS_MAX

READER_TYPES = {
    "QueueDataset": "QueueDataset",
    "InMemoryDataset": "InMemoryDataset",
    "InmemoryDataset": "InMemoryDataset",
    "DataLoader": "DataLoader",
    "RecDataset": "DataLoader",
}
FS_CLIENT = ("uri", "user", "passwd", "hadoop_bin")
SEED_MAX = 2**63 - 1
DUMP_SWITCHES = ("need_dump", "need_train_dump", "need_infer_dump")
DUMP_FOLDERS = ("train_dump_fields_dir", "infer_dump_fields_dir")
HETER = "heter"
"""The sync_mode of a heterogeneous job: async, with compute workers."""
GPUBOX = "gpubox"
"""The sync_mode of passes on a device, which train as sync does."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The data of training, or of inference.

    key: the key with the path, for messages.
    paths: files, folders (all files below them are read) or patterns; empty: not given.
    reader: Python file that defines RecDataset, for reader_type DataLoader; None: not given.
    reader_key: the key that names it, or may name one, for messages.
    """

    key: str
    paths: tuple[str, ...]
    reader: Path | None
    reader_key: str
    batch_size: int
    threads: int


@dataclass(frozen=True, kw_only=True)
class DumpSettings:
    """The dump: columns and outputs of each example, and parameters at the end of an epoch."""

    path: str
    fields: tuple[str, ...]
    params: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run. Paths are absolute.

    asked_async: -o runner.sync_mode=async, which asks for it in a process alone, too.
    wants_compute_workers: sync_mode is heter.
    in_passes: each epoch is a pass on the device of the model (gpubox).
    use_gpu: the model computes on the GPU of its process.
    """

    folder: Path
    strategy: Strategy
    asked_async: bool
    wants_compute_workers: bool
    in_passes: bool
    use_gpu: bool
    model: str | None
    reader_type: str
    pipe_command: str | None
    train: DataSettings
    infer: DataSettings
    split_file_list: bool | None
    epochs: int
    print_interval: int
    save_path: Path | None
    warm_path: Path | None
    load_path: Path | None
    infer_epochs: range
    use_auc: bool
    use_inference: bool
    debug: bool
    seed: int | None
    parse_ins_id: bool
    parse_content: bool
    train_dump: DumpSettings | None
    infer_dump: DumpSettings | None
    fs_client: Mapping[str, str]

    @classmethod
    def read(cls, config: Config) -> Settings:
        """Raises BadRequest: a value out of range, or values that contradict each other."""
        if config.path is None:
            raise BadRequest("Settings.read: expected a configuration read from a file")
        keys = RunnerKeys(config)
        epochs = keys.integer("epochs", 1)
        save_path = keys.folder("model_save_path")
        start = keys.integer("infer_start_epoch", 0, low=0)
        return cls(
            folder=keys.base,
            strategy=_strategy(keys),
            asked_async=any(one.startswith("runner.sync_mode=") for one in config.overrides),
            wants_compute_workers=_mode(keys) == HETER,
            in_passes=_in_passes(keys),
            use_gpu=keys.switch("use_gpu"),
            model=config.get("model", None),
            reader_type=reader_type(config),
            pipe_command=keys.text("pipe_command"),
            train=_train(keys),
            infer=_infer(keys),
            split_file_list=keys.optional_switch("split_file_list"),
            epochs=epochs,
            print_interval=keys.integer("print_interval", 100),
            save_path=save_path,
            warm_path=_warm_path(keys),
            load_path=keys.folder("infer_load_path") or save_path,
            infer_epochs=range(
                start, keys.integer("infer_end_epoch", max(epochs, start + 1), low=start + 1)
            ),
            use_auc=keys.switch("use_auc"),
            use_inference=_use_inference(keys, save_path),
            debug=keys.switch("dataset_debug"),
            seed=keys.optional_integer("seed", low=0, high=SEED_MAX),
            parse_ins_id=keys.switch("parse_ins_id"),
            parse_content=keys.switch("parse_content"),
            train_dump=_dump(keys, "train", "need_dump", "need_train_dump"),
            infer_dump=_dump(keys, "infer", "need_infer_dump"),
            fs_client={key: keys.text(f"fs_client.{key}") or "" for key in FS_CLIENT},
        )

    def alone(self) -> Settings:
        """The settings of a process without a job: async is sync there, and exact, unless -o asks
        for it: there is nobody to be asynchronous with.
        """
        if self.strategy.mode != "async" or self.asked_async:
            return self
        return replace(self, strategy=Strategy("sync"))

    def model_root(self, root: str | None = None) -> Path:
        """The folder below which the servers keep the models of this configuration.

        Args:
            root: from --root; None: the innermost folder that holds all of them.

        Raises:
            BadRequest: a model outside of `root`, or only / holds all of them.
        """
        named = [path for path in (self.save_path, self.warm_path, self.load_path) if path]
        listed = ", ".join(map(str, named))
        if root is not None:
            if not all(path.resolve().is_relative_to(Path(root).resolve()) for path in named):
                raise BadRequest(f"run: expected models below --root {root}, found {listed}")
            return Path(root)
        inner = Path(os.path.commonpath(named)) if named else self.folder
        if inner == inner.parent:
            raise BadRequest(
                f"run: expected models below one folder, found {listed}; name it for the servers:"
                " --root or TRIREME_ROOT"
            )
        return inner


def _train(keys: RunnerKeys) -> DataSettings:
    return DataSettings(
        key="runner.train_data_dir",
        paths=keys.paths("train_data_dir"),
        reader=keys.script("train_reader_path"),
        reader_key="runner.train_reader_path",
        batch_size=keys.integer("train_batch_size", 1),
        threads=keys.integer("thread_num", 1, high=THREADS_MAX),
    )


def _infer(keys: RunnerKeys) -> DataSettings:
    """The data of inference; other values default to those of training."""
    train = _train(keys)
    test, infer = keys.paths("test_data_dir"), keys.paths("infer_data_dir")
    reader, reader_key = keys.script("infer_reader_path"), "runner.infer_reader_path"
    if reader is None and train.reader is not None:
        reader, reader_key = train.reader, train.reader_key
    return DataSettings(
        key="runner.infer_data_dir" if infer else "runner.test_data_dir",
        paths=infer or test,
        reader=reader,
        reader_key=reader_key,
        batch_size=keys.integer("infer_batch_size", train.batch_size),
        threads=keys.integer("infer_thread_num", train.threads, high=THREADS_MAX),
    )


def _use_inference(keys: RunnerKeys, save_path: Path | None) -> bool:
    if keys.switch("use_inference") and save_path is None:
        raise BadRequest(
            "runner.use_inference: expected runner.model_save_path, the folder to write to, with"
            " it, found none"
        )
    return keys.switch("use_inference")


def _dump(keys: RunnerKeys, part: str, *switches: str) -> DumpSettings | None:
    """The dump of a part, train or infer, whose folder may have a key of its own."""
    folder = f"{part}_dump_fields_dir"
    path, fields = keys.path(folder) or keys.path("dump_fields_path"), keys.names("dump_fields")
    params = keys.names("dump_param")
    on = [switch for switch in switches if keys.switch(switch)]
    if not on:
        return None
    if path is None or not fields + params:
        raise BadRequest(
            f"runner.{on[0]}: expected dump_fields_path or {folder}, and dump_fields or dump_param,"
            f" found none; -o runner.{on[0]}=False dumps nothing"
        )
    return DumpSettings(path=path, fields=fields, params=params)


# The keys of a Strategy's knobs that have other names here.
KNOB_KEYS = {"k": "geo_step", "cache_bytes": "geo_cache_bytes"}
OPTIONAL = ("cache_bytes",)


def _in_passes(keys: RunnerKeys) -> bool:
    """Whether sync_mode is gpubox. Raises BadRequest: without what it needs."""
    if _mode(keys) != GPUBOX:
        return False
    kind, use_gpu = reader_type(keys.config), keys.switch("use_gpu")
    if kind != "InMemoryDataset" or not use_gpu:
        raise BadRequest(
            "runner.sync_mode: expected reader_type: InMemoryDataset and use_gpu: True with gpubox,"
            " whose passes train data in memory on a GPU, found reader_type:"
            f" {kind} and use_gpu: {use_gpu}; -o runner.sync_mode=sync trains without them"
        )
    return True


def _mode(keys: RunnerKeys) -> object:
    fallback = keys.config.get("hyper_parameters.optimizer.strategy", "async")
    return keys.config.get(
        "runner.sync_mode", "collective" if keys.switch("use_fleet") else fallback
    )


def _strategy(keys: RunnerKeys) -> Strategy:
    key, mode, is_collective = "runner.sync_mode", _mode(keys), keys.switch("use_fleet")
    if mode == GPUBOX:  # with or without use_fleet, which PaddleRec needs here
        return Strategy("sync")
    if is_collective and mode != "collective":
        raise BadRequest(
            f"{key}: expected collective, {GPUBOX} or no key with use_fleet True, found {mode!r};"
            f" -o runner.use_fleet=False trains with servers, -o {key}=collective without"
        )
    if mode == HETER:
        return Strategy("async")
    if not isinstance(mode, str) or mode not in KNOBS:
        modes = ", ".join((*KNOBS, HETER, GPUBOX))
        raise BadRequest(
            f"{key}: expected one of {modes}, found {mode!r}; -o {key}=async overrides the file"
        )
    knobs = {}
    for knob in KNOBS[mode]:
        name = KNOB_KEYS.get(knob, knob)
        value = keys.optional_integer(name)
        if value is not None:
            knobs[knob] = value
        elif knob not in OPTIONAL:
            raise BadRequest(
                f"runner.{name}: expected an integer with sync_mode {mode}, found none;"
                f" -o runner.{name}=400 says one"
            )
    return Strategy(mode, **knobs)


def reader_type(config: Config) -> str:
    """QueueDataset, InMemoryDataset or DataLoader. Raises BadRequest: another one."""
    default = "QueueDataset" if "runner.pipe_command" in config else None
    if default is None:
        default = "DataLoader" if "runner.train_reader_path" in config else "QueueDataset"
    name = config.get("runner.reader_type", default)
    if not isinstance(name, str) or name not in READER_TYPES:
        raise BadRequest(
            f"runner.reader_type: expected one of {', '.join(READER_TYPES)}, found {name!r};"
            " -o runner.reader_type=DataLoader overrides the file"
        )
    return READER_TYPES[name]


def _warm_path(keys: RunnerKeys) -> Path | None:
    folders = {key: keys.folder(key) for key in ("warmup_model_path", "model_init_path")}
    named = {key: folder for key, folder in folders.items() if folder is not None}
    if len(set(named.values())) > 1:
        raise BadRequest(f"runner.warmup_model_path: expected one place, found {named}")
    return next(iter(named.values()), None)
