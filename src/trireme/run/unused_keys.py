"""Warnings for keys of a configuration that have no effect, with the reason."""

import difflib
import logging
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any

from trireme.config import Config

log = logging.getLogger("trireme")

_ONLINE = "it belongs to `trireme stream`; `trireme run` reads all files, in natural order"
_ONLINE_KEYS = (
    "checkpoint_keep", "checkpoint_per_pass", "data_donefile", "data_sleep_second",
    "data_timeout_second", "end_day", "prefetch", "preload_thread_num", "save_delta_frequency",
    "save_first_base", "split_interval", "split_per_pass", "start_day",
)  # fmt: skip
_THREADS = "runner.thread_num threads read, shuffle and make batches; torch's own threads train"
_EXPORT = "an exported model has all inputs that it reads and all outputs that it returns"
_TABLES = "tables are on the servers, if there are any, and have no fixed size"
_DISK = "of an SSDSparseTable the rows used least leave memory, when it is full, not by age"
_SLOTS = "rows of all slots are loaded and saved; tables=[...] selects tables"
_BUCKETS = "a table has 4096 buckets, divided among the servers"

# Patterns of keys that PaddleRec reads and Trireme does not: the reason, and the values besides
# False, 0 and "" that need no warning.
_WHY: dict[str, tuple[str, tuple[Any, ...]]] = {
    **{f"runner.{key}": (_ONLINE, ()) for key in _ONLINE_KEYS},
    "runner.days": ("runner.start_day and end_day of `trireme stream` select the days", ()),
    "runner.shuffle_thread_num": (_THREADS, ()),
    "runner.train_thread_num": (_THREADS, ()),
    "runner.save_inference_*": (_EXPORT, ()),
    "runner.staleness": ("it belongs to sync_mode bounded", ()),
    "runner.geo_step": ("it belongs to sync_mode geo", ()),
    "runner.geo_cache_bytes": ("it belongs to sync_mode geo", ()),
    "runner.with_coordinator": ("federated training is not supported; server 0 coordinates", ()),
    "runner.local_sparse": (_TABLES, ()),
    "runner.remote_sparse": (_TABLES, ()),
    "runner.num_workers": ("a reader class runs in the process that trains; use more workers", ()),
    "runner.example_count_method": ("examples are counted as they are read", ()),
    "hyper_parameters.sparse_feature_number": (_TABLES, ()),
    "hyper_parameters.distributed_embedding": (_TABLES, ()),
    "hyper_parameters.adam_d2sum": ("create() selects the optimizer; see fleet.AdamD2Sum", ()),
    "table_parameters.*.shard_num": (_BUCKETS, ()),
    "table_parameters.*.compress_in_save": ("checkpoints are not compressed", ()),
    "table_parameters.*.enable_sparse_table_cache": (_TABLES, ()),
    "table_parameters.*.ctr_accessor_param.ssd_unseenday_threshold": (_DISK, (1,)),
    "table_parameters.*.ctr_accessor_param.*_filter_slots": (_SLOTS, ([],)),
}


_EVALUATED = "every pass is evaluated before training, with the values of runner.train_*"
_INFER_KEYS = ("data_dir", "batch_size", "reader_path", "thread_num")
_LISTED = "donefile.txt has the place to continue from"

# Keys of `trireme run` that a stream reads but does not need.
_NOT_OF_STREAMS = {
    "runner.epochs": "every pass is trained on once",
    "runner.test_data_dir": _EVALUATED,
    **{f"runner.infer_{key}": _EVALUATED for key in _INFER_KEYS},
    **{f"runner.infer_{key}": _LISTED for key in ("load_path", "start_epoch", "end_epoch")},
    "runner.use_inference": "base and deltas are written as save_delta_frequency says",
}


def warn_of_unused_in_stream(config: Config) -> None:
    """As warn_of_unused, and for the keys that only `trireme run` needs."""
    warn_of_unused(config)
    for key, why in _NOT_OF_STREAMS.items():
        if (value := config.get(key, None)) and (key, value) != ("runner.epochs", 1):
            log.warning("%s: no effect: %s", key, why)


def warn_of_unused(config: Config) -> None:
    """Log the keys that nothing has read. Call it when the whole configuration has been read."""
    known = config.known()
    for key in config.unread():
        reasons = (reason for pattern, reason in _WHY.items() if fnmatchcase(key, pattern))
        why, nothing = next(reasons, ("", ()))
        if not why:
            log.warning("%s: no effect: nothing reads it%s", key, _hint(key, known))
        elif (value := config.get(key, None)) and value not in nothing:
            log.warning("%s: no effect: %s", key, why)


def _hint(key: str, known: Collection[str]) -> str:
    """What a key that nothing reads may stand for."""
    section = "table_parameters."
    if key.startswith(section) and not any(name.startswith(section) for name in known):
        return (
            "; a model.py of your own makes its tables: give tr.Table the same there, as ssd=True,"
            " or the arguments of trireme.models.table_parameters.table_options"
        )
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
