"""The end of training at SIGTERM: after a step, with a checkpoint, for all workers together.

A worker that was told says so with its signs of life; others do then as it does. In sync that is:
its next push says so, and all stop after that step (trireme.server.staging); the pull that waits
for the step reports it. Elsewhere each worker stops after the step that it is making.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trireme.job.cluster import Cluster
from trireme.worker.client import Pulled

log = logging.getLogger("trireme.train")


@contextmanager
def stopping_on_sigterm(cluster: Cluster) -> Iterator[None]:
    """SIGTERM asks all workers to stop, or where they share out streams this one to leave; a second
    one ends this process as if nobody heeded it.

    Only in the main thread, and not if the script heeds the signal itself.
    """
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not is_ours:
        yield
        return

    def ask(*_: object) -> None:
        # Whatever the main thread was doing, locks included, waits for this: it must do little.
        if not cluster.stop_request.reason:
            # Others can go on for it, but for worker 0, which saves.
            cluster.stop_request.is_alone = bool(cluster.num_streams) and cluster.worker != 0
            cluster.stop_request.reason = f"worker {cluster.worker} has got SIGTERM"
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def is_told_to_stop(pulled: Pulled, last_step: int, cluster: Cluster) -> bool:
    """Whether all workers of a sync job stop behind the last step that this one has made; why, it
    knows then, too.
    """
    if pulled.stop is None or pulled.stop.step > last_step:
        return False
    cluster.stop_request.reason = cluster.stop_request.reason or pulled.stop.reason
    return True


def agreed_to_stop(cluster: Cluster) -> str:
    """Why all workers stop here, or empty. Every worker calls it, at the end of an epoch that may
    have been cut short.
    """
    if cluster.client.script.is_behind:  # a predecessor was here, and has gone on
        return ""
    mine = {"stops": "" if cluster.stop_request.is_alone else cluster.stop_request.reason}
    with cluster.client.script.section("stop"):
        met = cluster.client.gather(mine, [], purpose="whether to stop", patient=True)
    return reason_among(body for body, _ in met)


def reason_among(met: Iterable[Mapping[str, Any]]) -> str:
    """The first reason to stop, `stops`, that workers have brought to a meeting, or empty."""
    return next((str(body["stops"]) for body in met if body["stops"]), "")
