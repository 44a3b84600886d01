"""House rules that a machine can check. Exceptions are listed with their reason."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.repo import tree

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
# File or file:function -> why it is longer.
LONGER: dict[str, str] = {}

# The package holds the parameter server (tables in memory and on SSD, modes from sync to geo,
# pushes applied once, checkpoints, logs, jobs of many machines and their failures), training and
# serving (data, modules, metrics, loops, passes on devices, compute workers, export, Predictor),
# tools (launcher, console, doctor, size, place, top, inspect), reference models, and the names and
# files of Fleet and PaddleRec. A feature raises the bound by what it needs; everything else finds
# its lines elsewhere. Lower the bound to what is reached when code becomes simpler.
PACKAGE_LINES_MAX = 85_423

CODE = (".py", ".h", ".cc")

# A package takes from them what makes it, not what it offers.
MODULES_OF_NO_NAMES = ("__future__", "typing", "trireme.lazy_names")


def test_files_are_short() -> None:
    wrong = []
    for path in tree.files(*CODE):
        lines = len(path.read_text().splitlines())
        if lines > FILE_LINES_MAX and tree.name(path) not in LONGER:
            wrong.append(f"{tree.name(path)}: {lines} lines, at most {FILE_LINES_MAX}")
    assert not wrong, "\n".join(wrong)


def test_the_package_is_short() -> None:
    paths = tree.files(".py", under="src/trireme")
    assert sum(len(path.read_text().splitlines()) for path in paths) <= PACKAGE_LINES_MAX


def test_functions_are_short() -> None:
    wrong = []
    for path in tree.files(".py"):
        for node in ast.walk(tree.syntax(path)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            lines = code_lines(node)
            where = f"{tree.name(path)}:{node.name}"
            if lines > FUNCTION_LINES_MAX and where not in LONGER:
                wrong.append(f"{where}: {lines} lines, at most {FUNCTION_LINES_MAX}")
    assert not wrong, "\n".join(wrong)


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    assert node.end_lineno is not None
    total = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node) is not None:
        docstring = node.body[0]
        assert docstring.end_lineno is not None
        total -= docstring.end_lineno - docstring.lineno + 1
    return total


def in_package(path: Path) -> bool:
    return tree.PACKAGE in path.parents


def in_tests(path: Path) -> bool:
    return (tree.ROOT / "tests") in path.parents


def anywhere(path: Path) -> bool:
    return True


# Called as -> (what to do instead, where it is banned). A dotted name bans that very call.
def but_as_python_does(path: Path) -> bool:
    """Cells of notebooks are run as a kernel runs them, and a script as an interpreter runs it."""
    return tree.name(path) not in (
        "tests/users/test_notebook.py",
        "src/trireme/launch/fork_server_program.py",
    )


BANNED: dict[str, tuple[str, Callable[[Path], bool]]] = {
    "eval": ("parse what you expect", anywhere),
    "exec": ("write the code", but_as_python_does),
    "os.system": ("subprocess.run with a list", anywhere),
    "torch.load": ("safetensors", in_package),
    "print": (
        "logging, or the launcher's, the command's or the progress bar's own output",
        in_package,
    ),
    "time.sleep": ("wait for an event", in_tests),
    "time.time": ("time.monotonic, or data time", in_package),
}
MAY_PRINT = {
    "src/trireme/commands/cli.py": "the command",
    "src/trireme/fleet/util.py": "print_on_rank",
    "src/trireme/launch/": "the launcher",
    "src/trireme/progress.py": "the progress bar",
}
BANNED_IMPORTS = {
    "pickle": "msgpack for messages, safetensors and Arrow for files",
    "marshal": "msgpack",
    "shelve": "safetensors and Arrow",
}


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """Each call with its name as written: f, module.f; "" for anything deeper."""
    for node in ast.walk(tree.syntax(path)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name):
            yield node, called.id
        elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            yield node, f"{called.value.id}.{called.attr}"
        else:
            yield node, ""


def test_banned_calls_are_absent() -> None:
    wrong = []
    for path in tree.files(".py"):
        for node, called in calls(path):
            where = f"{tree.name(path)}:{node.lineno}"
            instead, applies = BANNED.get(called, ("", None))
            if called == "print" and tree.name(path).startswith(tuple(MAY_PRINT)):
                continue
            if applies is not None and applies(path):
                wrong.append(f"{where}: {called}: instead, {instead}")
            if any(k.arg == "shell" and is_true(k.value) for k in node.keywords):
                wrong.append(f"{where}: shell=True: instead, a list of arguments")
    assert not wrong, "\n".join(wrong)


def test_no_hash_table_of_the_standard_library_has_keys() -> None:
    """It takes an integer as its own hash: who chooses ids could choose them for one place."""
    wrong = [
        f"{tree.name(path)}:{number}: instead, sort the keys and search, or hash them by mix64"
        for path in tree.files(".h", ".cc")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"unordered_(map|set)<std::uint64_t\b", line) and path.parent.name != "tests"
    ]
    assert not wrong, "\n".join(wrong)


def test_functions_that_only_prefetch_are_always_inline() -> None:
    """Others GCC takes for pure, and drops the calls: nothing tells, but the time that it takes."""
    others = re.compile(r"^(?!.*TRIREME_INLINE).*\bvoid prefetch\w*\(.*{$", re.M)
    files = [path for path in tree.files(".h", ".cc") if "prefetch" in path.read_text()]
    wrong = [
        f"{tree.name(path)}: {line}" for path in files for line in others.findall(path.read_text())
    ]
    assert files
    assert not wrong, "\n".join(wrong)


def is_true(node: ast.expr) -> bool:
    return not (isinstance(node, ast.Constant) and not node.value)


def test_banned_modules_are_not_imported() -> None:
    wrong = [
        f"{tree.name(path)}:{line}: {imported}: instead, {BANNED_IMPORTS[imported.split('.')[0]]}"
        for path in tree.files(".py")
        for line, imported in tree.imports(path)
        if imported.split(".")[0] in BANNED_IMPORTS and not in_tests(path)
    ]
    assert not wrong, "\n".join(wrong)


def _top_level(module: ast.Module) -> list[ast.stmt]:
    """Statements of a module, those under `if TYPE_CHECKING:` included."""
    return [s for top in module.body for s in (top.body if isinstance(top, ast.If) else [top])]


def test_every_public_name_is_there() -> None:
    paths = [path for path in tree.files(".py", under="src") if path.name == "__init__.py"]
    modules = [importlib.import_module(tree.module(path)) for path in paths]
    assert len(modules) > 20
    wrong = [
        f"{module.__name__}.{name}"
        for module in modules
        for name in getattr(module, "__all__", ())
        if name not in dir(module) or not hasattr(module, name)
    ]
    assert not wrong, f"not there: {wrong}"


def test_public_names_are_listed_sorted_and_complete() -> None:
    """A package's `__all__` is what its `__init__` imports and assigns; all lists are sorted."""
    wrong = []
    for path in tree.files(".py", under="src"):
        listed = public_names(path)
        if path.name == "__init__.py":
            visible = sorted(name for name in visible_names(path) if name[0] != "_")
            if listed != ([visible] if visible_names(path) else []):
                wrong.append(f"{tree.name(path)}: expected {visible}, found {listed}")
        if any(names != sorted(names) for names in listed):
            wrong.append(f"{tree.name(path)}: not sorted")
    assert not wrong, "\n".join(wrong)


