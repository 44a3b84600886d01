"""What a Predictor does.

lookup          on one thread, 10 M rows of 16 floats in mapped files, 64 Ki random keys per call:
                the weights of each key      table: the same from the trained table
predict_onednn  answers of CTR-DNN to batches of 4096 on all cores, with use_onednn
                predict: with torch's own products

The files' pages are in memory. Every call of a lookup has new keys: a measurement reads the whole
table once.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

import trireme as tr
from benchmarks.criteo import tsv_files
from benchmarks.harness import BenchError, Claim, Contest, Run, Settings
from benchmarks.macro.ctr import DIM as CTR_DIM
from benchmarks.macro.job import CTR, RULES, cross_entropy
from benchmarks.micro.bench_table import DIM, Workload, sizes
from trireme import _core
from trireme.inference import Predictor
from trireme.inference.export import export_model
from trireme.inference.row_layers import mapped
from trireme.job.embedded import embedded
from trireme.storage.checked_file import written_for_mapping


def contests(settings: Settings) -> list[Contest]:
    work, model = Exported(**sizes(settings)), _Model(settings)
    claim = Claim("lookup", "lookup", ("table",), "rows/s")
    predicted = Claim("predict_onednn", "predict_onednn", ("predict",))
    return [
        Contest({"lookup": work.lookup_frozen, "table": work.lookup}, [claim], settings.rounds, 1),
        Contest(
            {
                "predict_onednn": lambda _: model.predict(use_onednn=True),
                "predict": lambda _: model.predict(use_onednn=False),
            },
            [predicted],
            settings.rounds,
        ),
    ]


class Exported(Workload):
    """A table, and an export of it."""

    @cached_property
    def frozen(self) -> _core.FrozenTable:
        with tempfile.TemporaryDirectory() as folder:  # mapped files survive their removal
            path = Path(folder) / "all.rows"
            self._write(path)
            rows = _core.FrozenRows([str(path)], [np.frombuffer(mapped(path), np.uint8)])
        return _core.FrozenTable([rows], init_a=-0.1, init_b=0.1, seed=1, initial_weights=DIM)

    def _write(self, path: Path) -> None:
        writer = _core.FrozenWriter(encoding="float32", dim=DIM)
        with written_for_mapping(path.parent, path.name) as (file, _):
            for bucket in range(4096):
                content = self.growth.table.snapshot(bucket)
                weights = content.rows[:, : 4 * DIM]
                file.write(writer.add(content.keys, np.ascontiguousarray(weights)))
            file.write(writer.finish())

    def lookup_frozen(self, _: int) -> Run:
        frozen, calls = self.frozen, self.calls
        start = time.perf_counter()
        missing = sum(frozen.lookup(keys, self.out, self.pool) for keys in calls)
        elapsed_s = time.perf_counter() - start
        if missing:
            raise BenchError(f"lookup: expected rows for all keys, found {missing} missing")
        digest = hashlib.sha256(self.out).hexdigest()[:16]
        return self._run(elapsed_s, hash=digest, detail={})


class _Model:
    """CTR-DNN, exported after a pass over one file."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @cached_property
    def _predictors(self) -> dict[bool, Predictor]:
        batch = self._settings.pick(smoke=512, real=4096)
        data = tr.data.QueueDataset(
            tsv_files(self._settings).train[:1], schema=tr.data.criteo(), batch_size=batch
        )
        self.batches = [one for one in data.stream(0, 1) if one.num_examples == batch]
        model = CTR(tr.Table("ctr", dim=CTR_DIM, optimizer=RULES["adam"]))
        with embedded() as home, tempfile.TemporaryDirectory() as folder:
            trainer = tr.Trainer(
                model,
                torch.optim.Adam(model.parameters(), 1e-3),
                loss=cross_entropy,
                cluster=home,
                progress=False,
            )
            trainer.fit(self.batches)
            export_model(trainer, f"{folder}/export", batch=self.batches[0])
            return {use: Predictor(f"{folder}/export", use_onednn=use) for use in (False, True)}

    def predict(self, *, use_onednn: bool) -> Run:
        predictor, batches = self._predictors[use_onednn], self.batches
        predictor.predict(batches[0])  # oneDNN compiles its products
        started = time.perf_counter()
        num = sum(len(predictor.predict(batch).outputs["output"]) for batch in batches)
        return Run(num / (time.perf_counter() - started), detail={})


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["predictor", *sys.argv[1:]]))
