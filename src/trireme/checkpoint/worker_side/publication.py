"""How a checkpoint appears and disappears: all at once, whatever is killed meanwhile.

A local folder is written under another name beside its place, and renamed. In a location of an
object store, which cannot rename, a checkpoint's files lie in a folder of their own, named by its
id, and the manifest comes last. Either way a folder with a manifest is complete.

What a killed process leaves behind has a file `saving` in it. On a local disk its writer holds a
lock on that file, which ends with the writer. Where there are no locks, it counts as left behind
LEFT_S after it was begun.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trireme.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest, write_manifest
from trireme.errors import BadRequest, writing
from trireme.storage.storage import LocalStorage, Storage, sync_folder, written

log = logging.getLogger("trireme.checkpoint")

MARKER = "saving"
LEFT_S = 6 * 3600.0  # longer than a save may take
_PARTIAL = re.compile(r"\.(.+)\.([0-9a-f]{32})\.partial")
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Draft:
    """A checkpoint being written.

    id: of the checkpoint.  storage: where its files go.  prefix: what their paths begin with.
    """

    id: str
    storage: Storage
    prefix: str


@contextmanager
def draft_of(place: Storage) -> Iterator[Draft]:
    """Where to write the files of a checkpoint that `publish` will show at `place`. Unless it is
    published, all of it is removed when the block ends.

    Raises:
        BadRequest: there is something already, or one cannot write there. ResourceExhausted: the
            disk is full.
    """
    with writing(f"checkpoint: cannot write {place.name}"):
        sweep(place)
        if isinstance(place, LocalStorage):
            with _local_draft(place) as draft:
                yield draft
        else:
            with _remote_draft(place) as draft:
                yield draft


def publish(draft: Draft, place: Storage, manifest: Manifest) -> None:
    """Let the checkpoint appear; durable when this returns."""
    write_manifest(draft.storage, manifest)
    if isinstance(draft.storage, LocalStorage) and isinstance(place, LocalStorage):
        partial = draft.storage.folder
        for folder in (*(p for p in partial.rglob("*") if p.is_dir()), partial):
            sync_folder(folder)
        partial.rename(place.folder)
        sync_folder(place.folder.parent)
    elif (found := read_manifest(place)).id != draft.id:
        raise _occupied(place, f"checkpoint {found.id}, saved there at the same time")


def remove_checkpoint(place: Storage) -> None:
    """Remove a checkpoint; killed on the way, what is left is no checkpoint any more."""
    if not isinstance(place, LocalStorage):
        place.remove(MANIFEST)
        place.remove("")
        return
    marker = _locked_marker(place.folder)
    try:
        partial = _partial_name(place.folder, uuid.uuid4().hex)
        place.folder.rename(partial)
        sync_folder(partial.parent)
        shutil.rmtree(partial)
    finally:
        os.close(marker)


def sweep(place: Storage) -> list[str]:
    """Remove what killed processes have left behind of checkpoints at this place, on a local disk
    of all in its parent folder; returns and reports their names.
    """
    if isinstance(place, LocalStorage):
        left = [str(partial) for partial in _partials(place.folder.parent) if _take(partial)]
    else:
        drafts = _unnamed(place)
        for draft in drafts:
            place.remove(draft)
        left = [f"{place.name}/{draft}" for draft in drafts]
    for name in left:
        log.warning("checkpoint: removed %s, left behind by a save that was cut off", name)
    return left


def _occupied(place: Storage, found: str) -> BadRequest:
    return BadRequest(
        f"checkpoint: expected a new folder, found {place.name} with {found}; name another"
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


# ---- local folders ----


@contextmanager
def _local_draft(place: LocalStorage) -> Iterator[Draft]:
    if place.folder.exists():
        raise _occupied(place, "something in it")
    id = uuid.uuid4().hex
    partial = _partial_name(place.folder, id)
    partial.mkdir(parents=True)
    marker = _locked_marker(partial)
    try:
        yield Draft(id, LocalStorage(partial), "")
    except BaseException:
        _discard(partial)
        raise
    else:
        for folder in (place.folder, partial):
            (folder / MARKER).unlink(missing_ok=True)
        _discard(partial)
    finally:
        os.close(marker)


def _discard(partial: Path) -> None:
    """The error that led here says more than one of removing; the next save tries again."""
    try:
        if partial.exists():
            shutil.rmtree(partial)
    except OSError as error:
        log.warning("checkpoint: cannot remove %s: %s", partial, error)


def _partial_name(folder: Path, id: str) -> Path:
    return folder.parent / f".{folder.name}.{id}.partial"


def _locked_marker(folder: Path) -> int:
    """A descriptor of the folder's marker, with the lock that says that its writer lives."""
    marker = os.open(folder / MARKER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return marker


def _partials(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    return sorted(
        path for path in parent.iterdir() if _PARTIAL.fullmatch(path.name) and path.is_dir()
    )


def _take(partial: Path) -> bool:
    """Remove the folder if no living process writes it."""
    try:
        marker = os.open(partial / MARKER, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # Killed before the marker was there, or about to write it right now.
        if not partial.exists() or _now().timestamp() - partial.stat().st_mtime < LEFT_S:
            return False
        shutil.rmtree(partial)
        return True
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        shutil.rmtree(partial)
        return True
    finally:
        os.close(marker)


# ---- object stores ----


@contextmanager
def _remote_draft(place: Storage) -> Iterator[Draft]:
    if place.size(MANIFEST) is not None:
        raise _occupied(place, MANIFEST)
    id = uuid.uuid4().hex
    with written(place, f"{id}/{MARKER}") as (file, _):
        file.write(json.dumps({"begun_at": _now().isoformat()}).encode())
    is_published = False
    try:
        yield Draft(id, place, f"{id}/")
        is_published = place.size(MANIFEST) is not None and read_manifest(place).id == id
    finally:
        if not is_published:
            place.remove(id)


def _unnamed(place: Storage) -> list[str]:
    """Folders of drafts that no manifest names, and whose writers must be gone."""
    drafts = [name for name in place.folders() if _ID.fullmatch(name)]
    if not drafts:
        return []
    named = None if place.size(MANIFEST) is None else read_manifest(place).id
    return [name for name in drafts if name != named and _is_old(place, f"{name}/{MARKER}")]


def _is_old(place: Storage, marker: str) -> bool:
    if place.size(marker) is None:
        return False  # not ours
    with place.open(marker) as file:
        try:
            begun_at = datetime.datetime.fromisoformat(json.loads(file.read())["begun_at"])
        except (ValueError, KeyError, TypeError):
            log.warning("checkpoint: expected a time in %s/%s, found none", place.name, marker)
            return False
    return (_now() - begun_at).total_seconds() > LEFT_S
