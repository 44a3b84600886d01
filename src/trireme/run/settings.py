"""The runner.* keys of a configuration as typed values; modes that are not there yet are refused.

Nothing here needs torch, so that `trireme launch -m` finds a wrong configuration before it starts
anything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.config import Config
from trireme.errors import BadRequest
from trireme.strategy import Strategy

READER_TYPES = {
    "QueueDataset": "QueueDataset",
    "InMemoryDataset": "InMemoryDataset",
    "InmemoryDataset": "InMemoryDataset",
    "DataLoader": "DataLoader",
    "RecDataset": "DataLoader",
}
FS_CLIENT = ("uri", "user", "passwd", "hadoop_bin")
LATER_MODES = {
    "heter": "heterogeneous workers come in a later version",
    "gpubox": "tables in GPU memory come in a later version",
}
# Switches that ask for a way of running which this version lacks.
LATER_SWITCHES = {
    "use_gpu": "training on GPUs comes in a later version",
    "use_xpu": "there are no kernels for XPUs",
    "use_npu": "there are no kernels for NPUs",
    "use_fleet": "collective training comes in a later version; `trireme launch` distributes",
}


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What to read for training, or for inference.

    key: which key names the data, for messages.
    path: of a file, a folder (all files below it are read) or a pattern; None: not given.
    reader: Python file that defines RecDataset, for reader_type DataLoader; None: not given.
    """

    key: str
    path: str | None
    reader: Path | None
    batch_size: int
    threads: int


