"""The main job: CTR-DNN on 2 servers and 2 workers, then the same evaluation from its checkpoint on
one server.

    python examples/demo.py                        # writes 500,000 examples of a planted model
    first python examples/demo.py --data path/train.txt  # Criteo's own file; the last part of it is
    held out

The last line is RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

from trireme.data.planted import write_planted_criteo

SCRIPT = Path(__file__).with_name("ctr_dnn.py")
HELD_OUT = 0.1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="Criteo's TSV; left out: a planted model's data")
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for everything written"
    )
    parser.add_argument(
        "--examples", type=int, default=500_000, help="planted examples to train on"
    )
    parser.add_argument("--mode", default="async", choices=("sync", "async"))
    return parser.parse_args()


def split_file(source: Path, folder: Path) -> None:
    """Hold the last tenth of a file's lines out: Criteo's lines are in the order of time."""
    with source.open("rb") as lines:
        count = sum(1 for _ in lines)
    num_train = count - max(1, int(HELD_OUT * count))
    with source.open("rb") as lines:
        for part, stop in (("train", num_train), ("test", None)):
            (folder / part).mkdir(parents=True)
            with (folder / part / "part-0.tsv").open("wb") as out:
                out.writelines(islice(lines, stop))


def launch(
    num_servers: int, out: Path, name: str, arguments: list[str]
) -> dict[str, dict[str, float]]:
    """Run the training script as a job of real processes; returns what worker 0 reports."""
    result = out / f"{name}.json"
    command = [sys.executable, "-m", "trireme.cli", "launch"]
    command += [
        "--server_num",
        str(num_servers),
        "--worker_num",
        "2",
        "--log_dir",
        str(out / f"log-{name}"),
    ]
    command += [
        str(SCRIPT),
        "--test",
        str(out / "data/test/*.tsv"),
        "--result",
        str(result),
        *arguments,
    ]
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(code)
    report: dict[str, dict[str, float]] = json.loads(result.read_text())
    return report


def main() -> None:
    arguments = parse_arguments()
    out = arguments.out
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    auc_possible = None
    if arguments.data is None:
        planted = write_planted_criteo(out / "data", examples=arguments.examples)
        auc_possible = planted["auc_possible"]
    else:
        split_file(arguments.data, out / "data")
    checkpoint = str(out / "checkpoint")
    mode = ["--mode", arguments.mode]
    train = ["--train", str(out / "data/train/*.tsv"), "--save", checkpoint]
    first = launch(2, out, "train", [*train, *mode])
    again = launch(1, out, "reload", ["--load", checkpoint, *mode])
    report = {
        "examples": first["train"]["examples"],
        "examples_per_s": round(first["train"]["examples_per_s"]),
        "auc": first["test"]["auc"],
        "auc_possible": auc_possible,
        "auc_after_reload": again["test"]["auc"],
        "servers": 2,
        "workers": first["workers"],
        "mode": first["mode"],
    }
    possible = "" if auc_possible is None else f", {auc_possible:.4f} possible"
    print(
        f"held-out AUC {report['auc']:.4f}{possible};"
        f" {report['auc_after_reload']:.4f} from the checkpoint on 1 server"
    )
    print("RESULT " + json.dumps(report))
    if report["auc"] != report["auc_after_reload"]:
        sys.exit("the AUC after the reload differs")


if __name__ == "__main__":
    main()
