"""Checkpoints on the worker's side: one worker tells all servers, and publishes what they wrote."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from safetensors.torch import save as save_tensors
from torch import Tensor

from trireme.checkpoint.format.block_files import tensors_of
from trireme.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest
from trireme.checkpoint.format.modes import mode_of
from trireme.checkpoint.server_side.hot import budgets_of, check_hot
from trireme.checkpoint.server_side.save import merged_streams
from trireme.checkpoint.worker_side.calls import SAVE_TIMEOUT_S, ServerJobs, Watch, anew
from trireme.checkpoint.worker_side.publication import Draft, draft_of, publish
from trireme.checkpoint.worker_side.retention import retain
from trireme.errors import BadRequest, Corruption
from trireme.storage.storage import (
    LocalStorage,
    Storage,
    open_storage,
    read_chunks,
    written,
)
from trireme.worker.client import Client

TENSORS_FILE = "worker.safetensors"

Options = Mapping[str, Any]


def save_checkpoint(
    client: Client,
    path: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    mode: str | int = "full",
    hot: float | None = None,
    time: int = 0,
    keep: int | None = None,
    storage_options: Options | None = None,
    watch: Watch | None = None,
    timeout_s: float = SAVE_TIMEOUT_S,
) -> Manifest:
    """Write tables, blocks and marks of the cluster to a new folder. One worker calls it; others
    train on, and so may other threads of this one.

    Args:
        path: a folder that all processes share, or a location such as s3://bucket/key.
        extra: JSON values that `load_checkpoint` gives back.
        tensors: by name, which `read_tensors` gives back.
        mode: what of the tables; see `mode_of`.
        hot: of mode hot, a number of rows of each table, or a share of them.
        time: data time that rows are judged at.
        keep: leave only the newest so many checkpoints in the parent folder, and those that they
            need; None: all.
        watch: told how far the servers are.

    Raises:
        BadRequest: `path` exists, or servers may not write there; a delta without a base.
        ResourceExhausted: the disk is full; nothing is left.
        Corruption: a server's files are not visible here.
    """
    name = mode_of(mode)
    check_hot(name, hot)
    if keep is not None and keep < 1:
        raise BadRequest(f"save: expected keep >= 1, found {keep}")
    place = open_storage(path, storage_options)
    jobs = ServerJobs(client, place, watch, timeout_s)
    order = {"mode": name, "time": time, "budgets": {}}
    if hot is not None:
        order["budgets"] = budgets_of(anew("save", lambda: jobs.run("count")), hot)

    def attempt() -> Manifest:
        export = client.servers.ask_coordinator("coord.export", {"mode": name})
        version, chain = int(export["version"]), _chain(export["chain"])
        order.update(
            version=version,
            since=min(chain.values()) if name == "delta" else 0,
            removed_since=min(chain.values(), default=0),
        )
        with draft_of(place) as draft:
            jobs = ServerJobs(client, draft.storage, watch, timeout_s)
            parts = jobs.run("save", **order, prefix=draft.prefix)
            if not all(part["removed_known"] for part in parts):
                chain = {}
            body = _manifest(parts, draft, order, chain)
            body |= {"extra": dict(extra), "tensors": _save_tensors(draft, tensors)}
            manifest = Manifest.from_json(body, f"{draft.storage.name}/{MANIFEST}")
            _check_visible(manifest, draft)
            publish(draft, place, manifest)
        return manifest

    manifest = anew("save", attempt)
    _finish(client, place, manifest, jobs, keep)
    return manifest


def finish_save(
    client: Client,
    path: str | os.PathLike[str],
    manifest: Manifest,
    *,
    keep: int | None = None,
    storage_options: Options | None = None,
    timeout_s: float = SAVE_TIMEOUT_S,
) -> None:
    """What comes behind the publication of a checkpoint, for a worker that was killed there. What
    has been done stays as it is.
    """
    place = open_storage(path, storage_options)
    _finish(client, place, manifest, ServerJobs(client, place, None, timeout_s), keep)


def _finish(
    client: Client, place: Storage, manifest: Manifest, jobs: ServerJobs, keep: int | None
) -> None:
    published = {"id": manifest.id, "mode": manifest.mode, "version": manifest.version}
    published["chain"] = dict(manifest.chain)
    forget = int(client.servers.ask_coordinator("coord.published", published)["forget"])
    anew("save", lambda: jobs.run("settle", forget=forget))
    if keep is not None:
        retain(place, keep)


def _chain(chain: Mapping[Any, Any]) -> dict[str, int]:
    return {str(of): int(version) for of, version in chain.items()}


def _manifest(
    parts: list[Mapping[str, Any]],
    draft: Draft,
    order: Mapping[str, Any],
    chain: dict[str, int],
) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for part in parts:
        for name, table in part["tables"].items():
            merged = tables.setdefault(name, {"schema": table["schema"], "pieces": []})
            merged["pieces"] += table["pieces"]
    for table in tables.values():
        table["pieces"].sort(key=lambda piece: piece["low"])
    optimizers = {part["optimizer"] for part in parts} - {None}
    streams = merged_streams(parts)
    return {
        "id": draft.id,
        "mode": order["mode"],
        "version": order["version"],
        "since": order["since"] if order["mode"] == "delta" else None,
        "chain": chain,
        "time": order["time"],
        "saved_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds"),
        "num_servers": len(parts),
        "tables": tables,
        "optimizer": next(iter(optimizers), None),
        "blocks": [blocks for part in parts for blocks in part["blocks"]],
        "streams": [[stream, last, list(at)] for stream, (last, at) in sorted(streams.items())],
    }


def _save_tensors(draft: Draft, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    if not tensors:
        return None
    with written(draft.storage, f"{draft.prefix}{TENSORS_FILE}") as (file, entry):
        file.write(save_tensors({name: t.detach().contiguous() for name, t in tensors.items()}))
    return dict(entry)


def _check_visible(manifest: Manifest, draft: Draft) -> None:
    """Object stores are one for all; folders need not be."""
    if not isinstance(draft.storage, LocalStorage):
        return
    for entry in manifest.files():
        if draft.storage.size(entry.path) != entry.num_bytes:
            raise Corruption(
                f"save: expected {draft.storage.name}/{entry.path} of {entry.num_bytes} bytes,"
                " found none or another; the folder must be on storage that all servers and"
                " worker 0 share"
            )


def load_checkpoint(
    client: Client,
    path: str | os.PathLike[str],
    *,
    tables: Collection[str] | None = None,
    parameters: Collection[str] | None = None,
    resumes: bool = True,
    storage_options: Options | None = None,
    watch: Watch | None = None,
    check: Callable[[Manifest], None] | None = None,
    timeout_s: float = SAVE_TIMEOUT_S,
) -> Manifest:
    """Bring the cluster to the state of a checkpoint, on any number of servers; returns its
    manifest. A delta is loaded on top of what was loaded before.

    One worker calls it, while no other trains. Everything is verified before the first row changes.

    Args:
        tables: these alone; None: all of the checkpoint, and the model has no others.
        parameters: these dense parameters alone; None: all of the model.
        resumes: streams go on behind what it holds; else they begin anew.
        check: called when the servers have checked theirs; what it raises ends the load.

    Raises:
        BadRequest: no checkpoint there, or a delta that does not follow what was loaded.
        Corruption: a file is missing or damaged. SchemaMismatch: a table or block differs from the
            one declared. Nothing has changed then.
    """
    place = open_storage(path, storage_options)
    manifest = read_manifest(place)
    _check_follows(client, place, manifest)
    for _ in () if manifest.tensors is None else read_chunks(place, manifest.tensors.to_json()):
        pass
    jobs = ServerJobs(client, place, watch, timeout_s)
    order = {
        "id": manifest.id,
        "tables": None if tables is None else sorted(tables),
        "parameters": None if parameters is None else sorted(parameters),
        "resumes": resumes,
    }

    def attempt() -> None:
        jobs.run("check", **order)
        if check is not None:
            check(manifest)
        jobs.run("load", **order)

    anew("load", attempt)
    loaded = {
        "id": manifest.id,
        "mode": manifest.mode,
        "version": manifest.version,
        "chain": dict(manifest.chain) if manifest.mode != "delta" else {},
        "whole": tables is None and manifest.mode != "hot",
    }
    client.servers.ask_coordinator("coord.loaded", loaded)
    return manifest


def _check_follows(client: Client, place: Storage, manifest: Manifest) -> None:
    if manifest.mode != "delta":
        return
    loaded = client.servers.ask_coordinator("coord.chain", {})["loaded"]
    if loaded not in manifest.chain:
        versions = sorted(set(manifest.chain.values()))
        found = "none" if loaded is None else f"another one, {loaded}"
        raise BadRequest(
            f"load: expected a checkpoint of version {versions} to be loaded before the delta"
            f" {place.name} of version {manifest.version}, found {found}"
        )


def read_tensors(
    path: str | os.PathLike[str], storage_options: Options | None = None
) -> dict[str, Tensor]:
    """The tensors that were saved beside rows and blocks. Every worker may call it.

    Raises:
        Corruption: their file is missing or damaged.
    """
    place = open_storage(path, storage_options)
    entry = read_manifest(place).tensors
    if entry is None:
        return {}
    for _ in read_chunks(place, entry.to_json()):
        pass
    return tensors_of(place, entry)
