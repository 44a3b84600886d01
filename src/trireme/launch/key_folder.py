"""Folders of CURVE keys, as `--keys` and TRIREME_KEYS name them: which file is whose.

| File | Holds | Needed by |
|---|---|---|
| server.key | the servers' pair, secret | servers |
| clients.pub | the public keys that servers admit, one a line | servers |
| client.key | a worker's pair, secret | that worker |
| server.pub | the servers' public key | workers |
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trireme.errors import BadRequest, writing
from trireme.rpc import ClientKeys, KeyPair, ServerKeys, new_keys, read_keys, write_keys

SERVER_KEY, ADMITTED, CLIENT_KEY, SERVER_PUB = (
    "server.key",
    "clients.pub",
    "client.key",
    "server.pub",
)
SERVER_FOLDER = "server"
_NAME_CHARS_MAX = 100


def server_keys(folder: Path) -> ServerKeys:
    """What a server reads."""
    return ServerKeys.read(folder / SERVER_KEY, folder / ADMITTED)


def client_keys(folder: Path) -> ClientKeys:
    """What a worker reads."""
    return ClientKeys.read(folder / CLIENT_KEY, folder / SERVER_PUB)


def make_shared_folder(folder: Path, *, replace: bool = False) -> list[Path]:
    """One folder for servers and workers: all workers have the same pair. Returns the files.

    Raises:
        BadRequest: a file is there already and `replace` is not set.
    """
    servers, workers = new_keys(), new_keys()
    public = {ADMITTED: [(workers, "workers")], SERVER_PUB: [(servers, "servers")]}
    return _write(folder, {SERVER_KEY: servers, CLIENT_KEY: workers}, public, replace)


def make_folders(folder: Path, names: Sequence[str], *, replace: bool = False) -> list[Path]:
    """A folder for the servers, and one for each worker, which has a pair of its own. Returns the
    files.

    Raises:
        BadRequest: a name that cannot be a folder's, or comes twice; or a file is there already and
            `replace` is not set.
    """
    if len(set(names)) != len(names):
        raise BadRequest(f"keys: expected different names, found {', '.join(names)}")
    servers, workers = new_keys(), {name: new_keys() for name in names}
    folders = {name: folder / _checked_name(name) for name in names}
    own = folder / SERVER_FOLDER
    _refuse_existing([own / SERVER_KEY, own / ADMITTED], replace)
    for of in folders.values():
        _refuse_existing([of / CLIENT_KEY, of / SERVER_PUB], replace)
    admitted = [(keys, name) for name, keys in workers.items()]
    written = _write(own, {SERVER_KEY: servers}, {ADMITTED: admitted}, replace)
    for name, of in folders.items():
        public = {SERVER_PUB: [(servers, "servers")]}
        written += _write(of, {CLIENT_KEY: workers[name]}, public, replace)
    return written


def add_worker(folder: Path, name: str, *, replace: bool = False) -> list[Path]:
    """A pair for one more worker of existing keys, in a folder beside them. Servers that start
    from now on admit it. Returns the files.

    Raises:
        BadRequest: no keys of servers are here, or the worker has keys and `replace` is not set.
    """
    own = folder / SERVER_FOLDER if (folder / SERVER_FOLDER / SERVER_KEY).exists() else folder
    servers, keys = read_keys(own / SERVER_KEY), new_keys()
    public = {SERVER_PUB: [(servers, "servers")]}
    of = folder / _checked_name(name)
    old = read_keys(of / CLIENT_KEY).public if replace and (of / CLIENT_KEY).exists() else None
    written = _write(of, {CLIENT_KEY: keys}, public, replace)
    with writing(f"keys: cannot write {own / ADMITTED}"):
        lines = (own / ADMITTED).read_text("ascii").splitlines()
        kept = [line for line in lines if old is None or not line.startswith(old)]
        _replace_text(own / ADMITTED, [*kept, f"{keys.public} {name}"])
    return [*written, own / ADMITTED]


def _checked_name(name: str) -> str:
    allowed = name.replace("-", "").replace("_", "").replace(".", "")
    is_plain = allowed.isalnum() and name.isascii() and not name.startswith(".")
    if not is_plain or len(name) > _NAME_CHARS_MAX or name == SERVER_FOLDER:
        raise BadRequest(
            f"keys: expected a worker's name of letters, digits, '-', '_' and '.', not"
            f" {SERVER_FOLDER!r}, found {name!r}"
        )
    return name


def _refuse_existing(files: Sequence[Path], replace: bool) -> None:
    for file in files:
        if file.exists() and not replace:
            raise BadRequest(
                f"keys: {file} must not exist yet, found a file; --force makes new keys in its"
                " place, and what holds the old ones is no longer admitted"
            )


def _write(
    folder: Path,
    secret: dict[str, KeyPair],
    public: dict[str, list[tuple[KeyPair, str]]],
    replace: bool,
) -> list[Path]:
    """All files of a folder: pairs by name, and lists of public keys, each with a note."""
    files = [folder / name for name in (*secret, *public)]
    _refuse_existing(files, replace)
    with writing(f"keys: cannot write to {folder}"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, keys in secret.items():
            partial = folder / f".{name}.new"
            partial.unlink(missing_ok=True)
            write_keys(partial, keys)
            partial.replace(folder / name)
        for name, listed in public.items():
            _replace_text(folder / name, [f"{keys.public} {note}" for keys, note in listed])
    return files


def _replace_text(path: Path, lines: Sequence[str]) -> None:
    """Whoever reads it meanwhile finds the old lines or the new ones."""
    partial = path.with_name(f".{path.name}.new")
    partial.write_text("".join(f"{line}\n" for line in lines), "ascii")
    partial.replace(path)
