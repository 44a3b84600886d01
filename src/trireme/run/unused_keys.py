"""Warnings for keys of a configuration that have no effect, with the reason."""

import difflib
import logging
import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trireme.config import Config
from trireme.errors import is_file
from trireme.run.runner_keys import RunnerKeys
from trireme.run.settings import DUMP_FOLDERS, DUMP_SWITCHES, reader_type

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
_READER = (
    "runner.reader_type is that of training and inference; --infer with -o"
    " runner.reader_type=DataLoader reads by the class RecDataset of infer_reader_path"
)
_BUCKETS = "a table has 4096 buckets, divided among the servers"
_VOCABULARIES = (
    *("adgroup", "adgroup_id", "age_level", "brand", "btag", "campaign", "campaign_id", "cate"),
    *("cms_group", "cms_group_id", "cms_segid", "customer", "final_gender", "final_gender_code"),
    *("new_user_class_level", "occupation", "pid", "pvalue_level", "shopping_level", "user"),
    *("vocab", "vocab_tag"),
)
_SIZES = (
    *("feature_number", "input_size", "max_context", "max_item", "num_bizs", "num_items"),
    *("num_users", "sparse_feature_num", "sparse_feature_size"),
    *(f"{name}_size" for name in _VOCABULARIES),
)
_LAYOUT = "sparse_inputs_slots and dense_input_dim say what the inputs are"
_PARTS = "the model adds and normalizes as its paper does"
_ROWS = "rows start at random; `trireme convert` makes a checkpoint of rows, to start from"
_DAYS = "it belongs to `trireme stream`, which selects days of data"

# Patterns of keys that PaddleRec reads and Trireme does not: the reason, and the values besides
# False, 0 and "" that need no warning.
_WHY: dict[str, tuple[str, tuple[Any, ...]]] = {
    **{f"runner.{key}": (_ONLINE, ()) for key in _ONLINE_KEYS},
    "runner.days": (_DAYS, ()),
    "runner.pass_per_day": (_DAYS, ()),
    "runner.is_train": ("the command says whether it trains: trireme run, or run --infer", (True,)),
    "runner.infer_reader_type": (_READER, ()),
    "runner.train_reader_type": (_READER, ()),
    "runner.auc_num": ("every metric of the model is printed", ()),
    "runner.inference": ("runner.use_inference: True writes models for inference", ()),
    "runner.use_visual": ("trireme top and /metrics show a running job", ()),
    "runner.use_xpu": ("there are no kernels for XPUs: the CPU computes, or use_gpu", ()),
    "runner.use_npu": ("there are no kernels for NPUs: the CPU computes, or use_gpu", ()),
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
    "hyper_parameters.dict_dim": (_TABLES, ()),
    "hyper_parameters.emb_dim": ("sparse_feature_dim is the width of the rows", ()),
    "hyper_parameters.*_count": (_TABLES, ()),
    **{f"hyper_parameters.{key}": (_TABLES, ()) for key in _SIZES},
    "hyper_parameters.emb_path": (_ROWS, ()),
    **{f"runner.{key}": (_ROWS, ()) for key in ("emb_weight_name", "use_out_vec", "out_vec_path")},
    "hyper_parameters._sent_types": ("sequences are of one kind", ()),
    "hyper_parameters.num_test_user": ("all examples are evaluated", ()),
    "hyper_parameters.is_sparse": ("gradients of rows are always sparse", ()),
    "hyper_parameters.use_sparse": ("gradients of rows are always sparse", ()),
    "hyper_parameters.tower_size": ("the model's docstring has its widths", ()),
    "hyper_parameters.optimizer.gamma": ("Recipe(schedule=) of a model.py changes rates", ()),
    "hyper_parameters.*_optimizer.strategy": ("sync_mode, optimizer.strategy say it", ("async",)),
    "hyper_parameters.slice_end": ("the loss is the mean over all examples of a batch", ()),
    "hyper_parameters.sparse_field_num": (_LAYOUT, ()),
    "hyper_parameters.dense_feature_dim": (_LAYOUT, ()),
    "hyper_parameters.p*process_cmd": (_PARTS, ()),
    "hyper_parameters.reg": ("create() selects the optimizer; tr.optim.FTRL has an l1", ()),
    "hyper_parameters.distributed_embedding": (_TABLES, ()),
    "hyper_parameters.optimizer.decay_*": ("Recipe(schedule=) of a model.py changes rates", ()),
    "hyper_parameters.adam_d2sum": ("create() selects the optimizer; see fleet.AdamD2Sum", ()),
    "table_parameters.*.shard_num": (_BUCKETS, ()),
    "table_parameters.*.compress_in_save": ("checkpoints are not compressed", ()),
    "table_parameters.*.enable_sparse_table_cache": (_TABLES, ()),
    "table_parameters.*.ctr_accessor_param.ssd_unseenday_threshold": (_DISK, (1,)),
    "table_parameters.*.ctr_accessor_param.*_filter_slots": (_SLOTS, ([],)),
}


