"""Folders that appear complete or not at all.

A local folder is written under another name beside its place, synced and renamed. A file `saving`
in it is locked by its writer as long as that lives, so that the next writer can tell what a killed
one has left. Where there are no locks, it counts as abandoned after ABANDONED_S. In a location
such as s3://bucket/key, which cannot be renamed at once, an empty file _SUCCESS comes last. There
an empty file _WRITING comes first, so that of two writers one fails before it writes anything.
"""

import datetime
import fcntl
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec

from trireme.errors import BadRequest, writing
from trireme.storage.local import made_folder, make_folder, sync_folder, sync_tree

log = logging.getLogger("trireme.storage")

MARKER, OWNER = "saving", ".owner"
ABANDONED_S = 6 * 3600.0  # longer than a save may take
_PARTIAL = re.compile(r"\.(.+)\.([0-9a-f]{32})\.partial")
SUCCESS, CLAIM = "_SUCCESS", "_WRITING"


@contextmanager
def new_folder(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """A path or location to write files into; they appear at `path` when the block ends without an
    error.

    Raises:
        BadRequest: `path` exists or cannot be written. ResourceExhausted: the disk is full.
    """
    path = os.fspath(path)
    with writing(f"export: cannot write {path}"):
        if "://" in path:
            yield from _remote(path.rstrip("/"), storage_options or {})
        elif storage_options:
            raise BadRequest(
                "export: expected storage_options only with a location such as s3://bucket/key,"
                f" found {sorted(storage_options)} with the path {path!r}"
            )
        else:
            yield from _local(Path(path).absolute())


def partial_path(path: Path, id: str) -> Path:
    """Where the folder `path` is while it is written."""
    return path.parent / f".{path.name}.{id}.partial"


def is_partial(name: str) -> bool:
    """Whether a folder of this name is being written or removed."""
    return _PARTIAL.fullmatch(name) is not None


def publish_folder(partial: Path, path: Path) -> None:
    """Let a folder, whose files are durable already, appear at `path`, durably."""
    sync_tree(partial)
    partial.rename(path)
    sync_folder(path.parent)


@contextmanager
def locked_marker(folder: Path) -> Iterator[None]:
    """Within it the folder's marker is locked, as long as its writer lives."""
    marker = os.open(folder / MARKER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(marker)


@contextmanager
def owned_folder(folder: Path) -> Iterator[None]:
    """Within it no other process owns the folder, made if absent. Raises BadRequest: another does,
    or it cannot be written.
    """
    with ExitStack() as stack:
        with writing(f"checkpoint: cannot write {folder}"):
            make_folder(folder)
            file = stack.enter_context((folder / OWNER).open("ab"))
            try:  # a lock that children do not inherit
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat((folder / OWNER).stat(), os.fstat(file.fileno())):
                    raise FileExistsError  # a job that ended meanwhile has removed what is locked
            except (BlockingIOError, FileExistsError, FileNotFoundError):
                raise BadRequest(
                    f"checkpoint: expected {folder} to be one job's alone, found another job that"
                    " is running and saves there; stop it, or give each job another folder"
                ) from None
        stack.callback((folder / OWNER).unlink, missing_ok=True)
        yield


def remove_partials(parent: Path) -> None:
    """Remove and log the folders that killed writers have left in this one."""
    partials = [path for path in parent.glob(".*.partial") if is_partial(path.name)]
    if partials:  # one was whole until it was renamed, perhaps, and must not come back in part
        sync_folder(parent)
    for path in sorted(partials):
        if path.is_dir() and _remove_partial(path):
            log.warning("removed %s, left behind by a process that was killed", path)


def remove_draft(partial: Path) -> None:
    """Remove a folder with a marker, which goes last: if this is cut off, the next writer can tell
    that nobody wants the rest. Servers may still write there for a worker that has gone: under a
    new name they do not find the folder. Raises OSError.
    """
    name = _PARTIAL.fullmatch(partial.name)
    aside = partial.with_name(f".{name[1] if name else partial.name}.{uuid.uuid4().hex}.partial")
    partial.rename(aside)
    for entry in list(os.scandir(aside)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry)
        elif entry.name != MARKER:
            os.unlink(entry)
    shutil.rmtree(aside)


def _remove_partial(partial: Path) -> bool:
    """Remove the folder if no living process writes it."""
    try:
        marker = os.open(partial / MARKER, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # Its writer was killed before it made the marker, or is about to make it.
        now_s = datetime.datetime.now(datetime.timezone.utc).timestamp()
        if not partial.exists() or now_s - partial.stat().st_mtime < ABANDONED_S:
            return False
        remove_draft(partial)
        return True
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_draft(partial)
        return True
    except (BlockingIOError, FileNotFoundError):  # the lock's; another writer has removed it
        return False
    finally:
        os.close(marker)


def _local(path: Path) -> Iterator[str]:
    remove_partials(path.parent)
    if path.exists():
        raise _occupied(path)
    partial = partial_path(path, uuid.uuid4().hex)
    with made_folder(path.parent):
        try:
            partial.mkdir()
            with locked_marker(partial):
                yield str(partial)
                sync_tree(partial, files=True)  # takes long: whoever is killed in it has a marker
                (partial / MARKER).unlink()
                publish_folder(partial, path)
        except BaseException:
            with suppress(OSError):  # the error before it matters more, and the next writer tries
                remove_draft(partial)
            raise


def _remote(location: str, options: Mapping[str, Any]) -> Iterator[str]:
    try:
        filesystem, root = fsspec.core.url_to_fs(location, **options)
    except (ImportError, ValueError) as error:
        raise BadRequest(f"export: cannot write {location}: {error}") from error
    if filesystem.exists(root):
        raise _occupied(location)
    filesystem.makedirs(root, exist_ok=True)
    filesystem.pipe_file(f"{root}/{CLAIM}", b"", mode="create")
    try:
        yield location
        filesystem.pipe_file(f"{root}/{SUCCESS}", b"")
    except BaseException:
        for path in (f"{root}/{SUCCESS}", root):  # never _SUCCESS beside a part of the files
            with suppress(FileNotFoundError):
                filesystem.rm(path, recursive=True)
        raise
    filesystem.rm(f"{root}/{CLAIM}")


def _occupied(path: str | Path) -> BadRequest:
    return BadRequest(f"export: expected a new folder, found {path} existing; name another")
