"""Runs the models of PaddleRec as they are: their YAML, their readers, their sample data.

python -m benchmarks.paddlerec FOLDER [--only TEXT] [--limit_s S] [--page docs/paddlerec.md]

Each YAML file whose training data lie in FOLDER trains alone, trains as a job of one server and two
workers, infers, and starts warm from what it has saved. One that starts from what a neighbour
saves gets that first. What is changed is what docs/paddlerec.md says: the import of each reader,
and the model's name. Epochs are cut to one. The page gets a table with the sentence that a user
gets where a run fails. Some readers import h5py, cv2 or scipy, which may be on PYTHONPATH; the
sample data of metaheac were pickled by pandas 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trireme.config import Config
from trireme.errors import BadRequest
from trireme.run.model_source import zoo_name

_ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- made by `make paddlerec` -->\n", "<!-- end -->\n"
STEPS = ("train", "launch", "infer", "warm start")
_IMPORTS = (
    (r"^import paddle\.distributed\.fleet as fleet", "import trireme.fleet as fleet"),
    (r"^from paddle\.io import", "from torch.utils.data import"),
    (r"^import paddle$", "import trireme.fleet.paddle as paddle"),
)
_OK = "yes"


@dataclass(frozen=True)
class Case:
    """A YAML file of PaddleRec, relative to its `models`, and the zoo's name of its model."""

    path: Path
    model: str | None


def find_cases(folder: Path, only: str = "") -> Iterator[Case]:
    """The YAML files below FOLDER/models whose training data are there, in order."""
    models = folder / "models"
    for path in sorted(models.rglob("*.yaml")):
        try:
            data = Config.load(path).get("runner.train_data_dir", None)
        except BadRequest:
            continue
        places = data if isinstance(data, list) else [data]
        is_there = all(isinstance(one, str) and (path.parent / one).exists() for one in places)
        if is_there and only in str(path.relative_to(models)):
            yield Case(path.relative_to(models), zoo_name(path.parent))


def run_case(folder: Path, case: Case, limit_s: float) -> dict[str, str]:
    """ "yes" for each step that ran, else the reason."""
    with tempfile.TemporaryDirectory(prefix="paddlerec-") as place:
        tree = Path(place) / "models"
        # Some paths lead to a neighbour: ../data
        top = case.path.parent if case.path.parent.parent.name != "treebased" else Path("treebased")
        shutil.copytree(folder / "models" / top, tree / top)
        where = tree / case.path.parent
        for reader in where.glob("*.py"):
            _change_imports(reader)
        # Some commands lead to their script from the root of the clone.
        is_from_root = "models/" in str(
            Config.load(tree / case.path).get("runner.pipe_command", "")
        )
        start = Path(place) if is_from_root else where
        return _run_steps(start, tree / case.path, case, limit_s)


