"""Keys without an effect are never passed over in silence: each gets a line that says why."""

from __future__ import annotations

import difflib
import logging

from trireme.config import Config

log = logging.getLogger("trireme")

_ONLINE = "training by day and pass comes in a later version; all files are read, in natural order"
_EXPORT = "models for inference come in a later version; model_save_path holds checkpoints"
_LATER = {
    **dict.fromkeys(
        (
            "checkpoint_per_pass",
            "data_donefile",
            "data_sleep_second",
            "days",
            "end_day",
            "need_infer_dump",
            "need_train_dump",
            "prefetch",
            "preload_thread_num",
            "save_delta_frequency",
            "save_first_base",
            "shuffle_thread_num",
            "split_interval",
            "split_per_pass",
            "start_day",
            "train_thread_num",
        ),
        _ONLINE,
    ),
    **dict.fromkeys(
        ("use_inference", "save_inference_feed_varnames", "save_inference_fetch_varnames"), _EXPORT
    ),
    "geo_step": "it belongs to sync_mode geo, which comes in a later version",
    "with_coordinator": "federated training is not supported; server 0 hosts the coordinator",
    "local_sparse": "all sparse tables live on servers",
    "remote_sparse": "all sparse tables live on servers",
    "example_count_method": "examples are counted as they are read",
}


def warn_of_unused(config: Config) -> None:
    """Log the keys that nothing has read, once everything has been; near names may be meant."""
    for key in (f"runner.{name}" for name in _LATER):
        if config.get(key, None):
            log.warning("%s: no effect: %s", key, _LATER[key.removeprefix("runner.")])
    for key in config.unread():
        near = difflib.get_close_matches(key, config.known(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        log.warning("%s: no effect: nothing reads it%s", key, hint)
