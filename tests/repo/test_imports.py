"""A module imports only from lower layers of this list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.repo import tree

# Units of src/trireme, lowest first: modules, packages, or packages within one; those on one line
# do not know each other. A module belongs to the longest unit that is a prefix of its name.
LAYERS = (
    ("errors",),
    (
        "bounded_queue",
        "byte_size",
        "children",
        "drawing",
        "label",
        "lazy_names",
        "progress",
        "storage",
        "tracebacks",
    ),
    ("config",),
    ("telemetry",),
    ("_core",),
    ("accelerator", "threads", "torch_compiler"),
    ("rpc",),
    ("blocks", "initializer", "optim", "policy", "strategy"),
    ("feature_values",),
    ("table",),
    ("dense",),
    ("protocol",),
    ("rows",),
    ("device",),
    ("checkpoint.format", "interchange.formats"),
    ("coordinator", "server", "worker"),
    (
        "checkpoint.server_side",
        "checkpoint.worker_side",
        "interchange.server_side",
        "interchange.worker_side",
    ),
    ("server.log",),
    ("job",),
    ("data",),
    ("metrics",),
    ("nn",),
    ("inference",),
    ("inspect",),
    ("train",),
    ("inference.export", "interchange"),
    ("train.online",),  # which publishes exports
    ("models",),
    ("launch",),
    ("fleet",),
    ("run",),
    ("doctor", "place", "size", "top"),
    ("console",),
    ("commands",),
)
RANK = {unit: rank for rank, layer in enumerate(LAYERS) for unit in layer}


def unit(module: str) -> str:
    """The unit of trireme.worker.client.Client is `worker`; "" for the package itself."""
    parts = module.split(".")[1:]
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in RANK), "")


def own_imports(module: str) -> Iterator[tuple[int, str]]:
    """(line, module) of what a module of ours imports of ours."""
    for line, imported in tree.imports(MODULES[module]):
        if imported.startswith("trireme."):
            is_module = imported in MODULES or unit(imported) == "_core"
            yield line, imported if is_module else imported.rpartition(".")[0]


MODULES = {tree.module(path): path for path in tree.files(".py", under="src")}


def test_modules_import_only_lower_layers() -> None:
    wrong = []
    for module, path in MODULES.items():
        importer = unit(module)
        for line, imported in own_imports(module):
            lower = unit(imported)
            if importer and lower != importer and not RANK.get(lower, len(RANK)) < RANK[importer]:
                wrong.append(f"{tree.name(path)}:{line}: {importer} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_every_module_has_a_layer() -> None:
    packages = {"trireme", "trireme.__main__", "trireme.checkpoint"}
    assert {module for module in MODULES if not unit(module)} == packages
    assert {unit(module) for module in MODULES} - {""} == set(RANK) - {"_core"}


def test_no_circle_between_modules() -> None:
    arrows = {module: set(executed(module)) for module in MODULES}
    assert circle(arrows) == []


def executed(module: str) -> Iterator[str]:
    """The modules of ours that run before this one: its imports, except for types alone, and the
    packages around these, except those around itself, which run already.
    """
    for line, imported in own_imports(module):
        if line in tree.lines_for_types(MODULES[module]):
            continue
        parts = imported.split(".")
        for length in range(2, len(parts) + 1):
            name = ".".join(parts[:length])
            if name in MODULES and not f"{module}.".startswith(f"{name}."):
                yield name


def circle(arrows: Mapping[str, set[str]]) -> list[str]:
    """The nodes of a circle in the order of its arrows; empty if there is none."""
    done: set[str] = set()

    def search(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            for following in sorted(arrows.get(node, set())):
                if following != node and (nodes := search(following, [*path, node])):
                    return nodes
            done.add(node)
        return []

    return next((nodes for node in sorted(arrows) if (nodes := search(node, []))), [])


def test_core_includes_only_itself_and_the_standard_library() -> None:
    """And core/store/ssd/ what Linux offers for files."""
    wrong = []
    for path in tree.files(".h", ".cc", under="core"):
        for line, included in tree.includes(path):
            own = included.strip('"')
            is_own = any((folder / own).is_file() for folder in (tree.ROOT / "core", path.parent))
            is_standard = included.strip("<>").replace("_", "").isalpha()
            is_system = included in SYSTEM_HEADERS or path.parent.name == "ssd"
            if not is_own and not is_standard and not is_system:
                wrong.append(f"{tree.name(path)}:{line}: {included}")
    assert not wrong, "\n".join(wrong)


SYSTEM_HEADERS = {
    "<emmintrin.h>": "SSE2, part of every x86-64",
    "<immintrin.h>": "AVX, in functions chosen at run time",
    "<sanitizer/tsan_interface.h>": "words to TSan, in its builds alone",
    "<sys/mman.h>": "huge pages for the rows",
    "<sys/wait.h>": "the end of a forked child, in a test",
    "<unistd.h>": "the size of memory; the process of a pool's threads",
}


def test_no_circle_between_folders_of_the_core() -> None:
    arrows: dict[str, set[str]] = {}
    for path in tree.files(".h", ".cc", under="core"):
        folder = path.relative_to(tree.ROOT / "core").parts[0]
        included = {Path(name.strip('"<>')).parts[0] for _, name in tree.includes(path)}
        arrows.setdefault(folder, set()).update(included - {folder})
    assert circle(arrows) == []


def test_one_module_reads_the_environment() -> None:
    wrong = []
    for path in tree.files(".py", under="src"):
        text = path.read_text()
        reads = "os.environ" in text or "getenv" in text
        if reads and tree.name(path) not in ENVIRONMENT:
            wrong.append(tree.name(path))
    assert not wrong, f"read the environment in launch/environment.py: {wrong}"


ENVIRONMENT = {
    "src/trireme/launch/environment.py": "the one place",
    "src/trireme/launch/process_environment.py": "passes its own on to the processes it starts",
    "src/trireme/launch/fork_server_program.py": "sets that of a process, as an interpreter has it",
    "src/trireme/data/pipe_process.py": "passes its own on to the commands it starts",
    "src/trireme/fleet/data_generator.py": "runs in a pipe's command, which is told so",
    "src/trireme/fleet/reader_utils/common_ps.py": "runs in a reader script, which is told so",
}
