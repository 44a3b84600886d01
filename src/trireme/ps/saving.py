"""Checkpoints on the worker's side: tell every server, then publish what they wrote as one
folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from torch import Tensor

from trireme.errors import Corruption
from trireme.ps.client import Client
from trireme.ps.manifest import published, read_manifest, verify_file, write_manifest, written

MODULE_FILE = "module.safetensors"
SAVE_TIMEOUT_S = 3600.0


def save_checkpoint(
    client: Client,
    path: Path,
    *,
    extra: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    timeout_s: float = SAVE_TIMEOUT_S,
) -> None:
    """Write all tables, blocks and marks of the cluster into a new folder. One worker calls it;
    others train on, and so may other threads of this one.

    Args:
        extra: JSON values that `load_checkpoint` gives back.
        tensors: by name, which `read_tensors` gives back.

    Raises:
        BadRequest: `path` exists, or servers may not write there.
        Corruption: a server's files are not visible here: the folder is not on storage that all
    processes share.
    """
    path = path.absolute()
    with published(path) as partial:
        replies = client.everywhere(
            "checkpoint.save", {"path": str(partial)}, timeout_s=timeout_s, aside=True
        )
        parts = [reply.body for reply in replies]
        files = [
            entry
            for part in parts
            for entries in (
                *(table["files"] for table in part["tables"].values()),
                part["blocks"]["files"],
            )
            for entry in entries
        ]
        for entry in files:
            found = partial / entry["path"]
            if not found.is_file() or found.stat().st_size != entry["bytes"]:
                raise Corruption(
                    f"save: expected {found} of {entry['bytes']} bytes, found none or another;"
                    " the folder must be on storage that all servers and worker 0 share"
                )
        if tensors:
            with written(partial / MODULE_FILE) as (file, entry):
                file.write(save_tensors({name: t.contiguous() for name, t in tensors.items()}))
            files.append({**entry, "path": MODULE_FILE})
        write_manifest(partial, {**_merge(parts, client), "files": files, "extra": dict(extra)})


def _merge(parts: list[dict[str, Any]], client: Client) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for part in parts:
        for name, table in part["tables"].items():
            merged = tables.setdefault(name, {"schema": table["schema"], "files": []})
            merged["files"] += table["files"]
    optimizers = {part["blocks"]["optimizer"] for part in parts} - {None}
    blocks = {
        "optimizer": next(iter(optimizers), None),
        "files": [entry for part in parts for entry in part["blocks"]["files"]],
        "blocks": {k: v for part in parts for k, v in part["blocks"]["blocks"].items()},
    }
    found: dict[int, list[list[Any]]] = {}
    for part in parts:
        for entry in part["streams"]:
            found.setdefault(entry[0], []).append(entry)
    # What every server has of a stream; one that a server does not name begins anew.
    streams = {
        stream: min(entries, key=lambda entry: int(entry[1]))
        for stream, entries in found.items()
        if len(entries) == len(parts)
    }
    return {
        "servers": list(client.map.servers),
        "map_version": client.map.version,
        "tables": tables,
        "blocks": blocks,
        "streams": [streams[stream] for stream in sorted(streams)],
    }


def load_checkpoint(
    client: Client,
    path: Path,
    *,
    parameters: Sequence[str] | None = None,
    timeout_s: float = SAVE_TIMEOUT_S,
) -> dict[str, Any]:
    """Bring the cluster to the state of a checkpoint, on any number of servers; returns its
    manifest.

    One worker calls it, while no other trains.

    Args:
        parameters: None: all of it, and streams go on behind what it holds. Names: these dense
            parameters, and the tables that both sides have; streams begin anew.

    Raises:
        BadRequest: no checkpoint there. Corruption: a file is missing or damaged.
        SchemaMismatch: a table or block differs from the one declared.
    """
    path = path.absolute()
    manifest = read_manifest(path)
    body = {"path": str(path), "parameters": None if parameters is None else list(parameters)}
    client.everywhere("checkpoint.load", body, timeout_s=timeout_s)
    return manifest


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors that were saved beside rows and blocks. Raises Corruption: a damaged file."""
    manifest = read_manifest(path)
    entries = [entry for entry in manifest["files"] if entry["path"] == MODULE_FILE]
    return load_file(verify_file(path, entries[0])) if entries else {}
