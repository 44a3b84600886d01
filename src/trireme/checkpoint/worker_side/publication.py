"""How a checkpoint appears and disappears: at once, even if a process is killed meanwhile.

A local folder is written under another name beside its place, and renamed. In a location of an
object store, which cannot rename, a checkpoint's files lie in a folder of their own, named by its
id, and the manifest comes last. Either way a folder with a manifest is complete.

A draft has a file `saving` in it. On a local disk its writer holds a lock on that file, which ends
with the writer. Where there are no locks, a draft counts as abandoned ABANDONED_S after it began.
"""

import datetime
import json
import logging
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.checkpoint.format.manifest import (
    MANIFEST,
    CheckpointManifest,
    read_manifest,
    write_manifest,
)
from trireme.errors import BadRequest, Corruption, TriremeError, writing
from trireme.storage.atomic_folder import (
    ABANDONED_S,
    MARKER,
    is_partial,
    locked_marker,
    partial_path,
    publish_folder,
    remove_draft,
    remove_partials,
)
from trireme.storage.local import LocalStorage, made_folder, sync_folder
from trireme.storage.storage import Storage

log = logging.getLogger("trireme.checkpoint")

_ID = re.compile(r"[0-9a-f]{32}")


@dataclass
class Draft:
    """A checkpoint being written: where its files go, and the beginning of their paths."""

    id: str
    storage: Storage
    prefix: str
    may_be_published: bool = False  # in an object store: a manifest may name its files


@contextmanager
def open_draft(target: Storage) -> Iterator[Draft]:
    """Where to write the files of a checkpoint that `publish` will show at `target`. Unless it is
    published, all of it is removed when the block ends. Raises BadRequest: `target` exists or
    cannot be written. ResourceExhausted: the disk is full.
    """
    with writing(f"checkpoint: cannot write {target.name}"):
        remove_abandoned(target)
        local = target if isinstance(target, LocalStorage) else None
        with _local_draft(local) if local else _remote_draft(target) as draft:
            yield draft


def publish(draft: Draft, target: Storage, manifest: Mapping[str, Any]) -> None:
    """Let the checkpoint with this manifest appear; durable when this returns."""
    if isinstance(draft.storage, LocalStorage) and isinstance(target, LocalStorage):
        write_manifest(draft.storage, manifest)
        publish_folder(draft.storage.folder, target.folder)
    else:
        _publish_remote(draft, target, manifest)


def make_published_durable(target: Storage) -> None:
    """Make a checkpoint durable that a process has published which was killed then. Raises
    BadRequest: it cannot.
    """
    if isinstance(target, LocalStorage):
        with writing(f"checkpoint: cannot make {target.name} durable"):
            sync_folder(target.folder.parent)


def remove_checkpoint(target: Storage) -> None:
    """Remove a checkpoint. If the process is killed meanwhile, the rest is not a checkpoint. Raises
    BadRequest: it cannot be removed.
    """
    if not isinstance(target, LocalStorage):
        target.remove(MANIFEST)
        target.remove("")
        return
    with writing(f"checkpoint: cannot remove {target.name}"), locked_marker(target.folder):
        partial = partial_path(target.folder, uuid.uuid4().hex)
        target.folder.rename(partial)
        sync_folder(partial.parent)
        remove_draft(partial)


def remove_abandoned(target: Storage) -> None:
    """Remove what killed processes have left of checkpoints at `target`, on a local disk of all in
    its parent folder, and log it.
    """
    if isinstance(target, LocalStorage):
        with writing(f"checkpoint: cannot remove what is left beside {target.name}"):
            remove_partials(target.folder.parent)
        return
    for draft in _unnamed(target):
        target.remove(draft)
        text = "checkpoint: removed %s/%s, left behind by a save that was cut off"
        log.warning(text, target.name, draft)


