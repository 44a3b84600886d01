"""SIGTERM and SIGINT (Ctrl-C) end the training of all workers together, after a step and with a
checkpoint. So does `DistributedOptimizer.agree_to_stop` in a custom loop, without either.

A worker that got the signal reports it with its heartbeat, and the others stop too. In sync its
next push reports it, and all stop after that step (trireme.server.staging): the pull that waits for
the step says so. In other modes each worker stops after its current step.
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trireme.errors import Stopped
from trireme.job.cluster import Cluster

log = logging.getLogger("trireme.train")

_OWN: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
"""The signals that ask to stop, with Python's own handlers."""
_FOLLOWS = b"training ends after this step; Ctrl-C again interrupts it at once, and saves nothing\n"


@contextmanager
def stopping_on_signals(cluster: Cluster) -> Iterator[None]:
    """SIGTERM and SIGINT ask all workers to stop, or this one to leave where workers share out
    streams. A second one has the effect that it has outside the block. The only worker of a job
    says so at the first Ctrl-C: its step may be long.

    Has an effect only in the main thread, and on signals that the script does not handle itself.
    None on SIGTERM where torchrun ends workers by it, to start all again: they would find the
    request on the servers, and stop with code 0 in the middle of their training.
    """
    request = cluster.stop_request
    is_main = threading.current_thread() is threading.main_thread()
    before = {n: h for n, h in _OWN.items() if is_main and signal.getsignal(n) is h}
    if cluster.ends_at_sigterm and not cluster.is_only_worker:
        before.pop(signal.SIGTERM, None)

    owner = os.getpid()

    def ask(number: int, _: object) -> None:
        # The handler interrupts the main thread wherever it is, with any lock held: do little.
        signal.signal(number, before[number])
        if os.getpid() != owner:  # a forked child: whoever ends it means it alone; at Ctrl-C the
            if number == signal.SIGTERM:  # parent decides, whose loader it may be
                signal.raise_signal(number)
        elif not request.reason:
            # Others can take over its streams, except those of worker 0, which saves.
            request.is_alone = bool(cluster.num_streams) and cluster.worker != 0
            request.reason = f"worker {cluster.worker} has got {signal.Signals(number).name}"
            request.code = 130 if number == signal.SIGINT else 0  # as shells have it
            if number == signal.SIGINT and cluster.is_only_worker:
                # Not sys.stderr, in whose write this signal may have come. A bar may stand before.
                with contextlib.suppress(OSError):  # nobody reads it
                    os.write(2, b"\n" * os.isatty(2) + _FOLLOWS)

    for number in before:
        signal.signal(number, ask)
    try:
        yield
        if before and cluster.is_only_worker and request.reason:  # after the last look at it
            log.warning("%s: the script ends", request.reason)
            raise Stopped(request.reason, request.code)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if before and cluster.is_only_worker:  # a notebook goes on
            request.reason, request.code = "", 0


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
