"""A process that loads torch, and forks processes of a job: see fork_server.py.

Run by the launcher as `fork_server_program.py LAUNCHER ROOM`, with a socket of orders as stdin. For
each order it forks twice and lets the process between the two end, so that the launcher, which
adopts orphans meanwhile, becomes the parent of the second one. That executes the command: what it
sees of itself is what `python ARGUMENTS` would see, except that torch is loaded and that
/proc/PID/environ has less.
"""

import contextlib
import ctypes
import fcntl
import gc
import io
import json
import os
import runpy
import socket
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

# An order is this byte, sent with descriptors; then HEADER_BYTES with the length of the text; then
# the text. The descriptors are that of the byte that says go, the output, and those to pass on.
START = b"."
HEADER_BYTES = 4
FDS_MAX = 8
READY = "ready"
ANSWER_BYTES_MAX = 1 << 10
FORK_SERVER = __file__

_NAME = "trireme launch: has loaded torch, to fork processes of the job"
_ARROW = "JE_ARROW_MALLOC_CONF"
_ARG_START, _ARG_END = 48, 49  # fields of /proc/PID/stat: proc(5)
_FIRST_AFTER_NAME = 3
_NO_SCRIPT = 2  # the exit code of python


def main() -> None:
    launcher = int(sys.argv[1])
    orders = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    show_command([_NAME])
    if os.getppid() == launcher:
        load()
        obstacle = find_obstacle({0, 1, 2, orders.fileno()})
    else:  # which would not adopt what is forked here
        obstacle = "sys.executable runs Python in another process than its own"
    if obstacle:
        orders.sendall(obstacle.encode()[:ANSWER_BYTES_MAX])
        return
    orders.sendall(READY.encode())
    while order := next_order(orders):
        text, fds = order
        if not fork(orders, fds):
            orders.close()
            become(json.loads(text), fds, launcher)
            return


def load() -> None:
    """Load torch, and what all roles need."""
    if not getattr(sys.flags, "safe_path", False):  # since Python 3.11
        del sys.path[0]  # the folder of this program
    sys.path.append(str(Path(__file__).parents[2]))  # of trireme, which the launcher may run there
    # The allocator of Arrow would start a thread here, which no fork would have.
    is_chosen = _ARROW in os.environ
    os.environ.setdefault(_ARROW, "background_thread:false")
    import torch  # noqa: F401

    import trireme.checkpoint.format.block_files
    import trireme.interchange.formats.named_columns
    import trireme.launch.init
    import trireme.protocol.block_messages
    import trireme.rows.wide_rows
    import trireme.rpc
    import trireme.telemetry.endpoint
    import trireme.telemetry.registry
    import trireme.threads  # noqa: F401

    if not is_chosen:
        del os.environ[_ARROW]
    sys.path.pop()
    gc.freeze()  # else each fork copies all of that as it searches for cycles at its end


def find_obstacle(own_fds: set[int]) -> str:
    """Why this process cannot be forked."""
    # A fork ends the threads of libraries that start them again when they need them (OpenBLAS).
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    tasks = os.listdir("/proc/self/task")
    if len(tasks) > 1:
        names = [_read(f"/proc/self/task/{task}/comm").strip() for task in tasks]
        return f"a library has started threads as it was loaded: {', '.join(names)}"
    opened = []
    for fd in set(map(int, os.listdir("/proc/self/fd"))) - own_fds:
        with contextlib.suppress(FileNotFoundError):  # the one that listed them
            opened.append(os.readlink(f"/proc/self/fd/{fd}"))
    if opened:  # a device of CUDA, for example, which no fork can use
        return f"a library has opened files as it was loaded: {', '.join(opened)}"
    return ""


def next_order(orders: socket.socket) -> tuple[bytes, list[int]] | None:
    """The text and the descriptors of the next order; None at the end of the socket."""
    start, fds, _, _ = socket.recv_fds(orders, len(START), FDS_MAX)
    header = orders.recv(HEADER_BYTES, socket.MSG_WAITALL) if start else b""
    size = int.from_bytes(header, "little")
    text = orders.recv(size, socket.MSG_WAITALL) if header else b""
    return (text, fds) if header and len(text) == size else None


