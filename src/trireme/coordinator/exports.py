"""The coordinator's counter of saves, and which checkpoints the next delta will follow.

Version v is the number of a save; rows changed after it began are stamped v + 1 or more. A delta
has every change since some version, so it may be loaded on top of any checkpoint of this run
saved since then. It begins where the last base or delta was; where there was none, at the last
full checkpoint.

Exports for inference have chains of their own: a delta follows one export, whose version is kept
here, and in checkpoints, until the next one follows it. A run that resumes from a checkpoint knows
only the exports of that checkpoint: later ones belong to another history.

Not thread-safe: the coordinator locks.
"""

from collections.abc import Mapping
from typing import Any

from trireme.errors import BadRequest
from trireme.protocol.wire import VERSION_MAX, need, need_version
from trireme.rpc import Reply, Request

CHAIN_MAX = 4096
INFERENCE = "inference:"
"""Prefix of exports for inference in the chain of a checkpoint."""
FOLLOWED_MAX = 16


class Exports:
    def __init__(self) -> None:
        self._version = 1
        self._chain: dict[str, int] = {}  # id -> version of what the next delta may follow
        self._has_base = False
        self._loaded: str | None = None
        self._inference: dict[str, int] = {}  # id of an export -> its version

    def state(self) -> dict[str, Any]:
        """In msgpack's types."""
        return {
            "version": self._version,
            "chain": dict(self._chain),
            "has_base": self._has_base,
            "loaded": self._loaded,
            "inference": dict(self._inference),
        }

    def install(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self._version, self._has_base = state["version"], state["has_base"]
        self._chain, self._inference = dict(state["chain"]), dict(state["inference"])
        self._loaded = state["loaded"]

    def handlers(self) -> dict[str, Any]:
        """Methods by their names on the wire."""
        return {
            "coord.export": self._on_export,
            "coord.published": self._on_published,
            "coord.loaded": self._on_loaded,
            "coord.chain": self._on_chain,
        }

    def _on_export(self, request: Request) -> Reply:
        """A save begins: its version, and the chain that it is part of."""
        mode = need(request.body, "mode", str)
        if mode == "inference":
            return self._begin_inference(need(request.body, "follows", str))
        if mode == "delta" and not self._chain:
            raise BadRequest(
                "save: expected a full or base checkpoint before the first delta, found none"
            )
        version = self._next_version()
        continues = mode == "delta" or (mode in ("full", "batch") and self._has_base)
        chain = dict(self._chain) if continues else {}
        if mode in ("full", "batch"):
            chain |= {f"{INFERENCE}{id}": at for id, at in self._inference.items()}
        return Reply({"version": version, "chain": chain})

    def _next_version(self) -> int:
        if self._version > VERSION_MAX:
            raise BadRequest(f"save: expected at most {VERSION_MAX} saves of a run")
        version, self._version = self._version, self._version + 1
        return version

    def _begin_inference(self, follows: str) -> Reply:
        """follows: the id of the export that a delta goes on from; empty for a base."""
        if follows and follows not in self._inference:
            raise BadRequest(
                "export_model: expected a delta that follows the last export of this run,"
                f" {sorted(self._inference) or 'of which there is none'}, found one that follows"
                f" {follows}; write a base"
            )
        since = self._inference.get(follows, 0)
        return Reply({"version": self._next_version(), "since": since, "forget": self._forget()})

    def _forget(self) -> int:
        """The version whose removed keys no delta asks for any more."""
        return min([*self._chain.values(), *self._inference.values()], default=0)

    def _on_published(self, request: Request) -> Reply:
        """A save has been published; returns the version whose removed keys may be forgotten."""
        body = request.body
        id, mode = need(body, "id", str), need(body, "mode", str)
        version = need_version(body, "version")
        if mode == "inference":
            self._inference.pop(need(body, "follows", str), None)
            self._inference[id] = version
            while len(self._inference) > FOLLOWED_MAX:
                del self._inference[min(self._inference, key=self._inference.__getitem__)]
        elif version >= min(self._chain.values(), default=0):
            chain, _ = _split_chain(need(body, "chain", dict))
            self._publish(id, mode, version, continues=bool(chain))
        return Reply({"forget": self._forget()})

    def _publish(self, id: str, mode: str, version: int, *, continues: bool) -> None:
        if mode in ("base", "delta"):
            # What was saved since then, at the same time as this one, may be followed too.
            newer = {other: at for other, at in self._chain.items() if at > version}
            self._chain, self._has_base = {id: version, **newer}, True
        elif mode in ("full", "batch"):
            if not continues or len(self._chain) >= CHAIN_MAX:  # nobody saves deltas any more
                self._chain, self._has_base = {}, False
            self._chain[id] = version

    def _on_loaded(self, request: Request) -> Reply:
        """A checkpoint has been loaded, whole: the run goes on from it. Or a part: a new one
        begins, which no delta follows. Returns the version that rows are stamped with from now on.
        """
        body = request.body
        version = need_version(body, "version")
        self._version = max(self._version, version + 1)
        self._chain, self._has_base, self._loaded, self._inference = {}, False, None, {}
        if need(body, "whole", bool):
            chain, self._inference = _split_chain(need(body, "chain", dict))
            self._loaded = need(body, "id", str)
            self._chain = dict(chain)
            self._chain[self._loaded] = version
            self._has_base = bool(chain) or need(body, "mode", str) in ("base", "delta")
        return Reply({"version": self._version})

    def _on_chain(self, request: Request) -> Reply:
        """What has been loaded: the id of the checkpoint, nil for none."""
        del request
        return Reply({"loaded": self._loaded})


def _split_chain(chain: Mapping[Any, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """The checkpoints of a chain, and the exports for inference in it."""
    checkpoints, exports = dict[str, int](), dict[str, int]()
    for id, version in chain.items():
        if not isinstance(id, str) or type(version) is not int or not 0 <= version <= VERSION_MAX:
            raise BadRequest(f"chain: expected versions by id, found {id!r}: {version!r}"[:200])
        if id.startswith(INFERENCE):
            exports[id.removeprefix(INFERENCE)] = version
        else:
            checkpoints[id] = version
    return checkpoints, exports
