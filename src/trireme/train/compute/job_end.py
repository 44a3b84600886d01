"""How a compute worker learns that the job is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from trireme.errors import TriremeError, Unavailable
from trireme.job.compute_place import ComputePlace
from trireme.rpc import Call, Reply, RpcClient

PERIOD_S = 2.0


class JobEnd:
    """Asks the coordinator, in a thread, as long as the `with` block runs. The answer comes when
    the job is over, or after a period, so that a coordinator that has gone is noticed.

    end: called once, with the reason; and the error if no coordinator has answered for
        `place.timeout_s`, or it refuses this process.
    """

    def __init__(
        self, place: ComputePlace, end: Callable[[str, TriremeError | None], None]
    ) -> None:
        self._place, self._end = place, end
        self._stop = threading.Event()
        self._client = RpcClient(name=place.name, keys=place.client_keys, on_wait=lambda _: None)
        self._thread = threading.Thread(target=self._watch, name="trireme-job-end", daemon=True)

    def __enter__(self) -> JobEnd:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()

    def _watch(self) -> None:
        address, timeout_s = self._place.coordinator, self._place.timeout_s
        period_s = min(PERIOD_S, timeout_s)
        heard = time.monotonic()
        while not self._stop.is_set():
            is_alive, is_over = self._client.call_all(
                [Call(address, "server.ready"), Call(address, "server.end")],
                timeout_s=period_s,
                return_errors=True,
            )
            if isinstance(is_over, Reply):
                self._end("all workers have left", None)
                return
            if isinstance(is_alive, Reply):
                heard = time.monotonic()
            elif not is_alive.retry:
                self._end("refused", is_alive)
                return
            elif time.monotonic() - heard > timeout_s:
                silence = f"no answer for {timeout_s:g} s: {is_alive}"
                self._end("silence", Unavailable(f"{self._place.name}: {silence}"))
                return
            self._stop.wait(0.0 if isinstance(is_alive, Reply) else 0.1)
