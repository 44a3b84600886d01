"""The methods of a server for checkpoints: operations are started, watched and stopped.

A load has two phases on all servers. `prepare` records where the checkpoint is; from then on the
server needs the coordinator's decision, and is not ready for other calls. `load` reads it, as often
as it takes: a server that was killed meanwhile, or whose disk was full, begins again.
"""

import math
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from trireme.checkpoint.format.manifest import (
    MEMORY_PER_BYTE,
    CheckpointManifest,
    manifest_size,
    read_manifest,
)
from trireme.checkpoint.server_side.load import CheckpointLoad, LoadPlan
from trireme.checkpoint.server_side.operations import RESTARTED, OperationProgress, Operations, lost
from trireme.checkpoint.server_side.rows_to_save import RowsToSave, count_bins
from trireme.checkpoint.server_side.save import SavePlan, save_shard
from trireme.checkpoint.server_side.settle import settle
from trireme.errors import BadRequest, Corruption, TriremeError, writing
from trireme.protocol.wire import need, need_list, need_name, need_version
from trireme.rpc import Deferred, Handler, Reply, Request
from trireme.server.paths import check_path, resolve_path
from trireme.server.prepared_load import PreparedLoad
from trireme.server.state import ServerState
from trireme.storage.storage import Storage, checked_path, open_storage

JOB_CHARS_MAX = 256
CHECKPOINT_FIELDS = ("path", "options", "id", "tables", "parameters", "resumes")

Body = Mapping[str, Any]
Result = dict[str, Any]
Action = Callable[[Storage, Body, OperationProgress], Result]


