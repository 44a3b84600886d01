"""Saving: one worker has all servers write, and publishes what they wrote."""

import datetime
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from safetensors.torch import save as save_tensors
from torch import Tensor

from trireme.checkpoint.format.manifest import MANIFEST, CheckpointManifest
from trireme.checkpoint.format.save_modes import check_save, save_mode
from trireme.checkpoint.worker_side.publication import (
    Draft,
    discard_remote,
    make_published_durable,
    open_draft,
    publish,
    retain,
)
from trireme.checkpoint.worker_side.server_operations import ServerOperations, Watch, retry
from trireme.errors import BadRequest, Corruption
from trireme.storage.checked_file import written
from trireme.storage.local import LocalStorage
from trireme.storage.storage import Storage, open_storage
from trireme.worker.client import WorkerClient

TENSORS_FILE = "worker.safetensors"


def save_checkpoint(
    client: WorkerClient,
    path: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    mode: str | int = "full",
    hot: float | None = None,
    time: int = 0,
    keep: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
) -> CheckpointManifest:
    """Write tables, blocks and marks of the cluster to a new folder. One worker calls it; others
    train on, and so may other threads of this one.

    path: a folder that all processes share, or a location such as s3://bucket/key.
    extra: JSON values. tensors: by name, which `checkpoint_tensors` returns.
    mode: which rows, see `save_mode`. hot: with mode hot, a number of rows per table, or a share.
    time: data time at which rows are judged.
    keep: keep only this many of the newest checkpoints in the parent folder, and those that they
        need; None: all.
    watch: called with the progress of the servers.

    Raises BadRequest: `path` exists, or servers may not write there; a delta without a base; a load
    meanwhile.
    ResourceExhausted: the disk is full; nothing is left. Corruption: a server's files are not
    visible on this worker.
    """
    name = save_mode(mode)
    check_save(name, hot, keep)
    target = open_storage(path, storage_options)
    operations = ServerOperations(client, target, watch)
    options = {"mode": name, "time": time, "budgets": {}}
    if hot is not None:
        options["budgets"] = _hot_budgets(retry("save", lambda: operations.run("count")), hot)

    def attempt() -> CheckpointManifest:
        export = client.servers.ask("coord.export", {"mode": name}, aside=True).body
        chain = {str(id): int(version) for id, version in export["chain"].items()}
        options.update(
            version=int(export["version"]),
            since=min(chain.values()) if name == "delta" else 0,
            removed_since=min(chain.values(), default=0),
        )
        with open_draft(target) as draft:
            writing = ServerOperations(client, draft.storage, watch)
            shares = writing.run("save", **options, prefix=draft.prefix)
            if not all(share["removed_known"] for share in shares):
                chain = {}
            body = _manifest(shares, draft, options, chain)
            body |= {"extra": dict(extra), "tensors": _save_tensors(draft, tensors)}
            manifest = CheckpointManifest.from_json(body, f"{draft.storage.name}/{MANIFEST}")
            _check_visible(manifest, draft)
            if client.servers.ask("coord.chain", {}, aside=True).body["model"] != export["model"]:
                raise BadRequest(
                    f"save: expected one model, found that another was loaded, or begun, while"
                    f" servers wrote {target.name}; nothing was saved, save again"
                )
            publish(draft, target, body)
        return manifest

    manifest = retry("save", attempt)
    _finish(client, target, manifest, operations, keep)
    return manifest


