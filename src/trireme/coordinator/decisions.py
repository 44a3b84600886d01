"""Whether imports and loads that all servers prepared take place: the first that asks decides."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trireme.protocol.wire import need
from trireme.rpc import Reply, Request

KEPT_MAX = 256


class Decisions:
    """The newest decisions, by id. A server prepares one when it has ended the one before, so older
    ones are of no use. note_loaded: is called with the checkpoint of a load that takes place.
    """

    def __init__(self, note_loaded: Callable[[Mapping[str, Any]], None]) -> None:
        self._note_loaded = note_loaded
        self._commits: dict[str, bool] = {}

    def state(self) -> list[list[str | bool]]:
        return [[id, commit] for id, commit in self._commits.items()]

    def install(self, state: Iterable[tuple[str, bool]]) -> None:
        self._commits = dict(state)

    def on_decide(self, request: Request) -> Reply:
        """The decision, which is `commit` where there is none yet."""
        id, commit = need(request.body, "id", str), need(request.body, "commit", bool)
        if commit and id not in self._commits and "loaded" in request.body:
            self._note_loaded(need(request.body, "loaded", dict))
        return Reply({"commit": self.decide(id, commit=commit)})

    def decide(self, id: str, *, commit: bool) -> bool:
        """See `on_decide`."""
        commit = self._commits.setdefault(id, commit)
        while len(self._commits) > KEPT_MAX:
            del self._commits[next(iter(self._commits))]
        return commit