@dataclass(frozen=True, kw_only=True)
class DumpSettings:
    """What to write of each example: outputs and columns, and parameters at the end of an epoch."""

    path: str
    fields: tuple[str, ...]
    params: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the runner reads of a configuration. Paths are absolute."""

    folder: Path
    strategy: Strategy
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
        """Raises BadRequest: a value out of range, or a mode that is not there yet."""
        if config.path is None:
            raise BadRequest("Settings.read: expected a configuration read from a file")
        of = _Reader(config)
        for switch, why in LATER_SWITCHES.items():
            if of.switch(switch):
                raise BadRequest(f"runner.{switch}: expected False, found True: {why}")
        epochs = of.number("epochs", 1)
        save_path = of.folder("model_save_path")
        start = of.number("infer_start_epoch", 0, low=0)
        return cls(
            folder=of.base,
            strategy=_strategy(of),
            model=config.get("model", None),
            reader_type=_reader_type(config),
            pipe_command=of.text("pipe_command"),
            train=_train(of),
            infer=_infer(of),
            split_file_list=of.switch("split_file_list") if of.has("split_file_list") else None,
            epochs=epochs,
            print_interval=of.number("print_interval", 100),
            save_path=save_path,
            warm_path=_either(of, "warmup_model_path", "model_init_path"),
            load_path=of.folder("infer_load_path") or save_path,
            infer_epochs=range(
                start, of.number("infer_end_epoch", max(epochs, start + 1), low=start + 1)
            ),
            use_auc=of.switch("use_auc"),
            use_inference=_use_inference(of, save_path),
            debug=of.switch("dataset_debug"),
            seed=of.number("seed", 0, low=0) if of.has("seed") else None,
            parse_ins_id=of.switch("parse_ins_id"),
            parse_content=of.switch("parse_content"),
            train_dump=_dump(of, "need_dump", "need_train_dump"),
            infer_dump=_dump(of, "need_infer_dump"),
            fs_client={key: of.text(f"fs_client.{key}") or "" for key in FS_CLIENT},
        )

    def model_root(self, root: str | None = None) -> Path:
        """The folder below which the servers keep the models of this configuration.

        Args:
            root: as given by --root; None: the innermost folder that holds all of them.

        Raises:
            BadRequest: a model outside of `root`, or no folder but / for all.
        """
        named = [path for path in (self.save_path, self.warm_path, self.load_path) if path]
        found = ", ".join(map(str, named))
        if root is not None:
            if not all(path.resolve().is_relative_to(Path(root).resolve()) for path in named):
                raise BadRequest(f"run: expected models below --root {root}, found {found}")
            return Path(root)
        inner = Path(os.path.commonpath(named)) if named else self.folder
        if inner == inner.parent:
            raise BadRequest(
                f"run: expected models below one folder, found {found}; name it for the servers:"
                " --root or TRIREME_ROOT"
            )
        return inner


class _Reader:
    """Typed values of runner.*; paths start at the folder of the file."""

    def __init__(self, config: Config) -> None:
        assert config.path is not None
        self.config, self.base = config, config.path.parent

    def has(self, key: str) -> bool:
        return self.config.get(f"runner.{key}", None) is not None

    def number(self, key: str, default: int, *, low: int = 1) -> int:
        found = self.config.get(f"runner.{key}", default)
        if not isinstance(found, int) or isinstance(found, bool) or found < low:
            raise BadRequest(f"runner.{key}: expected an integer >= {low}, found {found!r}")
        return found

    def switch(self, key: str) -> bool:
        found = self.config.get(f"runner.{key}", False)
        if not isinstance(found, bool):
            raise BadRequest(f"runner.{key}: expected True or False, found {found!r}")
        return found

    def text(self, key: str) -> str | None:
        found = self.config.get(f"runner.{key}", None)
        if found is not None and not isinstance(found, str):
            raise BadRequest(f"runner.{key}: expected text, found {found!r}")
        return found or None

    def names(self, key: str) -> tuple[str, ...]:
        found = self.config.get(f"runner.{key}", ())
        if not isinstance(found, list | tuple) or not all(isinstance(name, str) for name in found):
            raise BadRequest(f"runner.{key}: expected a list of names, found {found!r}")
        return tuple(found)

    def path(self, key: str) -> str | None:
        """A location of data: anything with a scheme as it is."""
        found = self.text(key)
        return found if found is None or "://" in found else str(self.base / found)

    def folder(self, key: str) -> Path | None:
        found = self.text(key)
        if found is not None and "://" in found:
            raise BadRequest(
                f"runner.{key}: expected a folder that all servers and worker 0 share,"
                f" found {found!r}"
            )
        return None if found is None else (self.base / found).absolute()

    def script(self, key: str) -> Path | None:
        """A Python file, named with its ending or without."""
        found = self.text(key)
        if found is None:
            return None
        return self.base / (found if found.endswith(".py") else f"{found}.py")


def _train(of: _Reader) -> DataSettings:
    return DataSettings(
        key="runner.train_data_dir",
        path=of.path("train_data_dir"),
        reader=of.script("train_reader_path"),
        batch_size=of.number("train_batch_size", 1),
        threads=of.number("thread_num", 1),
    )


def _infer(of: _Reader) -> DataSettings:
    """What is not given for inference is as for training, except the data."""
    train = _train(of)
    test, infer = of.path("test_data_dir"), of.path("infer_data_dir")
    return DataSettings(
        key="runner.test_data_dir" if infer is None else "runner.infer_data_dir",
        path=infer or test,
        reader=of.script("infer_reader_path") or train.reader,
        batch_size=of.number("infer_batch_size", train.batch_size),
        threads=of.number("infer_thread_num", train.threads),
    )


def _use_inference(of: _Reader, save_path: Path | None) -> bool:
    if of.switch("use_inference") and save_path is None:
        raise BadRequest(
            "runner.use_inference: expected runner.model_save_path with it, which says where to"
            " write, found none"
        )
    return of.switch("use_inference")


def _dump(of: _Reader, *switches: str) -> DumpSettings | None:
    path, fields = of.path("dump_fields_path"), of.names("dump_fields")
    params = of.names("dump_param")
    on = [switch for switch in switches if of.switch(switch)]
    if not on:
        return None
    if path is None or not fields + params:
        raise BadRequest(
            f"runner.{on[0]}: expected dump_fields_path, and dump_fields or dump_param, found none"
        )
    return DumpSettings(path=path, fields=fields, params=params)


# Mode -> the keys of its knobs, and what Strategy calls them.
MODES: dict[str, dict[str, str]] = {
    "sync": {},
    "bounded": {"staleness": "staleness"},
    "async": {},
    "geo": {"geo_step": "k", "geo_cache_bytes": "cache_bytes"},
    "hybrid": {},
}
OPTIONAL_KNOBS = ("cache_bytes",)


def _strategy(of: _Reader) -> Strategy:
    key = "runner.sync_mode"
    fallback = of.config.get("hyper_parameters.optimizer.strategy", "async")
    found = of.config.get(key, fallback)
    if found not in MODES:
        why = f": {LATER_MODES[found]}" if found in LATER_MODES else ""
        raise BadRequest(f"{key}: expected one of {', '.join(MODES)}, found {found!r}{why}")
    knobs = {}
    for name, knob in MODES[found].items():
        if of.has(name):
            knobs[knob] = of.number(name, 1)
        elif knob not in OPTIONAL_KNOBS:
            raise BadRequest(
                f"runner.{name}: expected an integer with sync_mode {found}, found none"
            )
    return Strategy(found, **knobs)


def _reader_type(config: Config) -> str:
    default = "QueueDataset" if "runner.pipe_command" in config else None
    if default is None:
        default = "DataLoader" if "runner.train_reader_path" in config else "QueueDataset"
    found = config.get("runner.reader_type", default)
    if found not in READER_TYPES:
        raise BadRequest(
            f"runner.reader_type: expected one of {', '.join(READER_TYPES)}, found {found!r}"
        )
    return READER_TYPES[found]


def _either(of: _Reader, *keys: str) -> Path | None:
    found: Mapping[str, Any] = {key: of.folder(key) for key in keys}
    given = {key: path for key, path in found.items() if path is not None}
    if len(set(given.values())) > 1:
        raise BadRequest(f"runner.{keys[0]}: expected one place, found {given}")
    return next(iter(given.values()), None)
