"""CTR-DNN for some seconds, with or without concurrent checkpoints. Runs under trireme launch.

After a pass over all files, so that the tables no longer grow, it trains on them repeatedly until
the time is over. It writes one JSON object to --out: examples/s, and the servers' memory before and
at its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import trireme as tr
from benchmarks.macro.job import CTR, cross_entropy


class Timed:
    """A dataset's streams, epoch after epoch until the time is over."""

    def __init__(self, dataset: tr.data.QueueDataset, seconds: float) -> None:
        self._dataset, self._seconds = dataset, seconds

    def stream(self, index: int, num_streams: int, *, epoch: int) -> Iterator[tr.data.Batch]:
        until = time.monotonic() + self._seconds
        while True:
            with self._dataset.stream(index, num_streams, epoch=epoch) as stream:
                for batch in stream:
                    if time.monotonic() > until:
                        return
                    yield batch


def servers() -> list[Path]:
    """Folders in /proc of the servers: the other processes of the launcher."""
    folders = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
        except OSError:
            continue  # it has ended meanwhile
        if f"\nPPid:\t{os.getppid()}\n" in text and status.parent.name != str(os.getpid()):
            folders.append(status.parent)
    return folders


def kib(process: Path, field: str) -> int:
    [line] = [line for line in (process / "status").read_text().splitlines() if field in line]
    return int(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--every_s", type=float)
    parser.add_argument("--files", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tr.init()
    torch.manual_seed(1)
    rows = tr.Table("ctr", dim=args.dim, optimizer=tr.optim.Adam(lr=1e-3), seed=1)
    model = CTR(rows)
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    strategy = tr.Strategy("async")
    trainer = tr.Trainer(
        model, adam, loss=cross_entropy, strategy=strategy, threads=args.threads, progress=False
    )
    dataset = tr.data.QueueDataset(args.files, schema=tr.data.criteo(), batch_size=args.batch)
    trainer.fit(dataset)
    before = sum(kib(process, "VmRSS") for process in servers())
    for process in servers():
        (process / "clear_refs").write_text("5")  # resets VmHWM
    with tempfile.TemporaryDirectory(prefix="saved_", dir=args.out.parent) as folder:
        saves: dict[str, Any] = {}
        if args.every_s is not None:
            saves["checkpoints"] = tr.Checkpoints(folder, every_s=args.every_s, keep=1)
        figures = trainer.fit(Timed(dataset, args.seconds), **saves)
        numbers = [int(path.name) for path in Path(folder).iterdir() if path.name.isdecimal()]
    peak = sum(kib(process, "VmHWM") for process in servers())
    result = {
        "examples_per_s": figures["examples_per_s"],
        "saves": max(numbers, default=1) - 1,  # without the one at the end
        "server_mib": round(before / 1024, 1),
        "server_peak": round(peak / before, 3),
        "rows": sum(stats["tables"]["ctr"]["rows"] for stats in trainer.cluster.client.stats()),
    }
    args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
