"""The compute workers that ask when the job is over, and have to be told before a server ends."""

import time

from trireme.protocol.job_limits import WORKERS_MAX
from trireme.rpc import Deferred, Reply, Request

# A deferred answer is given up a little before its deadline (rpc/server.py): what is this close to
# it may have been.
_EARLY_S = 0.5
# One that has not asked again for so long after a deadline is gone.
_GONE_S = 3.0


class EndWaiters:
    """Each asks again and again: its newest question counts. Threads: one at a time."""

    def __init__(self) -> None:
        self._asking: dict[str, tuple[Deferred, float]] = {}  # by name, with the deadline
        self._is_over = False

    def ask(self, request: Request) -> Deferred:
        """The answer comes when the job is over."""
        answer = Deferred(lambda: "workers have not said goodbye yet")
        self._asking.pop(request.peer, None)
        if self._is_over:
            answer.reply(Reply())
            return answer
        self._asking[request.peer] = answer, request.deadline
        if len(self._asking) > WORKERS_MAX:
            del self._asking[next(iter(self._asking))]
        return answer

    def tell(self, is_over: bool) -> None:
        """Answer those that wait, if the job is over."""
        self._is_over = is_over
        if is_over:
            safe = time.monotonic() + _EARLY_S
            for name, (answer, deadline) in list(self._asking.items()):
                if safe < deadline:
                    answer.reply(Reply())
                    del self._asking[name]

    @property
    def are_told(self) -> bool:
        """Whether nobody will ask again."""
        latest = max((deadline for _, deadline in self._asking.values()), default=0.0)
        return time.monotonic() > latest + _GONE_S
