"""A trainer that a random generator leads through its operations. Lives of one seed are the same
whatever holds the rows: memory, SSD, a pass, a window, or a new process after each save.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import nn

import trireme as tr
from tests.long import pick
from trireme.data import Batch
from trireme.errors import TriremeError
from trireme.inference import Predictor
from trireme.inference.export import export_model
from trireme.job.embedded import embedded
from trireme.server.row_tier import RowTier

DAY_S = 86_400
NUM_IDS = 12_000
BATCH_SIZE = 256
FEATURES = ["a", "b"]
OPERATIONS = [
    *["fit"] * 3,
    *["evaluate", "new_rate", "new_day", "shrink", "import_rows", "remove_rows"],
    *["save_full", "save_base", "save_delta", "load", "export_parquet"],
    *pick(short=[], long=["export_model"]),  # takes longer than all others
]
HOLDERS = ["ssd", "pass", "window", "reborn"]
SSD_MEMORY = 12 << 20
DTYPES = ["float32", "float32", "bfloat16", "float16"]
NUM_IN_PASSES = 2
SHOW_CLICK = tr.policy.ShowClick("show", "label")
RULES = [
    tr.optim.SGD(lr=0.1),
    tr.optim.SGD(lr=0.1, momentum=0.9),
    tr.optim.Adagrad(lr=0.1),
    tr.optim.Adagrad(lr=0.1, weight_decay=0.01),
    tr.optim.Adam(lr=0.01),
    tr.optim.Adam(lr=0.01, bias_correction="row"),
    tr.optim.FTRL(lr=0.1),
    tr.optim.FleetAdagrad(lr=0.05),
    tr.optim.FleetAdam(lr=0.01),
]
DENSE = [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad]


# Of a table: what `Table` takes besides rule and dims. Passes can hold the first two.
POLICIES: list[dict[str, Any]] = [
    {},
    {"policy": tr.policy.Policy(ttl_s=2 * DAY_S)},
    {
        "policy": tr.policy.Policy(ttl_s=3 * DAY_S, max_rows=5000),
        "admit": tr.policy.CountFilter(3),
    },
    {"policy": tr.policy.Policy(max_rows=4500), "admit": tr.policy.Probability(0.7)},
    {
        "policy": tr.policy.CtrCommonAccessor(
            show_click=SHOW_CLICK,
            embedx_threshold=2.0,
            delete_threshold=0.3,
            delete_after_unseen_days=2,
        ),
        "absent": "zeros",
    },
    {
        "policy": tr.policy.SparseAccessor(show_click=SHOW_CLICK, embedx_threshold=2.0),
        "absent": "zeros",
    },
]


class Model(nn.Module):
    def __init__(self, table: tr.Table) -> None:
        super().__init__()
        self.rows = tr.nn.EmbeddingBag(table, features=FEATURES)
        self.head = nn.Linear(sum(self.rows.dims), 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.head(self.rows(batch).flatten(1)).squeeze(1)


def batches(seed: int, num: int) -> list[Batch]:
    """Half of the ids are frequent ones, half are drawn evenly."""
    rng = np.random.default_rng([9, seed])

    def ids() -> torch.Tensor:
        frequent = rng.zipf(1.3, BATCH_SIZE) % NUM_IDS
        even = rng.integers(0, NUM_IDS, BATCH_SIZE)
        return torch.from_numpy(np.where(rng.random(BATCH_SIZE) < 0.5, frequent, even))

    def batch() -> Batch:
        label = torch.from_numpy(rng.integers(0, 2, BATCH_SIZE).astype(np.float32))
        return Batch({"a": ids(), "b": ids(), "label": label, "show": torch.ones(BATCH_SIZE)})

    return [batch() for _ in range(num)]


class Life:
    """holder: of the rows, "memory" or one of HOLDERS.
    in_passes: declare a table that passes can hold.
    """

    def __init__(self, seed: list[int], holder: str, folder: Path, *, in_passes: bool) -> None:
        self.holder, self.folder = holder, folder
        self.rng = rng = np.random.default_rng(seed)
        dim = int(rng.choice([1, 7, 40, 130]))
        dims: dict[str, Any] = {"dims": {"a": dim, "b": dim + 3}, "salt": True}
        self.declared = {
            "optimizer": RULES[rng.integers(len(RULES))],
            **(dims if rng.random() < 0.3 else {"dim": dim, "salt": bool(rng.random() < 0.5)}),
            **POLICIES[rng.integers(NUM_IN_PASSES if in_passes else len(POLICIES))],
            "dtype": "float32" if in_passes else str(rng.choice(DTYPES)),
        }
        self.counts = "absent" in self.declared  # shows and clicks, which decay with the days
        if "dims" in self.declared and self.counts:  # its rule and state are of one dim
            self.declared |= {"dim": dim, "dims": None}
        self.mode = str(rng.choice(["sync", "async"]))
        is_fleets = self.declared["optimizer"].scale == "fleet"  # which is refused with a norm
        self.clip = 0.5 if rng.random() < 0.5 and not is_fleets else None
        self.dense = DENSE[rng.integers(len(DENSE))]
        self.torch_seed = int(rng.integers(99))
        self.day = 1000
        self.num_operations = 0
        self.names: list[str] = []  # of the operations
        self.saves: list[list[Path]] = []  # each a full save and the deltas after it
        self.saved: list[Path] = []
        self.published: Path | None = None  # that the next export can follow
        self.cluster: Any = None
        self.start([])

    def start(self, checkpoints: list[Path]) -> None:
        """Begin anew with what the checkpoints hold."""
        self.close()
        torch.manual_seed(self.torch_seed)
        tier = None
        if self.holder == "ssd":
            rows = self.folder / "rows"
            rows.mkdir(parents=True)
            tier = RowTier(SSD_MEMORY, [rows])
        self.cluster = embedded(threads=1, tier=tier)
        model = Model(tr.Table("t", seed=3, **self.declared))
        self.trainer = tr.Trainer(
            model,
            self.dense(model.parameters(), lr=0.01),
            loss=nn.functional.binary_cross_entropy_with_logits,
            strategy=tr.Strategy(self.mode),
            clip_norm=self.clip,
            progress=False,
            cluster=self.cluster,
            threads=1,
        )
        self.trainer.set_time(self.day * DAY_S)
        for checkpoint in checkpoints:
            self.trainer.load(checkpoint)

    def close(self) -> None:
        if self.cluster is not None:
            self.cluster.close()

    def step(self) -> tuple[Any, ...]:
        """One operation. What it answered, the scores of examples and the number of rows then."""
        name = str(self.rng.choice(OPERATIONS))
        self.num_operations += 1
        self.names.append(name)
        rng = np.random.default_rng(self.rng.integers(1 << 30))
        try:
            outcome = getattr(self, name)(rng)
        except TriremeError as error:  # a life of any holder meets it
            text = str(error).replace(str(self.folder), "")
            outcome = type(error).__name__, re.sub("[0-9a-f]{32}", "id", text)
        scores = self.trainer.predict(batches(777, 2))["output"]
        rows = self.cluster.client.stats()[0]["tables"]["t"]["rows"]
        return name, outcome, scores.tolist(), rows

    def place(self) -> Path:
        return self.folder / str(self.num_operations)

    def fit(self, rng: np.random.Generator) -> None:
        data = batches(int(rng.integers(1 << 30)), int(rng.integers(1, 8)))
        if self.holder == "pass":
            with self.trainer.on_device(data):
                self.trainer.fit(data)
        elif self.holder == "window":
            with self.trainer.in_window(2, "64MiB"):
                self.trainer.fit(data)
        else:
            self.trainer.fit(data)

    def evaluate(self, rng: np.random.Generator) -> dict[str, float]:
        metrics = self.trainer.evaluate(batches(int(rng.integers(1 << 30)), 2))
        return {name: value for name, value in metrics.items() if name != "examples_per_s"}

    def new_rate(self, rng: np.random.Generator) -> None:
        self.trainer.optimizer.param_groups[0]["lr"] = float(rng.choice([0.003, 0.01, 0.05]))

    def new_day(self, rng: np.random.Generator) -> None:
        self.day += int(rng.integers(1, 3))
        self.trainer.set_time(self.day * DAY_S)

    def shrink(self, rng: np.random.Generator) -> Any:
        return self.trainer.shrink(day_over=bool(rng.integers(2)))

    def save(self, mode: str, before: list[Path]) -> None:
        self.trainer.save(self.place(), mode=mode)
        self.saved = [*before, self.place()]
        self.saves.append(self.saved)
        self.published = None  # an export follows what one process has published
        if self.holder == "reborn" and not (mode == "delta" and self.counts):
            self.start(self.saved)  # a delta of such a table leaves out rows of low scores

    def save_full(self, rng: np.random.Generator) -> None:
        self.save("full", [])

    def save_base(self, rng: np.random.Generator) -> None:
        self.save("full" if self.counts else "base", [])  # a base shows its rows a day older

    def save_delta(self, rng: np.random.Generator) -> None:
        self.save("delta", self.saved)

    def load(self, rng: np.random.Generator) -> None:
        self.published = None
        if self.saves:
            self.saved = self.saves[rng.integers(len(self.saves))]
            for checkpoint in self.saved:
                self.trainer.load(checkpoint)

    def import_rows(self, rng: np.random.Generator) -> Any:
        keys = np.unique(rng.integers(0, NUM_IDS, int(rng.integers(1, 400))))
        feature = str(rng.choice(FEATURES))
        dim = self.trainer.optimizer.tables[0].of_feature(feature).dim
        weights = rng.normal(size=(len(keys), dim)).astype(np.float32)
        rows = {"key": keys, "weights": weights}
        replace = bool(rng.random() < 0.2)
        return tr.interchange.import_arrays(
            self.trainer, "t", rows, feature=feature, replace=replace
        )

    def remove_rows(self, rng: np.random.Generator) -> Any:
        keys = np.unique(rng.integers(0, NUM_IDS, 200))
        return tr.interchange.remove_rows(self.trainer, "t", keys, feature="a")

    def export_parquet(self, rng: np.random.Generator) -> Any:
        tr.interchange.export_parquet(self.trainer, self.place(), state=True)
        tables = map(pq.read_table, sorted(self.place().rglob("*.parquet")))
        return [table.sort_by([("key", "ascending")]).to_pydict() for table in tables]

    def export_model(self, rng: np.random.Generator) -> Any:
        """One that follows the last, or a new one. A Predictor has the scores of the trainer."""
        batch = batches(1, 1)[0]
        if self.published is not None and rng.random() < 0.5:
            export_model(self.trainer, self.place(), batch=batch, follows=self.published)
            self.predictor.apply(self.place())
        else:
            self.dtype = str(rng.choice(["float32", "float32", "float16", "int8"]))
            export_model(self.trainer, self.place(), batch=batch, dtype=self.dtype)
            self.predictor = Predictor(self.place(), threads=1)
        self.published = self.place()
        asked = batches(778, 1)[0]
        answer = self.predictor.predict(asked)
        # Others are rounded, or show their rows a day older.
        if self.dtype == "float32" and not self.counts:
            trained = self.trainer.predict([asked])["output"]
            np.testing.assert_allclose(answer.outputs["output"], trained, rtol=0, atol=1e-5)
        return answer.outputs["output"].tolist(), answer.num_keys, answer.num_missing
