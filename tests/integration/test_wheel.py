"""The wheel, built from this tree and installed into a clean environment, trains from an empty
folder.

The environment sees the dependencies of the running one, through a path file, but not its trireme:
nothing is fetched from a network.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from scikit_build_core.build import build_sdist

from tests.integration.criteo_folder import write_criteo_folder
from tests.repo import tree

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
WAIT_S = 600.0

pytestmark = pytest.mark.timeout(900)  # the core may have to be compiled


def run(*command: str, cwd: Path) -> str:
    """Its output, both streams; without the variables that lead Python to the source tree."""
    hidden = ("PYTHONPATH", "PYTHONHOME")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    # cmake and ninja of this environment, as `make setup` runs it.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    result = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(*PIP, "wheel", ".", "--no-build-isolation", "--no-deps", "-w", str(folder), cwd=ROOT)
    (actual,) = folder.iterdir()
    return actual


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of a new environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("clean") / "env"
    venv.create(folder, symlinks=True)
    interpreter = str(folder / "bin" / "python")
    libraries = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv" if os.name == "posix" else None, vars=paths))
    (site / "dependencies.pth").write_text("\n".join(libraries) + "\n")
    run(*PIP, "--python", interpreter, "install", "--no-deps", "--no-index", str(wheel), cwd=folder)
    return interpreter


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"trireme"}
    assert any(name.startswith("trireme/_core.") and name.endswith(".so") for name in names)
    for needed in (
        "trireme/py.typed",
        "trireme/_core.pyi",
        "trireme/children/keeper_program.py",
        "trireme/fleet/reader_utils/common_ps.py",
        "trireme/models/lr.yaml",
    ):
        assert needed in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_source_distribution_holds_what_a_build_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    archive = tmp_path / build_sdist(str(tmp_path))
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    ours = map(tree.name, tree.files(".py", ".h", ".cc", ".txt", ".yaml", ".toml", ".md"))
    left_out = {"tests", "benchmarks"}
    needed = {name for name in ours if not left_out & set(name.split("/"))}
    assert needed | {"LICENSE", "PKG-INFO", "src/trireme/py.typed"} <= names
    assert not [name for name in names if left_out & set(name.split("/"))]
    assert not [name for name in names if name.startswith("build/") or name.endswith(".so")]


def test_wheel_trains_in_a_clean_environment(python: str, tmp_path: Path) -> None:
    write_criteo_folder(tmp_path)
    where = run(python, "-c", "import trireme; print(trireme.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(Path(python).parents[1])
    script = tmp_path / "train.py"
    script.write_text((ROOT / "examples" / "train.py").read_text())
    output = run(python, script.name, cwd=tmp_path)
    assert "trireme: embedded" in output
    assert "'examples': 2000" in output
    assert (tmp_path / "ckpt" / "1").is_dir()


def test_wheel_brings_the_command(python: str, tmp_path: Path) -> None:
    command = str(Path(python).with_name("trireme"))
    assert "trireme-ps 0." in run(command, "version", cwd=tmp_path)
    assert "nothing prevents a job" in run(command, "doctor", cwd=tmp_path)
    write_criteo_folder(tmp_path)
    script = str(ROOT / "examples" / "train.py")
    options = ["--server_num", "1", "--worker_num", "1"]
    output = run(command, "launch", *options, script, cwd=tmp_path)
    assert "1 server and 1 worker ended well" in output