_NEAR = 0.75  # how alike names are of which one is taken for a slip of the other, 0 to 1
_EVALUATED = "every pass is evaluated before training, with the values of runner.train_*"
_INFER_KEYS = ("data_dir", "batch_size", "reader_path", "thread_num")
_LISTED = "donefile.txt has the place to continue from"

# Keys that say how text is read, and their values that need no warning beside a class RecDataset.
_NOT_OF_READER_CLASSES: dict[str, tuple[Any, ...]] = {
    "pipe_command": (),
    "parse_ins_id": (False,),
    "parse_content": (False,),
    "thread_num": (1,),
    "infer_thread_num": (1,),
}

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
    keys = RunnerKeys(config)
    if keys.get("preload_thread_num") is not None and not keys.switch("prefetch"):
        log.warning("runner.preload_thread_num: no effect: it belongs to prefetch: True")
    for key, why in _NOT_OF_STREAMS.items():
        if (value := config.get(key, None)) and (key, value) != ("runner.epochs", 1):
            log.warning("%s: no effect: %s", key, why)


def warn_of_unused(config: Config) -> None:
    """Log the keys that nothing has read, and those that others make useless. Call it when the
    whole configuration has been read, but for what the readers read: keys that their files name
    are theirs.
    """
    known = config.known()
    readers = "\n".join(_sources(config))
    for key, why in _useless(config):
        log.warning("%s: no effect: %s", key, why)
    for key in config.unread():
        if re.search(rf"""["']{re.escape(key)}["']""", readers):
            continue
        reasons = (reason for pattern, reason in _WHY.items() if fnmatchcase(key, pattern))
        why, nothing = next(reasons, ("", ()))
        if not why:
            log.warning("%s: no effect: nothing reads it%s", key, _hint(key, known))
        elif (value := config.get(key, None)) and value not in nothing:
            log.warning("%s: no effect: %s", key, why)


def _useless(config: Config) -> Iterable[tuple[str, str]]:
    """Keys that are read, but have no effect beside the others; and why."""
    keys = RunnerKeys(config)
    if reader_type(config) == "DataLoader":
        for key, nothing in _NOT_OF_READER_CLASSES.items():
            if (value := keys.get(key)) is not None and value not in nothing:
                yield f"runner.{key}", "the class RecDataset of train_reader_path reads the files"
    else:
        command = keys.text("pipe_command") or ""
        for key in ("train_reader_path", "infer_reader_path"):
            script = keys.script(key)
            if script is not None and script.name not in command:
                yield (
                    f"runner.{key}",
                    "reader_type QueueDataset and InMemoryDataset have pipe_command",
                )
    if all(keys.get(switch) is None for switch in DUMP_SWITCHES):
        for key in ("dump_fields", "dump_param", "dump_fields_path", *DUMP_FOLDERS):
            if keys.get(key):
                yield f"runner.{key}", f"one of {', '.join(DUMP_SWITCHES)} switches dumps on"


def _hint(key: str, known: Collection[str]) -> str:
    """What a key that nothing reads may stand for."""
    section = "table_parameters."
    if key.startswith(section) and not any(name.startswith(section) for name in known):
        return (
            "; a model.py of your own makes its tables: give tr.Table the same there, as ssd=True,"
            " or the arguments of trireme.models.table_parameters.table_options"
        )
    section, dot, name = key.partition(".")
    names = [one.removeprefix(section + dot) for one in known if one.startswith(section + dot)]
    near = difflib.get_close_matches(name, names, n=1, cutoff=_NEAR) if dot else []
    same = (one for one in sorted(known) if one.endswith("." + key.rpartition(".")[2]))
    likely = f"{section}.{near[0]}" if near else next(same, "")  # as of a -o without its section
    return f"; did you mean {likely}?" if likely else ""


def _sources(config: Config) -> Iterable[str]:
    """The text of the files that read the data: classes RecDataset, scripts of pipe_command."""
    keys = RunnerKeys(config)
    scripts = [word for word in (keys.text("pipe_command") or "").split() if word.endswith(".py")]
    readers = [keys.script(f"{part}_reader_path") for part in ("train", "infer")]
    for path in (*map(Path, scripts), *readers):
        if path is not None and is_file(path):
            yield path.read_text(encoding="utf-8", errors="replace")  # Python knows its encoding