def fork(orders: socket.socket, fds: list[int]) -> bool:
    """Fork a process whose parent ends. Close the descriptors of the order, which may listen at an
    address that the next process needs, and only then report its id. False in that process.
    """
    known, made = os.pipe()
    try:
        if (child := os.fork()) == 0:
            try:
                grandchild = os.fork()
            except OSError as error:
                os.write(made, _cannot(error))
                os._exit(1)
            if grandchild == 0:
                return False
            os.write(made, b"%d" % grandchild)
            os._exit(0)
        os.waitpid(child, 0)  # now the other one has its new parent
        os.set_blocking(known, False)
        answer = os.read(known, ANSWER_BYTES_MAX)
    except OSError as error:
        answer = _cannot(error)
    finally:
        os.close(known)
        os.close(made)
    for fd in fds:
        os.close(fd)
    orders.sendall(answer)
    return True


def _cannot(error: OSError) -> bytes:
    return f"cannot fork: {error.strerror}".encode()


def become(order: dict[str, Any], fds: list[int], launcher: int) -> None:
    """Execute the command of an order, in its session, with its output and its environment.

    The launcher knows this process when it sends a byte, and otherwise does not want it.
    """
    from trireme.children.keeper_program import die_with
    from trireme.launch.environment import note_load

    os.setsid()
    go, output, *passed = fds
    if not os.read(go, 1):
        os._exit(0)
    os.close(go)
    die_with(launcher)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    pass_on(passed, order["fds"])
    os.environ.update(order["variables"])
    note_load()
    draw_anew()
    show_command(order["command"])
    sys.orig_argv[:] = order["command"]
    run(order["command"][1:])


def draw_anew() -> None:
    """Have random what modules drew as they were loaded; `random` does so itself, and torch begins
    with the same number in every process.
    """
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if processes := sys.modules.get("multiprocessing.process"):
        processes.current_process().authkey = os.urandom(32)


def pass_on(fds: list[int], numbers: list[int]) -> None:
    """Give descriptors the numbers that they have in the launcher."""
    above = max(numbers, default=0) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def show_command(words: list[str]) -> None:
    """Let `ps` show these words, in the place of the arguments that this process has got. If the
    last byte is not 0, the kernel shows what is there up to the first one that is: proc(5).
    """
    fields = _read("/proc/self/stat").rpartition(") ")[2].split()
    begin, end = (int(fields[field - _FIRST_AFTER_NAME]) for field in (_ARG_START, _ARG_END))
    text = b" ".join(map(os.fsencode, words))[: end - begin - 2]
    ctypes.memmove(begin, text.ljust(end - begin - 1, b"\0") + b".", end - begin)


def run(arguments: list[str]) -> None:
    """Run a script, or -m MODULE, as python does, as the module __main__."""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    vars(module)["__builtins__"] = sys.modules["builtins"]
    sys.argv[:] = arguments
    is_module = arguments[0] == "-m"
    folder = os.getcwd() if is_module else os.path.dirname(os.path.realpath(arguments[0]))
    if not getattr(sys.flags, "safe_path", False):
        if hides_loaded(folder):  # nothing of the program has run yet
            os.execv(sys.executable, [sys.executable, *arguments])
        sys.path.insert(0, folder)
    try:
        if is_module:
            del sys.argv[1]  # which runpy reads from its argument
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]  # as python -m does
        else:
            run_script(arguments[0], module)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        show_error(error)
        sys.exit(1)


def run_script(script: str, module: ModuleType) -> None:
    path = os.path.join(os.getcwd(), script)
    vars(module).update(
        {
            "__annotations__": {},
            "__cached__": None,
            "__file__": path,
            "__loader__": SourceFileLoader("__main__", path),
        }
    )
    try:
        with io.open_code(path) as file:
            text = file.read()
    except OSError as error:  # it was there when the job began
        print(f"{sys.executable}: can't open file {path!r}: {error}", file=sys.stderr)
        sys.exit(_NO_SCRIPT)
    exec(compile(text, path, "exec", dont_inherit=True), vars(module))


def hides_loaded(folder: str) -> bool:
    """Whether Python, which looks first into this folder, would load something else from there than
    what has been loaded under that name.
    """
    for entry in os.scandir(folder):
        name = entry.name.partition(".")[0]
        module = sys.modules.get(name)
        if module is None or name in ("__main__", *sys.builtin_module_names):
            continue
        path = os.path.join(entry.path, "__init__.py") if entry.is_dir() else entry.path
        if not path.endswith((".py", ".so")) or not os.path.isfile(path):
            continue
        loaded = getattr(module, "__file__", None)
        if loaded is None or not os.path.samefile(loaded, path):
            return True
    return False


def show_error(error: BaseException) -> None:
    """Show what ends the program, without the calls of this file, which are its first ones."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    error.__traceback__ = traceback
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
    sys.excepthook(type(error), error, traceback)


def _read(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read()


if __name__ == "__main__":
    main()
