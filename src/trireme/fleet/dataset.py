"""Fleet's datasets: made empty, then configured by `init` and `set_filelist`.

    dataset = fleet.InMemoryDataset()
    dataset.init(batch_size=512, thread_num=4, schema=schema, pipe_command="python reader.py")
    dataset.set_filelist(fleet.util.get_file_shard(files))
    dataset.load_into_memory()
    dataset.global_shuffle(fleet)
    fleet.train_from_dataset(trainer, dataset)

The list is this worker's own: the worker reads all of it.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from trireme import data
from trireme.errors import BadRequest, NotReady, check_counts, check_flags, check_kind
from trireme.fleet.days import seconds_of_day
from trireme.fleet.fs_client import fs_client_options
from trireme.fleet.program import fields_of
from trireme.fleet.ps_gpu import PSGPU
from trireme.job.cluster import Cluster
from trireme.job.default import default

log = logging.getLogger("trireme.fleet")

# Settings of Fleet without a meaning here: the value that is accepted, and why no other is.
WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "input_type": (0, "a line is an example; batches in lines are not read"),
    "download_cmd": ("cat", "files are read where they are; give pipe_command"),
    "queue_num": (-1, "every worker has one stream"),
    "data_feed_type": (None, "the schema's format says how text is read"),
    "merge_size": (-1, "examples of one line id are not merged"),
    "fleet_send_batch_size": (1024, "a shuffle sends what fits into a message"),
    "fleet_send_sleep_seconds": (0, "a shuffle waits for its receivers"),
}
# The type of a setting, and the words for it.
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "batch_size": (int, "an integer >= 1"),
    "thread_num": (int, "an integer >= 1"),
    "use_var": ((list, tuple), "a list of fields, variables or names"),
    "pipe_command": ((str, type(None)), "a shell command"),
    "fs_name": ((str, type(None)), "text such as hdfs://HOST:PORT"),
    "fs_ugi": ((str, type(None)), "text such as USER,PASSWORD"),
    "parse_ins_id": (bool, "True or False"),
    "parse_content": (bool, "True or False"),
    "seed": (int, "an integer"),
}
_DEFAULTS: dict[str, Any] = {
    "batch_size": 1,
    "thread_num": 1,
    "use_var": (),
    "schema": None,
    "pipe_command": "cat",
    "fs_name": "",
    "fs_ugi": "",
    "parse_ins_id": False,
    "parse_content": False,
    "seed": 0,
}


class _FleetDataset:
    """What both datasets share."""

    _kind: type[Any]
    own_files = True
    uses_ps_gpu = False

    def __init__(self) -> None:
        self._settings = dict(_DEFAULTS)
        self._files: list[str] | None = None
        self._made: Any = None
        self._released_example: data.Batch | None = None
        self._has_warned = False
        self.data_time = 0

    def init(self, **settings: Any) -> None:
        """Set what to read.

        Args:
            batch_size: examples per batch. Default 1.
            thread_num: reader threads. Default 1.
            use_var: the fields of MultiSlot text in their order: as trireme.data.Label("click"), as
                static.data declares them, or as names of the label and the features of the model
                that `minimize` was called for.
            schema: instead of use_var, a schema, with any text format.
            pipe_command: a shell command that gets each file on stdin. Default "cat": files are
                read as they are.
            fs_name, fs_ugi: hdfs://HOST:PORT and its user, for remote files.
            parse_ins_id, parse_content: an id, and a text, stand before the fields of use_var.
            seed: of shuffles.

        Raises:
            BadRequest: an unknown setting, one of another type, or one of Fleet's without an effect
                here. None has changed then.
        """
        for name, value in settings.items():
            if name in WITHOUT_EFFECT:
                nothing, why = WITHOUT_EFFECT[name]
                if value != nothing:
                    raise BadRequest(
                        f"{self._name}.init: expected {name}={nothing!r}, found {value!r}: {why}"
                    )
            elif name not in _DEFAULTS:
                raise BadRequest(
                    f"{self._name}.init: expected settings of {', '.join(_DEFAULTS)}, found {name}"
                )
            elif name in _KINDS:
                check_kind(f"{self._name}.init", name, value, *_KINDS[name])
        self._settings |= {name: value for name, value in settings.items() if name in _DEFAULTS}
        self._made = self._released_example = None

    def update_settings(self, **settings: Any) -> None:
        """Change settings of `init`; loaded data is dropped."""
        self.init(**settings)

    def set_batch_size(self, batch_size: int) -> None:
        self.init(batch_size=batch_size)

    def set_thread(self, thread_num: int) -> None:
        self.init(thread_num=thread_num)

    def set_use_var(self, var_list: Sequence[Any]) -> None:
        self.init(use_var=var_list)

    def set_pipe_command(self, pipe_command: str) -> None:
        self.init(pipe_command=pipe_command)

    def set_hdfs_config(self, fs_name: str, fs_ugi: str) -> None:
        self.init(fs_name=fs_name, fs_ugi=fs_ugi)

    def set_parse_ins_id(self, parse_ins_id: bool) -> None:
        self.init(parse_ins_id=parse_ins_id)

    def set_parse_content(self, parse_content: bool) -> None:
        self.init(parse_content=parse_content)

    def set_filelist(self, filelist: Sequence[str]) -> None:
        """Set the files of this worker, in reading order. []: it has none, with a warning."""
        what = f"{self._name}.set_filelist"
        check_kind(what, "filelist", filelist, (list, tuple), "a list")
        for file in filelist:
            check_kind(what, "files", file, (str, os.PathLike), "paths")
        self._files, self._made = list(filelist), None

    def compare_files(self, cluster: Cluster) -> None:
        """Have worker 0 warn, once, of workers with the same files; every worker calls it."""
        if cluster.num_workers == 1:
            return
        are_same = cluster.client.coordinator.compare_files(self.cut)
        same = [worker for worker, is_same in enumerate(are_same) if is_same]
        if cluster.worker == 0 and self._files and len(same) > 1 and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s.set_filelist: workers %s each read all of the same %d files, so that every"
                " example is trained on %d times; fleet.util.get_file_shard(files) divides them",
                self._name, ", ".join(map(str, same)), len(self._files), len(same),
            )  # fmt: skip

    def __iter__(self) -> Iterator[data.Batch]:
        return iter(self.stream(0, 1))

    def stream(
        self, index: int, num_streams: int, *, start: tuple[int, ...] | None = None, epoch: int = 0
    ) -> Any:
        """The batches of this worker's files; see data.QueueDataset.stream."""
        return self._dataset().stream(index, num_streams, start=start, epoch=epoch)

    @property
    def cut(self) -> str:
        """See data.QueueDataset.cut."""
        return str(self._dataset().cut)

    @property
    def schema(self) -> data.Schema:
        """The schema of the files."""
        settings = self._settings
        fields, schema = fields_of(settings["use_var"]), settings["schema"]
        if (schema is None) == (not fields):
            raise BadRequest(
                f"{self._name}.init: expected use_var or schema, found both or neither"
            )
        front: list[Any] = [data.InsId()] if settings["parse_ins_id"] else []
        front += [data.Content()] if settings["parse_content"] else []
        if isinstance(schema, data.Schema):
            if schema.format is not None:
                if front:
                    raise BadRequest(
                        f"{self._name}.init: expected parse_ins_id and parse_content with use_var,"
                        f" found {schema}"
                    )
                return schema
            fields = list(schema.fields)
        return data.multislot([*front, *fields])

    @property
    def _name(self) -> str:
        return f"fleet.{type(self).__name__}"

    def _dataset(self) -> Any:
        if self._made is None:
            if self._files is None:
                raise NotReady(f"{self._name}: expected set_filelist() first")
            self._made = self._kind(**self._arguments(self._files))
        return self._made

    def _arguments(self, filelist: Sequence[str]) -> dict[str, Any]:
        settings = self._settings
        user = str(settings["fs_ugi"]).partition(",")[0]
        prefix, options = fs_client_options(uri=settings["fs_name"], user=user)
        files = [
            file if not prefix or "://" in file else f"{prefix}/{file.lstrip('/')}"
            for file in filelist
        ]
        command = settings["pipe_command"]
        return {
            "paths": files,
            "schema": self.schema,
            "batch_size": settings["batch_size"],
            "threads": settings["thread_num"],
            "own_files": True,
            "storage_options": options or None,
            "pipe_command": None if command == "cat" else command,
        }


