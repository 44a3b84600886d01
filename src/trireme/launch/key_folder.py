"""Folders of CURVE keys, which `--keys` and TRIREME_KEYS name.

| File | Holds | Needed by |
|---|---|---|
| server.key | the servers' pair, secret | servers, compute workers |
| clients.pub | the public keys that servers admit, one a line | servers, compute workers |
| client.key | a worker's or compute worker's pair, secret | that process |
| server.pub | the servers' public key | workers, compute workers |
"""

from collections.abc import Sequence
from pathlib import Path

from trireme.errors import BadRequest, is_file, writing
from trireme.rpc import ClientKeys, KeyPair, ServerKeys, new_keys, read_keys, write_keys

SERVER_KEY, ADMITTED = "server.key", "clients.pub"
CLIENT_KEY, SERVER_PUB = "client.key", "server.pub"
SERVER_FOLDER = "server"
_NAME_CHARS_MAX = 100


def server_keys(folder: Path) -> ServerKeys:
    """The keys of a server."""
    return ServerKeys.read(folder / SERVER_KEY, folder / ADMITTED)


def client_keys(folder: Path) -> ClientKeys:
    """The keys of a worker."""
    return ClientKeys.read(folder / CLIENT_KEY, folder / SERVER_PUB)


def make_shared_folder(folder: Path, *, replace: bool = False) -> list[Path]:
    """Write one folder for servers and workers, with one pair for all workers. Returns the files.
    Raises BadRequest: a file exists and `replace` is not set.
    """
    servers, workers = new_keys(), new_keys()
    public = {ADMITTED: [(workers, "workers")], SERVER_PUB: [(servers, "servers")]}
    return _write(folder, {SERVER_KEY: servers, CLIENT_KEY: workers}, public, replace)


def make_folders(
    folder: Path, names: Sequence[str], *, compute: Sequence[str] = (), replace: bool = False
) -> list[Path]:
    """Write a folder for the servers, and one with a pair of its own for each worker. Returns the
    files. Raises BadRequest: an invalid or repeated name, or a file exists and `replace` is not
    set.

    compute: those of `names` that are compute workers: they also serve, with the servers' keys.
    """
    if len(set(names)) != len(names):
        raise BadRequest(f"keys: expected different names, found {', '.join(names)}")
    servers, workers = new_keys(), {name: new_keys() for name in names}
    folders = {name: folder / _checked_name(name) for name in names}
    own = folder / SERVER_FOLDER
    serving = [own, *(folders[name] for name in compute)]
    new = [f / name for f in folders.values() for name in (CLIENT_KEY, SERVER_PUB)]
    new += [f / name for f in serving for name in (SERVER_KEY, ADMITTED)]
    _refuse_existing(new, replace)
    admitted = [(keys, name) for name, keys in workers.items()]
    written = []
    for one in serving:
        written += _write(one, {SERVER_KEY: servers}, {ADMITTED: admitted}, replace)
    public = {SERVER_PUB: [(servers, "servers")]}
    for name, worker_folder in folders.items():
        written += _write(worker_folder, {CLIENT_KEY: workers[name]}, public, replace)
    return written


def add_worker(folder: Path, name: str, *, replace: bool = False) -> list[Path]:
    """Write a pair for another worker, in a folder beside existing keys. Servers that start from
    now on admit it. Returns the files. Raises BadRequest: there are no servers' keys, or the worker
    has keys and `replace` is not set.
    """
    own = folder / SERVER_FOLDER if is_file(folder / SERVER_FOLDER / SERVER_KEY) else folder
    servers, keys = read_keys(own / SERVER_KEY), new_keys()
    public = {SERVER_PUB: [(servers, "servers")]}
    worker_folder = folder / _checked_name(name)
    key_file = worker_folder / CLIENT_KEY
    old = read_keys(key_file).public if replace and is_file(key_file) else None
    written = _write(worker_folder, {CLIENT_KEY: keys}, public, replace)
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
        if is_file(file) and not replace:
            raise BadRequest(
                f"keys: expected no file {file}, found one; --force replaces its keys, and holders"
                " of the old ones are no longer admitted"
            )


def _write(
    folder: Path,
    secret: dict[str, KeyPair],
    public: dict[str, list[tuple[KeyPair, str]]],
    replace: bool,
) -> list[Path]:
    """Write a folder: key pairs by file name, and lists of public keys, each key with a note."""
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
    """Replace a file at once: readers see the old lines or the new ones."""
    partial = path.with_name(f".{path.name}.new")
    partial.write_text("".join(f"{line}\n" for line in lines), "ascii")
    partial.replace(path)
