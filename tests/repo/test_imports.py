"""Arrows point one way: a module imports only what stands before it in this list."""

from __future__ import annotations

from tests.repo import tree

# Units of src/trireme, lowest first; those on one line do not know each other.
LAYERS = (
    ("errors",),
    ("children", "drawing"),
    ("config",),
    ("telemetry",),
    ("_core",),
    ("rpc",),
    ("blocks", "initializer", "optim", "policy", "strategy"),
    ("table",),
    ("ps",),
    ("cluster",),
    ("data",),
    ("metrics",),
    ("nn",),
    ("inference",),
    ("inspect",),
    ("train",),
    ("models",),
    ("launch",),
    ("fleet",),
    ("run",),
    ("size", "top"),
    ("cli",),
)
RANK = {unit: rank for rank, layer in enumerate(LAYERS) for unit in layer}


def unit(module: str) -> str:
    """`ps` for trireme.ps.client.pull; "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def test_modules_import_only_lower_layers() -> None:
    wrong = []
    for path in tree.files(".py", under="src"):
        importer = unit(tree.module(path))
        for line, imported in tree.imports(path):
            if not imported.startswith("trireme") or not importer:
                continue
            lower = unit(imported)
            if lower != importer and not RANK.get(lower, len(LAYERS)) < RANK[importer]:
                wrong.append(f"{tree.name(path)}:{line}: {importer} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_every_unit_has_a_layer() -> None:
    found = {unit(tree.module(path)) for path in tree.files(".py", under="src")} - {""}
    assert found == set(RANK) - {"_core"}


def test_core_includes_only_itself_and_the_standard_library() -> None:
    wrong = []
    for path in tree.files(".h", ".cc", under="core"):
        for line, included in tree.includes(path):
            own = included.strip('"')
            is_own = any((folder / own).is_file() for folder in (tree.ROOT / "core", path.parent))
            is_standard = included.strip("<>").replace("_", "").isalpha()
            if not is_own and not is_standard and included not in SYSTEM_HEADERS:
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


def test_only_roles_reads_the_environment() -> None:
    wrong = []
    for path in tree.files(".py", under="src"):
        text = path.read_text()
        reads = "os.environ" in text or "getenv" in text
        if reads and tree.name(path) not in ENVIRONMENT:
            wrong.append(tree.name(path))
    assert not wrong, f"read the environment in launch/roles.py: {wrong}"


ENVIRONMENT = {
    "src/trireme/launch/roles.py": "the one place",
    "src/trireme/launch/local.py": "hands its own on to the processes it starts",
    "src/trireme/data/pipe.py": "hands its own on to the commands it starts",
    "src/trireme/fleet/generator.py": "runs in a pipe's command, which is told so",
    "src/trireme/fleet/reader_utils/common_ps.py": "runs in a reader script, which is told so",
}