def public_names(path: Path) -> list[list[str]]:
    """The value of each `__all__`."""
    return [
        ast.literal_eval(node.value)
        for node in tree.syntax(path).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]


def visible_names(path: Path) -> set[str]:
    """Names that a module imports and assigns at its top level."""
    imported = {
        alias.asname or alias.name
        for node in _top_level(tree.syntax(path))
        if isinstance(node, ast.ImportFrom) and node.module not in MODULES_OF_NO_NAMES
        for alias in node.names
    }
    return imported | {
        name.id
        for node in tree.syntax(path).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }


def test_every_module_is_imported_by_another() -> None:
    imported = set()
    for path in tree.files(".py"):
        if in_tests(path):
            continue
        for _, target in tree.imports(path):
            imported |= {target, target.rpartition(".")[0]}
    wrong = [
        tree.name(path)
        for path in tree.files(".py", under="src")
        if path.name != "__init__.py"
        and tree.module(path) not in imported
        and tree.name(path) not in ENTRY_POINTS
    ]
    assert not wrong, f"imported by nobody: {wrong}"


ENTRY_POINTS = {
    "src/trireme/__main__.py": "python -m trireme",
    "src/trireme/commands/cli.py": "the command trireme",
    "src/trireme/fleet/reader_utils/common_ps.py": "found by path, by reader scripts",
}


