"""The demo: CTR-DNN on 2 servers and 2 workers, then the same evaluation from its checkpoint on 1
server.

python examples/demo.py                          # 500,000 examples of a planted model
python examples/demo.py --data path/train.txt    # Criteo's own file; its last tenth is held out

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
from typing import Any

from planted.clicks import write_planted_criteo

SCRIPT = Path(__file__).with_name("ctr_dnn.py")
HELD_OUT = 0.1
WRITTEN = ("data", "checkpoint", "train", "reload")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, help="Criteo's TSV; default: data of a planted model")
    add("--out", type=Path, default=Path("demo"), help="folder for all output, which is replaced")
    add("--examples", type=int, default=500_000, help="planted examples to train on")
    add("--mode", default="async", choices=("sync", "async"))
    arguments = parser.parse_args()
    if arguments.data is not None and not arguments.data.is_file():
        parser.error(f"expected --data to be a file, found none at {arguments.data}")
    return arguments


def split_file(source: Path, folder: Path) -> None:
    """Hold out the last tenth of a file's lines, because Criteo's lines are in order of time."""
    with source.open("rb") as lines:
        count = sum(1 for _ in lines)
    num_train = count - max(1, int(HELD_OUT * count))
    with source.open("rb") as lines:
        for part, stop in (("train", num_train), ("test", None)):
            (folder / part).mkdir(parents=True)
            with (folder / part / "part-0.tsv").open("wb") as out:
                out.writelines(islice(lines, stop))


def launch(num_servers: int, out: Path, name: str, *arguments: str) -> dict[str, Any]:
    """Run the training script as a job of real processes; returns the report of worker 0."""
    folder = out / name
    folder.mkdir()
    command = [sys.executable, "-m", "trireme", "launch"]
    command += ["--server_num", str(num_servers), "--worker_num", "2"]
    command += ["--log_dir", str(folder / "log"), "--root", str(out), str(SCRIPT)]
    command += ["--test", str(out / "data/test/*.tsv"), "--result", str(folder / "result.json")]
    if code := subprocess.run([*command, *arguments], check=False).returncode:
        sys.exit(code)
    report: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return report


def main() -> None:
    arguments = parse_arguments()
    out = arguments.out
    for name in WRITTEN:  # output of an earlier run
        shutil.rmtree(out / name, ignore_errors=True)
    auc_possible = None
    if arguments.data is None:
        print(f"writing {arguments.examples:,} examples of a planted model to {out / 'data'}")
        planted = write_planted_criteo(out / "data", examples=arguments.examples)
        auc_possible = planted["auc_possible"]
    else:
        print(f"splitting {arguments.data} into {out / 'data'}")
        split_file(arguments.data, out / "data")
    sys.stdout.flush()  # before the processes write
    mode, checkpoint = ["--mode", arguments.mode], str(out / "checkpoint")
    files = str(out / "data/train/*.tsv")
    first = launch(2, out, "train", "--train", files, "--save", checkpoint, *mode)
    again = launch(1, out, "reload", "--load", checkpoint, *mode)
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