def check_writable(
    client: WorkerClient,
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Raises BadRequest, ResourceExhausted: this worker and all servers cannot write a checkpoint
    at `path`, a new folder or location. Nothing stays there.
    """
    target = open_storage(path, storage_options)

    def attempt() -> None:
        with open_draft(target) as draft:
            ServerOperations(client, draft.storage, None).run("try", prefix=draft.prefix)

    try:
        retry("save", attempt)
    finally:
        if not isinstance(target, LocalStorage):  # HDFS keeps empty folders
            discard_remote(target, "")


def finish_save(
    client: WorkerClient,
    path: str | os.PathLike[str],
    manifest: CheckpointManifest,
    *,
    keep: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Do what follows the publication of a checkpoint, for a worker that was killed after it. What
    has been done already has no effect again.
    """
    target = open_storage(path, storage_options)
    make_published_durable(target)
    _finish(client, target, manifest, ServerOperations(client, target, None), keep)


def _finish(
    client: WorkerClient,
    target: Storage,
    manifest: CheckpointManifest,
    operations: ServerOperations,
    keep: int | None,
) -> None:
    published = {"id": manifest.id, "mode": manifest.mode, "version": manifest.version}
    published["chain"] = dict(manifest.chain)
    forget = int(client.servers.ask("coord.published", published, aside=True).body["forget"])
    retry("save", lambda: operations.run("settle", forget=forget))
    if keep is not None:
        retain(target, keep)


def _manifest(
    shares: list[Mapping[str, Any]], draft: Draft, options: Mapping[str, Any], chain: dict[str, int]
) -> dict[str, Any]:
    """The manifest in JSON from the shares of the servers."""
    tables: dict[str, Any] = {}
    for share in shares:
        for name, table in share["tables"].items():
            merged = tables.setdefault(name, {"schema": table["schema"], "pieces": []})
            merged["pieces"] += table["pieces"]
    for table in tables.values():
        table["pieces"].sort(key=lambda files: files["low"])
    optimizers = {share["optimizer"] for share in shares} - {None}
    return {
        "id": draft.id,
        "mode": options["mode"],
        "version": options["version"],
        "since": options["since"] if options["mode"] == "delta" else None,
        "chain": chain,
        "time": options["time"],
        "saved_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds"),
        "num_servers": len(shares),
        "tables": tables,
        "optimizer": next(iter(optimizers), None),
        "blocks": [blocks for share in shares for blocks in share["blocks"]],
        "streams": _merge_streams(shares),
    }


def _merge_streams(shares: list[Mapping[str, Any]]) -> list[list[Any]]:
    """[stream, sequence, position] that every server has; a stream that a server does not name
    starts over.
    """
    entries: dict[int, list[list[Any]]] = {}
    for share in shares:
        for entry in share["streams"]:
            entries.setdefault(int(entry[0]), []).append(entry)
    merged = []
    for stream, of_servers in sorted(entries.items()):
        if len(of_servers) == len(shares):
            _, last, position = min(of_servers, key=lambda entry: int(entry[1]))
            merged.append([stream, int(last), [int(number) for number in position]])
    return merged


def _save_tensors(draft: Draft, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    if not tensors:
        return None
    with written(draft.storage, f"{draft.prefix}{TENSORS_FILE}") as (file, entry):
        file.write(save_tensors({name: t.detach().contiguous() for name, t in tensors.items()}))
    return dict(entry)


def _check_visible(manifest: CheckpointManifest, draft: Draft) -> None:
    """All processes see the same object store, but perhaps not the same folder."""
    if not isinstance(draft.storage, LocalStorage):
        return
    for entry in manifest.files():
        if draft.storage.size(entry.path) != entry.num_bytes:
            raise Corruption(
                f"save: expected {draft.storage.name}/{entry.path} of {entry.num_bytes} bytes,"
                " found none or another; the folder must be on storage that all servers and"
                " worker 0 share"
            )


# ---- how many rows of a hot set each server may save ----


def _hot_budgets(counts: Sequence[Mapping[str, Any]], hot: float) -> dict[str, list[Any]]:
    """Table -> [bin, [rows above that bin and in it that each server may save]].

    counts: of each server: table -> [bins, rows in each]. hot: a number of rows, or a share.
    """
    budgets: dict[str, list[Any]] = {}
    for name in {name for server in counts for name in server}:
        bins = [dict(zip(*server.get(name, ([], [])), strict=True)) for server in counts]
        all_bins = sum(map(Counter, bins), Counter[int]())
        total = all_bins.total()
        wanted = int(hot * total) if type(hot) is float else min(int(hot), total)
        above, last = 0, 0
        for last in sorted(all_bins, reverse=True):
            if above + all_bins[last] >= wanted:
                break
            above += all_bins[last]
        # All rows above the last bin; of the rows in it, those of the first servers first.
        left, shares = wanted - above, []
        for of_server in bins:
            within = min(left, of_server.get(last, 0))
            left -= within
            shares.append([sum(n for bin, n in of_server.items() if bin > last), within])
        budgets[name] = [last, shares]
    return budgets
