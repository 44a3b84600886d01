"""Keys without an effect are never passed over in silence: each gets a line that says why."""

from __future__ import annotations

import difflib
import logging

from trireme.config import Config

log = logging.getLogger("trireme")

_ONLINE = "training by day and pass comes in a later version; all files are read, in natural order"
_EXPORT = "models for inference come in a later version; model_save_path holds checkpoints"
_TABLES = "tables live on the servers, where there are some, and have no size"
_WHY = {
    "runner.checkpoint_per_pass": _ONLINE,
    "runner.data_donefile": _ONLINE,
    "runner.data_sleep_second": _ONLINE,
    "runner.days": _ONLINE,
    "runner.end_day": _ONLINE,
    "runner.prefetch": _ONLINE,
    "runner.preload_thread_num": _ONLINE,
    "runner.save_delta_frequency": _ONLINE,
    "runner.save_first_base": _ONLINE,
    "runner.shuffle_thread_num": _ONLINE,
    "runner.split_interval": _ONLINE,
    "runner.split_per_pass": _ONLINE,
    "runner.start_day": _ONLINE,
    "runner.train_thread_num": _ONLINE,
    "runner.use_inference": _EXPORT,
    "runner.save_inference_feed_varnames": _EXPORT,
    "runner.save_inference_fetch_varnames": _EXPORT,
    "runner.geo_step": "it belongs to sync_mode geo, which comes in a later version",
    "runner.with_coordinator": "federated training is not supported; server 0 coordinates",
    "runner.local_sparse": _TABLES,
    "runner.remote_sparse": _TABLES,
    "runner.num_workers": "a reader class runs in the process that trains; use more workers",
    "runner.example_count_method": "examples are counted as they are read",
    "hyper_parameters.sparse_feature_number": _TABLES,
    "hyper_parameters.distributed_embedding": _TABLES,
    "hyper_parameters.adam_d2sum": "Adam is Adam; its variant d2sum is not supported",
}


def warn_of_unused(config: Config) -> None:
    """Log the keys that nothing has read, once everything has been; near names may be meant.

    Keys of _WHY whose value asks for nothing (False, 0, "") are passed over.
    """
    known = config.known()
    for key in config.unread():
        if key not in _WHY:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            log.warning("%s: no effect: nothing reads it%s", key, hint)
        elif config.get(key, None):
            log.warning("%s: no effect: %s", key, _WHY[key])