class QueueDataset(_FleetDataset):
    """Streams the files, with bounded memory."""

    _kind = data.QueueDataset

    def _set_use_ps_gpu(self, use_ps_gpu: bool) -> None:
        if use_ps_gpu:
            raise BadRequest(
                f"{self._name}._set_use_ps_gpu: expected a fleet.InMemoryDataset, whose keys are"
                " known before a pass; or Trainer.in_window for a stream"
            )


class InMemoryDataset(_FleetDataset):
    """Reads the files into memory, where they can be shuffled; methods without a description are as
    in trireme.data.InMemoryDataset.
    """

    _kind = data.InMemoryDataset

    def _init_distributed_settings(self, **settings: Any) -> None:
        """Fleet's name for more settings of `init`. Ignores fea_eval and candidate_size."""
        ignored = ("fea_eval", "candidate_size")
        self.init(**{name: value for name, value in settings.items() if name not in ignored})

    def _set_use_ps_gpu(self, use_ps_gpu: bool) -> None:
        """Whether it is trained in passes of fleet.PSGPU; once loaded, the next one is over it.
        Raises BadRequest: not a bool.
        """
        if use_ps_gpu not in (False, True):
            raise BadRequest(f"{self._name}._set_use_ps_gpu: expected a bool, found {use_ps_gpu!r}")
        self.uses_ps_gpu = bool(use_ps_gpu)

    def _note_loaded(self) -> None:
        if self.uses_ps_gpu:
            PSGPU().set_dataset(self)

    def _arguments(self, filelist: Sequence[str]) -> dict[str, Any]:
        return {**super()._arguments(filelist), "seed": self._settings["seed"]}

    def set_date(self, date: str) -> None:
        """Set the day (UTC) of the data and of the rows that it trains, as "20190720".

        Raises:
            BadRequest: no such day, or one before 1970 or after 2105.
        """
        self.data_time = seconds_of_day(f"{self._name}.set_date", date)

    def load_into_memory(self, is_shuffle: bool = False) -> None:
        """Read all files; `is_shuffle`: then shuffle the examples."""
        check_flags(f"{self._name}.load_into_memory", is_shuffle=is_shuffle)
        self._dataset().load_into_memory(is_shuffle)
        self._note_loaded()

    def preload_into_memory(self, thread_num: int | None = None) -> None:
        if thread_num is not None:
            check_counts(f"{self._name}.preload_into_memory", thread_num=thread_num)
        self._dataset().preload_into_memory(thread_num)

    def wait_preload_done(self) -> None:
        self._dataset().wait_preload_done()
        self._note_loaded()

    def local_shuffle(self) -> None:
        self._dataset().local_shuffle()

    def global_shuffle(
        self, fleet: Any = None, thread_num: int = 12, *, by_ins_id: bool = False
    ) -> None:
        """Shuffle the examples of all workers; every worker calls it.

        Args:
            fleet, thread_num: Fleet's; without effect.
            by_ins_id: the examples of one ins_id go to one worker.
        """
        self._dataset().global_shuffle(by_ins_id=by_ins_id)

    def slots_shuffle(self, slots: Sequence[str]) -> None:
        """Shuffle the values of these features among the examples."""
        self._dataset().slots_shuffle(slots)

    def release_memory(self) -> None:
        """Drop the examples and free their memory, but for the first batch: `save_inference_model`
        may still need an example.
        """
        self._released_example = self.example()
        self._dataset().release_memory()

    def example(self) -> data.Batch | None:
        """The first batch, also after `release_memory`; None: nothing has been loaded since `init`
        or other settings, with which examples may have other columns.
        """
        if self._made is None or not self._made.get_memory_data_size():
            return self._released_example
        return next(iter(self._made), None)

    def get_memory_data_size(self, fleet: Any = None) -> int:
        """Number of loaded examples of this worker, or with `fleet` of all."""
        return int(self._dataset().get_memory_data_size(None if fleet is None else default()))

    def get_shuffle_data_size(self, fleet: Any = None) -> int:
        """Number of examples after a shuffle, of this worker, or with `fleet` of all."""
        return int(self._dataset().get_shuffle_data_size(None if fleet is None else default()))


class DatasetFactory:
    """How older scripts make a dataset: by the name of its class."""

    def create_dataset(
        self, datafeed_class: str = "QueueDataset"
    ) -> QueueDataset | InMemoryDataset:
        """Raises BadRequest: another class."""
        for kind in (QueueDataset, InMemoryDataset):
            if kind.__name__ == datafeed_class:
                return kind()
        raise BadRequest(
            "DatasetFactory.create_dataset: expected 'QueueDataset' or 'InMemoryDataset', found"
            f" {datafeed_class!r}"
        )
