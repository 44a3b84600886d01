"""Wide & Deep on the Adult census data: a CSV file of categories and numbers.

trireme launch --server_num 1 --worker_num 2 examples/adult.py adult.data adult.test

Does a person earn over 50,000 a year? The files are at https://archive.ics.uci.edu/dataset/2/adult.
Buckets and crosses follow the tutorial of the paper (Cheng et al., DLRS 2016). The last line that
worker 0 prints is RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import csv
import json

import numpy as np
import torch
from torch import nn

import trireme as tr
from trireme.models import WideDeep

COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation",
    "relationship", "race", "sex", "capital_gain", "capital_loss", "hours_per_week",
    "native_country", "income",
)  # fmt: skip
NUMBERS = ("age", "education_num", "capital_gain", "capital_loss", "hours_per_week")
CATEGORIES = (
    "workclass", "education", "marital_status", "occupation", "relationship", "race", "sex",
    "native_country",
)  # fmt: skip
BUCKETS = {
    "age": (18, 25, 30, 35, 40, 45, 50, 55, 60, 65),
    "hours_per_week": (20, 35, 40, 41, 50, 60),
    "capital_gain": (1, 3000, 5000, 7000, 10000, 20000),
    "capital_loss": (1, 1500, 1800, 2000, 2200, 2500),
}
CROSSES = (
    ("education", "occupation"),
    ("relationship", "occupation"),
    ("age_bucket", "education", "occupation"),
)
FEATURES = (*CATEGORIES, *(f"{name}_bucket" for name in BUCKETS), *map("_x_".join, CROSSES))
SCHEMA = tr.data.Schema(
    [
        tr.data.Label(),
        tr.data.Dense("dense", len(NUMBERS)),
        *(tr.data.Sparse(name) for name in FEATURES),
    ]
)


def read_csv(path: str) -> dict[str, np.ndarray]:
    """Each column of the file, as strings."""
    with open(path, newline="") as file:
        rows = [row for row in csv.reader(file, skipinitialspace=True) if row]
    for number, row in enumerate(rows, 1):
        if len(row) != len(COLUMNS):
            raise ValueError(f"{path} row {number}: expected {len(COLUMNS)} columns, found {row}")
    return dict(zip(COLUMNS, map(np.array, zip(*rows, strict=True)), strict=True))


def prepare(raw: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns of SCHEMA. Features stay strings; the dataset turns each into a 64-bit key, a
    hash of the feature's name and the value.
    """
    columns = {name: raw[name] for name in CATEGORIES}
    for name, bounds in BUCKETS.items():
        columns[f"{name}_bucket"] = np.digitize(raw[name].astype(float), bounds).astype(str)
    for names in CROSSES:
        values = zip(*(columns[name] for name in names), strict=True)
        columns["_x_".join(names)] = np.array(list(map(" & ".join, values)))
    columns["dense"] = np.log1p(np.stack([raw[name] for name in NUMBERS], 1).astype(float))
    columns["label"] = np.char.startswith(raw["income"], ">50K")  # the test file says ">50K."
    return columns


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train", help="adult.data")
    parser.add_argument("test", help="adult.test")
    parser.add_argument("--mode", default="async", choices=("sync", "async"))
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1, help="of the shuffle and the dense weights")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    cluster = tr.init()  # a server process serves here, then exits 0
    torch.manual_seed(arguments.seed)
    train, test = prepare(read_csv(arguments.train)), prepare(read_csv(arguments.test))
    mean, spread = train["dense"].mean(0), np.maximum(train["dense"].std(0), 1e-6)
    for columns in (train, test):
        columns["dense"] = (columns["dense"] - mean) / spread

    rule = tr.optim.Adagrad(lr=0.05, initial_accumulator_value=0.1)
    model = WideDeep(
        tr.Table("wide", dim=1, optimizer=rule),
        tr.Table("deep", dim=8, optimizer=rule),
        features=FEATURES,
        num_dense=len(NUMBERS),
        layers=(100, 50),
    )
    trainer = tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-3),
        strategy=tr.Strategy(arguments.mode),
        loss=nn.functional.binary_cross_entropy_with_logits,
        metrics=[tr.metrics.AUC()],
    )
    options = {"schema": SCHEMA, "batch_size": arguments.batch_size}
    shuffled = tr.data.ArrayDataset(train, shuffle=True, seed=arguments.seed, **options)
    trainer.fit(shuffled, epochs=arguments.epochs)
    figures = trainer.evaluate(tr.data.ArrayDataset(test, **options))
    if cluster.worker == 0:
        print(f"test AUC {figures['auc']:.4f}")
        result = {key: figures[key] for key in ("examples", "auc", "loss")}
        result |= {"workers": cluster.num_workers, "mode": arguments.mode}
        print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