def _change_imports(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.name in ("model.py", "net.py", "static_model.py", "dygraph_model.py"):
        return
    for old, new in _IMPORTS:
        text = re.sub(old, new, text, flags=re.MULTILINE)
    path.write_text(text, encoding="utf-8")


def _run_steps(where: Path, path: Path, case: Case, limit_s: float) -> dict[str, str]:
    command = [sys.executable, "-m", "trireme"]
    one = [f"model={case.model}"] if case.model else []
    one += ["runner.epochs=1", "runner.infer_start_epoch=0", "runner.infer_end_epoch=1"]
    start_key, before = start_of(path)
    if before is not None:
        run = [*command, "run", "-m", str(before.relative_to(where)), "-o", *one]
        if (result := outcome(run, where, path.parent, limit_s)) != _OK:
            return dict.fromkeys(STEPS, "-") | {"train": result}
    one += ["runner.model_save_path=saved", "runner.infer_load_path=saved"]
    yaml = ["-m", str(path.relative_to(where)), "-o", *one]
    job = ["launch", "--server_num", "1", "--worker_num", "2"]
    steps = {
        "train": ["run", *yaml],
        "launch": [*job, *yaml, "runner.model_save_path=saved_job"],
        "infer": ["run", "--infer", *yaml],
        "warm start": [
            "run", *yaml, f"{start_key}=saved/0", "runner.model_save_path=saved_warm",
        ],
    }  # fmt: skip
    results: dict[str, str] = {}
    for name, arguments in steps.items():
        if name != "train" and results["train"] != _OK:
            results[name] = "-"  # the same reason, or no saved model
            continue
        results[name] = outcome([*command, *arguments], where, path.parent, limit_s)
    return results


def start_of(path: Path) -> tuple[str, Path | None]:
    """The key of the model that a YAML file starts from, and the file beside it that saves this
    model, if the key has a value. The first one whose training data are there counts.
    """
    config = Config.load(path)
    keys = ("runner.warmup_model_path", "runner.model_init_path")
    key = next((key for key in keys if config.get(key, None)), keys[0])
    start = config.get(key, None)
    for other in sorted(path.parent.glob("*.yaml")) if start else []:
        saving = Config.load(other)
        data = path.parent / str(saving.get("runner.train_data_dir", ""))
        if saving.get("runner.model_save_path", None) == str(Path(start).parent) and data.is_dir():
            return key, other
    return key, None


def outcome(command: Sequence[str], where: Path, folder: Path, limit_s: float) -> str:
    """Run a command in a process group of its own; all of it ends at the limit."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PADDLE", "TRIREME"))}
    path = os.pathsep.join([str(_ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        command, cwd=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env=environment | {"PYTHONPATH": path},
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"no end within {limit_s:g} s"
    return _OK if process.returncode == 0 else reason(output, folder)


def reason(output: str, folder: Path) -> str:
    """The last sentence of an error in the output, without paths of this machine."""
    lines = [line.strip().lstrip("| ") for line in output.splitlines() if line.strip()]
    ours = [line for line in lines if re.match(r"trireme \w+: error: ", line)]
    errors = ours or [line for line in lines if re.match(r"\w*(Error|Request)\b.*: ", line)]
    sentence = (errors or lines or ["no output"])[-1]
    if sentence.endswith(":"):
        sentence += f" {lines[-1]}"
    sentence = re.sub(r"of what '.*' makes of it", "of what the reader makes of it", sentence)
    sentence = re.sub(r"pipe_command '.*' on ", "pipe_command on ", sentence)
    for path in (folder.resolve(), folder):
        sentence = sentence.replace(f"{path}/", "").replace(str(path), ".")
    return sentence if len(sentence) <= 300 else f"{sentence[:300]} ..."


def table(results: Sequence[tuple[Case, dict[str, str]]]) -> str:
    """The results as Markdown; reasons are numbered, and stand below."""
    reasons: dict[str, int] = {}
    lines = [f"| YAML | model | {' | '.join(STEPS)} |", "|---" * (2 + len(STEPS)) + "|"]
    for case, cells in results:
        texts = [
            text if text in (_OK, "-") else f"no ({reasons.setdefault(text, len(reasons) + 1)})"
            for text in (cells[step] for step in STEPS)
        ]
        model = f"`{case.model}`" if case.model else "-"
        lines.append(f"| {case.path} | {model} | {' | '.join(texts)} |")
    notes = [f"{number}. `{text}`" for text, number in reasons.items()]
    return "\n".join([*lines, "", *notes] if notes else lines) + "\n"


def write_page(page: Path, text: str) -> None:
    """Put the table between the marks of the page. Raises ValueError: no marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{page}: expected the marks {BEGIN.strip()} and {END.strip()}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def _read(path: Path | None) -> dict[str, dict[str, str]]:
    """The cells by YAML file that an earlier call has written; none without a file."""
    if path is None or not path.is_file():
        return {}
    return dict(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paddlerec", description=__doc__)
    parser.add_argument("folder", type=Path, help="a clone of PaddleRec")
    parser.add_argument("--only", default="", help="YAML files whose path has this text")
    parser.add_argument("--limit_s", type=float, default=2400.0, help="of each run")
    parser.add_argument("--results", type=Path, help="kept there; what is there is not run again")
    parser.add_argument("--page", type=Path, help="the page that gets the table")
    arguments = parser.parse_args(argv)
    kept = _read(arguments.results)
    results = []
    for case in find_cases(arguments.folder, arguments.only):
        cells = kept.get(str(case.path))
        if cells is None:
            cells = run_case(arguments.folder, case, arguments.limit_s)
            print(case.path, json.dumps(cells), flush=True)
            if arguments.results is not None:
                with arguments.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([str(case.path), cells]) + "\n")
        results.append((case, cells))
    if not results:
        parser.error(f"expected YAML files with sample data below {arguments.folder}/models")
    if arguments.page is not None:
        write_page(arguments.page, table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
