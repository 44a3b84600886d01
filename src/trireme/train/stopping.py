"""SIGTERM ends the training of all workers together, after a step and with a checkpoint.

A worker that got the signal reports it with its heartbeat, and the others stop too. In sync its
next push reports it, and all stop after that step (trireme.server.staging): the pull that waits for
the step says so. In other modes each worker stops after its current step.
"""

import logging
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trireme.job.cluster import Cluster

log = logging.getLogger("trireme.train")


@contextmanager
def stopping_on_sigterm(cluster: Cluster) -> Iterator[None]:
    """SIGTERM asks all workers to stop, or this one to leave where workers share out streams. A
    second SIGTERM ends the process.

    Has an effect only in the main thread, and if the script does not handle the signal itself.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def ask(*_: object) -> None:
        # The handler interrupts the main thread wherever it is, with any lock held: do little.
        if not cluster.stop_request.reason:
            # Others can take over its streams, except those of worker 0, which saves.
            cluster.stop_request.is_alone = bool(cluster.num_streams) and cluster.worker != 0
            cluster.stop_request.reason = f"worker {cluster.worker} has got SIGTERM"
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def agreed_reason_to_stop(cluster: Cluster) -> str:
    """Why all workers stop after this epoch; empty: they do not. Every worker calls it."""
    if cluster.client.script.is_behind:  # a predecessor was at this meeting and continued
        return ""
    body = {"stops": "" if cluster.stop_request.is_alone else cluster.stop_request.reason}
    with cluster.client.script.section("stop"):
        replies = cluster.client.coordinator.gather(
            body, [], purpose="whether to stop", patient=True
        )
    return first_reason(reply for reply, _ in replies)


def first_reason(replies: Iterable[Mapping[str, Any]]) -> str:
    """The first non-empty `stops` of workers at a meeting, or empty."""
    return next((str(reply["stops"]) for reply in replies if reply["stops"]), "")
