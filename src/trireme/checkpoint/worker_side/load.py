"""Loading: one worker has all servers check a checkpoint, then read it."""

import logging
import os
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from trireme.checkpoint.format.block_files import read_tensors
from trireme.checkpoint.format.manifest import CheckpointManifest, read_manifest
from trireme.checkpoint.worker_side.server_operations import ServerOperations, Watch, retry
from trireme.errors import BadRequest, TriremeError, Unavailable
from trireme.storage.checked_file import check_file
from trireme.storage.storage import Storage, open_storage
from trireme.worker.client import WorkerClient

log = logging.getLogger("trireme.checkpoint")


def load_checkpoint(
    client: WorkerClient,
    path: str | os.PathLike[str],
    *,
    tables: Collection[str] | None = None,
    parameters: Collection[str] | None = None,
    resumes: Callable[[CheckpointManifest], bool] = lambda _: True,
    storage_options: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    check: Callable[[CheckpointManifest], None] | None = None,
    begins: Callable[[], None] | None = None,
) -> CheckpointManifest:
    """Bring the cluster to the state of a checkpoint, on any number of servers; returns its
    manifest. A delta is loaded on top of what was loaded before. One worker calls it, while no
    other trains.

    tables: only these; None: all of the checkpoint, and the model has no others.
    parameters: only these dense parameters; None: all of the model.
    resumes: of the manifest: streams continue after what the checkpoint holds, else start over.
    check: called when the servers have checked their shares; an error that it raises ends the load.
    begins: called when all is checked: what ends the load from here on may leave it half done.

    Everything is verified on all servers before the coordinator decides that the load takes place,
    and the first row changes. Raises BadRequest: no checkpoint there, or a delta that does not
    follow what was loaded. Corruption: a file is missing or damaged. SchemaMismatch: a table or
    block differs from the declared one.
    """
    source = open_storage(path, storage_options)
    manifest = read_manifest(source)
    _check_follows(client, source, manifest)
    if manifest.tensors is not None:
        check_file(source, *manifest.tensors)
    operations = ServerOperations(client, source, watch)
    options = {
        "id": manifest.id,
        "tables": None if tables is None else sorted(tables),
        "parameters": None if parameters is None else sorted(parameters),
        "resumes": resumes(manifest),
    }

    id = uuid.uuid4().hex

    def prepare() -> None:
        operations.run("check", **options)
        if check is not None:
            check(manifest)
        operations.run("prepare", load=id, **options)

    try:
        retry("load", prepare)
    except BaseException:
        try:
            client.servers.finish("load", id, commit=False, timeout_s=client.timeout_s)
        except TriremeError as error:  # the next load, pull or push does it
            log.warning("load: the servers keep it prepared: %s", error)
        raise
    if begins is not None:
        begins()
    loaded = {
        "id": manifest.id,
        "mode": manifest.mode,
        "version": manifest.version,
        "chain": dict(manifest.chain) if manifest.mode != "delta" else {},
        "whole": tables is None and manifest.mode != "hot",
    }
    if not client.servers.decide(id, commit=True, loaded=loaded):
        raise Unavailable(
            f"load of {source.name}: another worker has pulled or pushed meanwhile, and ended it"
            " before it was decided; nothing was loaded, load again"
        )
    client.servers.adopt()  # has servers refuse the pushes of before, which may come late
    retry("load", lambda: operations.run("load", load=id))
    return manifest


def _check_follows(client: WorkerClient, source: Storage, manifest: CheckpointManifest) -> None:
    if manifest.mode != "delta":
        return
    loaded = client.servers.ask("coord.chain", {}, aside=True).body["loaded"]
    if loaded not in manifest.chain:
        versions = " or ".join(map(str, sorted(set(manifest.chain.values()))))
        actual = "none" if loaded is None else "another one"
        raise BadRequest(
            f"load: expected the checkpoint of version {versions} to be loaded before the delta"
            f" {source.name} of version {manifest.version}, found {actual} (`trireme verify` of the"
            " folder above lists the versions in it)"
        )


def saved_tensors(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """The tensors that were saved besides rows and blocks. Any worker may call it. Raises
    Corruption: their file is missing or damaged.
    """
    source = open_storage(path, storage_options)
    entry = read_manifest(source).tensors
    if entry is None:
        return {}
    check_file(source, *entry)
    return read_tensors(source, entry)
