"""The coordinator's counter of saves, and which checkpoints the next delta will follow.

Version v is the number of a save; rows changed after it began are stamped v + 1 or more. A delta
has every change since some version, so it may be loaded on top of any checkpoint of this run
saved since then. It begins where the last base or delta was; where there was none, at the last
full checkpoint.

Exports for inference have chains of their own: a delta follows one export, whose version is kept
here, and in checkpoints, until the next one follows it. A run that resumes from a checkpoint knows
only the exports of that checkpoint: later ones belong to another history.
"""

from collections.abc import Mapping
from typing import Any

from trireme.errors import BadRequest
from trireme.protocol.wire import VERSION_MAX, need, need_name, need_version
from trireme.rpc import Reply, Request

CHAIN_MAX = 4096
INFERENCE = "inference:"
"""Prefix of exports for inference in the chain of a checkpoint."""
FOLLOWED_MAX = 16
ID_CHARS_MAX = 64


class SaveVersions:
    """The fields are those of the kept state.

    chain: id -> version of what the next delta may follow. inference: version of each export, by
    id. loaded: the id of the checkpoint that was loaded. model: counts loads and new models: rows
    of one count belong together.
    """

    def __init__(self) -> None:
        self.version = 1
        self.chain: dict[str, int] = {}
        self.has_base = False
        self.loaded: str | None = None
        self.inference: dict[str, int] = {}
        self.model = 0

    def state(self) -> dict[str, Any]:
        return vars(self)

    def install(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)

    def handlers(self) -> dict[str, Any]:
        return {
            "coord.export": self._on_export,
            "coord.published": self._on_published,
            "coord.chain": lambda _: Reply({"loaded": self.loaded, "model": self.model}),
        }

    def _on_export(self, request: Request) -> Reply:
        """A save begins: its version, and the chain that it is part of."""
        mode = need(request.body, "mode", str)
        if mode == "inference":
            return self._begin_inference(need(request.body, "follows", str))
        if mode == "delta" and not self.chain:
            raise BadRequest(
                "save: expected a full or base checkpoint before the first delta, found none"
            )
        version = self._next_version()
        continues = mode == "delta" or (mode in ("full", "batch") and self.has_base)
        chain = dict(self.chain) if continues else {}
        if mode in ("full", "batch"):
            chain |= {f"{INFERENCE}{id}": at for id, at in self.inference.items()}
        return Reply({"version": version, "chain": chain, "model": self.model})

    def _next_version(self) -> int:
        if self.version > VERSION_MAX:
            raise BadRequest(f"save: expected at most {VERSION_MAX} saves of a run")
        version, self.version = self.version, self.version + 1
        return version

    def _begin_inference(self, follows: str) -> Reply:
        """follows: the id of the export that a delta continues from; empty for a base."""
        if follows and follows not in self.inference:
            raise BadRequest(
                "export_model: expected a delta that follows the last export of this run,"
                f" {sorted(self.inference) or 'of which there is none'}, found one that follows"
                f" {follows}; a load forgets the exports that were written after its checkpoint;"
                " write a base"
            )
        since = self.inference.get(follows, 0)
        return Reply({"version": self._next_version(), "since": since, "forget": self._forget()})

    def _forget(self) -> int:
        """The version whose removed keys no delta asks for any more."""
        return min([*self.chain.values(), *self.inference.values()], default=0)

    def _on_published(self, request: Request) -> Reply:
        """A save has been published; returns the version whose removed keys may be forgotten."""
        body = request.body
        id, mode = need_name(body, "id", ID_CHARS_MAX), need(body, "mode", str)
        version = need_version(body, "version")
        if mode == "inference":
            self.inference.pop(need(body, "follows", str), None)
            self.inference[id] = version
            while len(self.inference) > FOLLOWED_MAX:
                del self.inference[min(self.inference, key=self.inference.__getitem__)]
        elif version >= min(self.chain.values(), default=0):
            chain, _ = _split_chain(need(body, "chain", dict))
            self._publish(id, mode, version, continues=bool(chain))
        return Reply({"forget": self._forget()})

    def _publish(self, id: str, mode: str, version: int, *, continues: bool) -> None:
        if mode in ("base", "delta"):
            # What was saved since then, at the same time as this one, may be followed too.
            newer = {other: at for other, at in self.chain.items() if at > version}
            self.chain, self.has_base = {id: version, **newer}, True
        elif mode in ("full", "batch"):
            if not continues or len(self.chain) >= CHAIN_MAX:  # nobody saves deltas any more
                self.chain, self.has_base = {}, False
            self.chain[id] = version

    def begin_anew(self) -> None:
        """Rows are gone that no delta removes, so none follows what was saved or loaded."""
        self.chain, self.has_base, self.loaded, self.inference = {}, False, None, {}
        self.model += 1

    def note_loaded(self, body: Mapping[str, Any]) -> None:
        """A checkpoint is loaded. If whole, the run continues from it; if in part, a new run
        begins, and no delta follows.
        """
        version, whole = need_version(body, "version"), need(body, "whole", bool)
        chain, inference = dict[str, int](), dict[str, int]()
        id, mode = None, ""
        if whole:
            chain, inference = _split_chain(need(body, "chain", dict))
            id, mode = need_name(body, "id", ID_CHARS_MAX), need(body, "mode", str)
        self.version, self.model = max(self.version, version + 1), self.model + 1
        self.has_base = bool(chain) or mode in ("base", "delta")
        self.loaded, self.inference = id, inference
        self.chain = chain if id is None else {**chain, id: version}


def _split_chain(chain: Mapping[Any, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """The checkpoints of a chain, and the exports for inference in it."""
    checkpoints, exports = dict[str, int](), dict[str, int]()
    for id, version in chain.items():
        is_id = isinstance(id, str) and len(id.removeprefix(INFERENCE)) <= ID_CHARS_MAX
        if not is_id or type(version) is not int or not 0 <= version <= VERSION_MAX:
            raise BadRequest(f"chain: expected versions by id, found {id!r}: {version!r}"[:200])
        if id.startswith(INFERENCE):
            exports[id.removeprefix(INFERENCE)] = version
        else:
            checkpoints[id] = version
    return checkpoints, exports