def _occupied(target: Storage, content: str) -> BadRequest:
    return BadRequest(
        f"checkpoint: expected a new folder, found {target.name} with {content}; name another"
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


# ---- local folders ----


@contextmanager
def _local_draft(target: LocalStorage) -> Iterator[Draft]:
    if target.folder.exists():
        raise _occupied(target, "something in it")
    id = uuid.uuid4().hex
    partial = partial_path(target.folder, id)
    with made_folder(target.folder.parent):
        try:
            partial.mkdir()
            with locked_marker(partial):
                yield Draft(id, LocalStorage(partial), "")
        except BaseException:
            _discard(partial)
            raise
    for folder in (target.folder, partial):
        (folder / MARKER).unlink(missing_ok=True)
    _discard(partial)


def _discard(partial: Path) -> None:
    """Remove a draft. Only logs an error: the one before it matters more, and the next save tries
    again.
    """
    try:
        if partial.exists():
            remove_draft(partial)
    except OSError as error:
        log.warning("checkpoint: cannot remove %s: %s", partial, error)


# ---- object stores ----


@contextmanager
def _remote_draft(target: Storage) -> Iterator[Draft]:
    if target.size(MANIFEST) is not None:
        raise _occupied(target, MANIFEST)
    id = uuid.uuid4().hex
    target.put_new(f"{id}/{MARKER}", json.dumps({"begun_at": _now().isoformat()}).encode())
    draft = Draft(id, target, f"{id}/")
    try:
        yield draft
    finally:
        if not draft.may_be_published:
            discard_remote(target, id)


def discard_remote(target: Storage, path: str) -> None:
    """As `_discard`. A store may take new objects from one who must not remove any."""
    try:
        target.remove(path)
    except BadRequest as error:
        log.warning("%s; what was written there stays", error)


def _publish_remote(draft: Draft, target: Storage, manifest: Mapping[str, Any]) -> None:
    """Upload the manifest unless there is one. Once this has begun, the files of the draft stay,
    unless the manifest of another is there: an upload without an answer may have taken place.
    """
    draft.may_be_published = True
    failure: TriremeError | None = None
    try:
        write_manifest(target, manifest)
    except TriremeError as error:
        failure = error
    try:
        id = read_manifest(target).id
    except TriremeError as error:
        raise BadRequest(
            f"checkpoint: expected {target.name} to show its new manifest, found"
            f" {failure or error}; its files stay in {target.name}/{draft.id}: if `trireme verify"
            f" {target.name}` finds it complete it can be loaded, otherwise remove them"
        ) from (failure or error)
    if id != draft.id:
        draft.may_be_published = False
        raise _occupied(target, f"checkpoint {id}, saved there at the same time")


def _unnamed(target: Storage) -> list[str]:
    """Folders of abandoned drafts that no manifest names."""
    drafts = [name for name in target.folders() if _ID.fullmatch(name)]
    if not drafts:
        return []
    named = None if target.size(MANIFEST) is None else read_manifest(target).id
    return [name for name in drafts if name != named and _is_old(target, f"{name}/{MARKER}")]


def _is_old(target: Storage, marker: str) -> bool:
    if target.size(marker) is None:
        return False  # not a draft
    with target.open(marker) as file:
        try:
            begun_at = datetime.datetime.fromisoformat(json.loads(file.read())["begun_at"])
        except (ValueError, KeyError, TypeError):
            log.warning("checkpoint: expected a time in %s/%s, found none", target.name, marker)
            return False
    return (_now() - begun_at).total_seconds() > ABANDONED_S


# ---- which checkpoints of a folder are kept ----


def retain(newest: Storage, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints of the parent folder of `newest`.

    A checkpoint that a kept delta must be loaded on top of stays too, and so does everything that
    is damaged or not a checkpoint.
    """
    parent, own = newest.parent()
    manifests: dict[str, CheckpointManifest] = {}
    for name in parent.folders():
        if is_partial(name):  # it may have a manifest already, or still
            continue
        try:
            manifests[name] = read_manifest(parent.below(name))
        except (BadRequest, Corruption) as error:
            log.debug("retention: passes over %s/%s: %s", parent.name, name, error)
    job_of = {
        name: str(m.extra.get("saved_by", name)).partition(" ")[0] for name, m in manifests.items()
    }

    def age(name: str) -> tuple[Any, ...]:
        """The clock may have been set back since: a job counts its own saves."""
        one = manifests[name]
        is_own = job_of[name] == job_of.get(own)
        return (True, one.version) if is_own else (False, one.saved_at, one.version)

    order = sorted(manifests, key=age)
    order = [name for name in order if name != own] + [own]
    kept = set(order[-keep:])
    name_of = {manifests[name].id: name for name in reversed(manifests)}
    for name in reversed(order):
        if name in kept and manifests[name].mode == "delta":
            chain = manifests[name].chain  # of what it may be loaded on top of, the newest stays
            earlier = [id for id in chain if id in name_of]
            kept |= {name_of[id] for id in sorted(earlier, key=chain.__getitem__)[-1:]}
    for name in order:
        if name not in kept:
            remove_checkpoint(parent.below(name))