def test_every_cpp_file_is_built_or_included() -> None:
    lists = [*tree.ROOT.glob("*/**/CMakeLists.txt"), tree.ROOT / "Makefile"]
    built = "\n".join(path.read_text() for path in lists)
    # When they are measured:
    measuring = [tree.ROOT / f"benchmarks/macro/{name}.py" for name in ("ssd", "device_pass")]
    compiled = "\n".join(path.read_text() for path in measuring)
    included = {
        target.strip('"<>').rpartition("/")[2]
        for path in tree.files(".h", ".cc")
        for _, target in tree.includes(path)
    }
    wrong = [tree.name(path) for path in tree.files(".h") if path.name not in included]
    for path in tree.files(".cc"):
        if path.name.endswith("_test.cc"):
            is_built = f"({path.name.removesuffix('_test.cc')})" in built
        elif path.parent.name == "micro":
            is_built = f'"{path.stem}"' in compiled
        else:
            is_built = f"{path.parent.name}/{path.name}" in built or f" {path.name}\n" in built
        if not is_built:
            wrong.append(tree.name(path))
    assert not wrong, f"built or included by nobody: {wrong}"


# Paths and hosts of somebody's machine. Written in pieces, so that this file passes its own test.
ELSEWHERE = re.compile("|".join(["/" + "home/", "/" + "root/", "/" + "tmp/", "/" + r"work\b"]))
REGISTRIES = re.compile("|".join(["pypi[.]" + "org", "python" + "hosted", "index-" + "url"]))
TEXT = (*CODE, ".md", ".toml", ".txt", ".json", ".yaml", ".yml", "")


def test_no_file_names_a_machine_or_a_registry() -> None:
    wrong = []
    for path in tree.files(*TEXT):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if ELSEWHERE.search(line) or REGISTRIES.search(line):
                wrong.append(f"{tree.name(path)}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)


def test_code_is_ascii_and_leaves_nothing_to_do() -> None:
    """Open work belongs into an issue, with its number beside the comment."""
    open_work = re.compile(r"\b(TODO|FIXME|XXX)\b(?!.*#\d)")
    wrong = []
    for path in tree.files(*CODE):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not line.isascii() or (open_work.search(line) and path != Path(__file__)):
                wrong.append(f"{tree.name(path)}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)


# File -> date and reason. A test that does not always run is listed here or is a failure.
SWITCHED_OFF = {
    "tests/integration/test_push_path.py": "frames name their functions from Python 3.11 on",
    "tests/real_data.py": "2026-11: the sample files may not be copied into the repository",
    "tests/property/test_table_simd.py": "2026-11: an instruction set that the machine lacks",
    "tests/unit/test_criteo.py": "2026-11: real lines; random ones of the format always run",
    "tests/integration/test_adult.py": "2026-11: real rows; planted ones of the format always run",
    "tests/integration/test_paddle_reads.py": "2026-11: Paddle; its files are read by golden tests",
    "tests/hostile/test_address_filter.py": "2026-11: a machine without IPv6; IPv4 always runs",
    "tests/integration/test_doctor.py": "2026-11: none but root may make a control group",
    "tests/unit/test_rpc_shared_memory.py": "2026-11: another user, another namespace",
    "tests/unit/test_rpc_shared_memory_peers.py": "2026-11: a kernel may have no huge pages",
    "tests/integration/conftest.py": "2026-11: none but root may mount a small disk",
    "tests/conftest.py": "2026-11: `make gpu` without a GPU; the same tests always run on the CPU",
    "tests/chromium.py": "2026-11: a machine without Chromium; what browsers get always is tested",
    "tests/device/blocks.py": "2026-11: a platform without Triton; torch operations always run",
}


def test_no_test_is_switched_off_quietly() -> None:
    wrong = []
    for path in tree.files(".py", under="tests"):
        for node in ast.walk(tree.syntax(path)):
            name = getattr(node, "attr", getattr(node, "id", None))
            is_switch = name in ("skip", "skipif", "xfail", "real_data")
            if is_switch and tree.name(path) not in SWITCHED_OFF:
                wrong.append(f"{tree.name(path)}:{node.lineno}: {name}")
    assert not wrong, "\n".join(wrong)


def test_cxx_tests_that_tsan_leaves_out_have_one_thread() -> None:
    folder = tree.ROOT / "core" / "tests"
    _, left_out = (folder / "CMakeLists.txt").read_text().split('STREQUAL "thread")')
    names = re.findall(r"trireme_test\((\w+)\)", left_out.partition("endif()")[0])
    assert names
    threads = r"\bPool\b|std::j?thread|std::async|make_device|(pool|uring)_device"
    for name in names:
        assert not re.search(threads, (folder / f"{name}_test.cc").read_text()), name