class CheckpointHandlers:
    """The methods `checkpoint.*`; local checkpoints must be below `root`."""

    def __init__(self, server: ServerState, root: Path) -> None:
        self._server, self._root = server, root
        self._operations = Operations()
        self._loading = threading.Lock()
        self._lock = threading.Lock()  # of what follows
        self._waiting: list[Deferred] = []  # for the load that has begun

    def handlers(self) -> dict[str, Handler]:
        return {
            "checkpoint.start": self._on_start,
            "checkpoint.status": self._on_status,
            "checkpoint.stop": self._on_stop,
            "checkpoint.finish": self._on_finish,
        }

    def _on_start(self, request: Request) -> Reply:
        body = request.body
        actions: dict[str, Action] = {
            "count": lambda _, __, progress: count_bins(self._server, progress),
            "try": self._try,
            "save": self._save,
            "check": self._check,
            "prepare": self._prepare,
            "load": lambda _, body, progress: self._load(need(body, "load", str), progress),
            "settle": self._settle,
        }
        action = actions.get(need(body, "action", str))
        if action is None:
            raise BadRequest(
                f"checkpoint.start: expected one of {sorted(actions)} as action, found"
                f" {body['action']!r}"
            )
        if body["action"] not in ("prepare", "load"):  # which go on with what is prepared
            self._server.check_settled()
        storage = self._storage(body)
        patience_s = need({"patience_s": math.inf, **body}, "patience_s", float)

        def work(progress: OperationProgress) -> Result:
            if body["action"] in ("count", "try", "save", "check"):  # of use to its worker alone
                progress.patience_s = patience_s
            return action(storage, body, progress)

        self._operations.start(need_name(body, "job", JOB_CHARS_MAX), work)
        return Reply()

    def _on_status(self, request: Request) -> Reply:
        return self._operations.get(need(request.body, "job", str)).status()

    def _on_stop(self, request: Request) -> Reply:
        job = need(request.body, "job", str)
        self._operations.get(job).progress.stop()
        self._server.checked_load.give_up(job)
        return Reply()

    def _on_finish(self, request: Request) -> Reply | Deferred:
        """End a load that is prepared; a commit is answered when all of it is loaded."""
        server, id = self._server, need(request.body, "id", str)
        commit = need(request.body, "commit", bool)
        if server.prepared is None or server.prepared.id != id:
            if not commit and server.prepared is None:
                server.checked_load.give_up()  # it was refused elsewhere
            return server.journal.answered(Reply())
        if not commit:
            return server.journal.change_once(partial(self._drop, id))
        deferred = Deferred(lambda: f"server {server.assignment.index} has not done load {id} yet")
        with self._lock:  # which `_answer_waiting` takes, too
            if not self._waiting:
                work = partial(self._load, id)
                self._operations.start(uuid.uuid4().hex, work, self._answer_waiting)
            server.held.hold(("load", deferred), 0)
            self._waiting.append(deferred)
        return deferred

    def _drop(self, id: str) -> Reply:
        self._server.checked_load.end()
        self._server.finish(id, commit=False)
        return Reply()

    def _answer_waiting(self, error: TriremeError | None) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for deferred in waiting:
            self._server.held.free(("load", deferred))
            if error is None:
                self._server.journal.answer_when_kept(deferred, Reply)
            else:
                deferred.fail(error)

    def _storage(self, body: Body) -> Storage:
        path, options = check_path(need(body, "path", str)), need(body, "options", dict)
        storage = open_storage(path, options)
        resolve_path(self._root, storage.name, options, self._server.store_hosts)
        return storage

    # ---- actions ----

    def _try(self, storage: Storage, body: Body, _: OperationProgress) -> Result:
        """Write an empty file where a save would write."""
        with self._writing(storage, body):
            storage.put_new(f"{_prefix(body)}try.{self._server.assignment.index}", b"")
        return {}

    @contextmanager
    def _writing(self, storage: Storage, body: Body) -> Iterator[None]:
        """Where worker 0 has made a folder for files of servers."""
        index = self._server.assignment.index
        with writing(f"checkpoint: server {index} cannot write {storage.name}"):
            try:
                yield
            except FileExistsError as error:  # the call had reached this server's predecessor too
                raise lost(f"{body['job']!r} has left files: {RESTARTED}") from error
            except FileNotFoundError as error:
                raise BadRequest(
                    f"checkpoint: expected on server {index} the folder {storage.name} that worker"
                    " 0 has made, found none: checkpoints must be on storage that all servers and"
                    " worker 0 share, such as NFS at one path or s3://bucket/key; or worker 0 has"
                    " given up this save"
                ) from error

    def _save(self, storage: Storage, body: Body, progress: OperationProgress) -> Result:
        plan = SavePlan(
            version=need_version(body, "version"),
            since=need_version(body, "since"),
            removed_since=need_version(body, "removed_since"),
            prefix=_prefix(body),
            rows=RowsToSave.from_wire(body, self._server.assignment.index),
        )
        with self._writing(storage, body):
            return save_shard(self._server, storage, plan, progress)

    def _check(self, storage: Storage, body: Body, progress: OperationProgress) -> Result:
        self._read(storage, body, progress)
        return {}

    def _read(
        self, storage: Storage, body: Body, progress: OperationProgress, *, is_decided: bool = False
    ) -> CheckpointLoad:
        """Read and check this server's share of a checkpoint, and keep it until it is prepared."""
        self._server.checked_load.give_up()  # first: frees its rows
        with self._manifest(storage, body) as (manifest, num_bytes):
            if manifest.id != need(body, "id", str):
                raise Corruption(
                    f"checkpoint {storage.name}: expected {body['id']}, found {manifest.id}:"
                    " another checkpoint is there now, or not all processes see the same storage"
                )
            plan = _load_plan(body)
            load = CheckpointLoad(self._server, storage, manifest, plan, is_decided=is_decided)
            load.check(progress)
            progress.add(0)  # raises if stopped: no load would follow
            if not is_decided:
                self._server.checked_load.keep(body["job"], load, num_bytes)
        return load

    @contextmanager
    def _manifest(self, storage: Storage, body: Body) -> Iterator[tuple[CheckpointManifest, int]]:
        """The manifest, and the bytes that it may take, which are held meanwhile. Raises
        ResourceExhausted before it is read.
        """
        num_bytes = MEMORY_PER_BYTE * manifest_size(storage)
        with self._server.held.holding(("manifest", body["job"]), num_bytes):
            yield read_manifest(storage), num_bytes

    def _prepare(self, storage: Storage, body: Body, _: OperationProgress) -> Result:
        """Keep what was checked, which nothing takes away from here on."""
        server, id = self._server, need_name(body, "load", JOB_CHARS_MAX)
        server.check_settled()
        if (load := self._checked_load(body)) is None or not server.checked_load.prepare(load):
            server.checked_load.give_up()
            raise BadRequest(
                f"checkpoint.prepare: expected a load that was checked before, found"
                f" {storage.name}: since then another load has begun, somebody has pushed, or the"
                " server was restarted; nothing was loaded, load again"
            )
        try:
            fields = {field: body.get(field) for field in CHECKPOINT_FIELDS}
            server.prepare(PreparedLoad(id, fields))
        except BaseException:
            server.checked_load.end()
            raise
        server.journal.wait_kept()
        return {}

    def _checked_load(self, body: Body) -> CheckpointLoad | None:
        """What was checked for these fields, if nothing else has been checked since."""
        load, expected = self._server.checked_load.load, (need(body, "id", str), _load_plan(body))
        if not isinstance(load, CheckpointLoad) or (load.manifest.id, load.plan) != expected:
            return None
        return load

    def _load(self, id: str, progress: OperationProgress) -> Result:
        """Load what is prepared, unless an earlier call has."""
        with self._loading:
            prepared = self._server.prepared
            if not isinstance(prepared, PreparedLoad) or prepared.id != id:
                return {}
            body = {**prepared.checkpoint, "job": id}
            load, storage = self._checked_load(body), self._storage(body)
            self._server.checked_load.end()
            try:
                if load is None:  # the server was restarted, or this failed before
                    load = self._read(storage, body, progress, is_decided=True)
                with self._server.journal.replacing():
                    load.install(progress)
            except (BadRequest, Corruption) as error:
                raise type(error)(
                    f"the load of {storage.name} is decided, and has to end before anything else is"
                    f" read, changed or loaded: {error}. Put this checkpoint back and repeat the"
                    " call; or start the job with empty state folders and load another one"
                ) from error
            with self._server.journal.changing_once():
                self._server.finish(id, commit=True)
        return {}

    def _settle(self, storage: Storage, body: Body, progress: OperationProgress) -> Result:
        with self._manifest(storage, body) as (manifest, _):
            settle(self._server, storage, manifest, progress)
        self._server.counts.note_checkpoint(manifest.mode)
        self._server.forget_removed(need_version(body, "forget"))
        self._server.journal.wait_kept()
        return {}


def _prefix(body: Body) -> str:
    """The beginning of the paths of files: folders within the checkpoint's."""
    if prefix := need(body, "prefix", str):
        checked_path(prefix.removesuffix("/"))
    return prefix


def _load_plan(body: Body) -> LoadPlan:
    tables, parameters = (
        None if body.get(field) is None else frozenset(need_list(body, field, str))
        for field in ("tables", "parameters")
    )
    return LoadPlan(tables, parameters, need(body, "resumes", bool))
