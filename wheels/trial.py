"""Install a wheel into a clean environment, and use it as one who has nothing else of Trireme.

Run as `python trial.py WHEEL`, with the Python that the wheel is for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 1800  # of a command: torch may have gigabytes


def main() -> None:
    (wheel,) = sys.argv[1:]
    env = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "TRIREME_"))}
    with tempfile.TemporaryDirectory() as folder:

        def run(*command: str | Path) -> str:
            return output(command, Path(folder), env)

        programs = Path(folder, "environment", "bin")
        pip = (programs / "python", "-m", "pip", "--disable-pip-version-check")
        run(sys.executable, "-m", "venv", programs.parent)
        run(
            *pip,
            "install",
            "-c",
            ROOT / "constraints.txt",
            "torch",
            "pandas",
            Path(wheel).resolve(),
        )
        run(*pip, "check")
        where = run(programs / "python", "-c", "import trireme; print(trireme.__file__)")
        assert where.startswith(folder), where
        run(programs / "trireme", "version")
        run(programs / "python", "-m", "trireme", "doctor")
        shutil.copy(ROOT / "examples" / "ratings.py", folder)
        run(programs / "python", "ratings.py")
        job = ("--server_num", "1", "--worker_num", "1", "ratings.py")
        run(programs / "trireme", "launch", *job)


def output(command: Sequence[str | Path], folder: Path, env: dict[str, str]) -> str:
    """What a command prints, in a folder outside this repository."""
    print("$", *command, flush=True)
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    print(done.stdout, flush=True)
    if done.returncode:
        sys.exit(f"trial: {Path(command[0]).name} exits with {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
