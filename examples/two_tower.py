"""Two-tower recall, from training to an index: the vectors of all items, and their recall.

trireme launch --server_num 1 --worker_num 2 examples/two_tower.py index

The users' choices come from a planted model (planted/behaviour.py). After training, the workers run
the item tower over all items and write the vectors, one file per worker, in order: index/part-00000
and so on. Worker 0 reads them, searches for the items that the test users chose, and prints RESULT
and a JSON object as its last line.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from planted.behaviour import Choices, choices
from torch import Tensor, nn

import trireme as tr
from trireme.models import TwoTower
from trireme.models.two_tower import ITEM, USER, InBatchSoftmax

FEATURES = [tr.data.Sparse(name) for name in (*USER, *ITEM)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("index", type=Path, help="folder of the item vectors; must not exist")
    parser.add_argument("--choices", type=int, default=100_000, help="choices to train on")
    parser.add_argument("--users", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--k", type=int, default=20, help="items to find for each user")
    parser.add_argument("--mode", default="async", choices=("sync", "async"))
    return parser.parse_args()


def dataset(made: Choices, *, seed: int) -> tr.data.ArrayDataset:
    schema = tr.data.Schema([*FEATURES, tr.data.Dense("item_share")])
    return tr.data.ArrayDataset(
        made.columns, schema=schema, batch_size=256, shuffle=True, seed=seed
    )


def all_items(made: Choices) -> tr.data.ArrayDataset:
    """Every item once, with its name."""
    names = [str(item) for item in np.asarray(made.items["item_id"])]
    schema = tr.data.Schema([tr.data.InsId(), *FEATURES[len(USER) :]])
    return tr.data.ArrayDataset({"ins_id": names, **made.items}, schema=schema, batch_size=100)


def read_index(folder: Path) -> tuple[list[int], Tensor]:
    """Ids and vectors (N, D) of the items, in the order of the data."""
    ids, vectors = [], []
    for part in sorted(folder.glob("part-*")):
        for line in part.read_text().splitlines():
            name, _, output = line.split("\t")
            ids.append(int(name))
            vectors.append([float(value) for value in output.split(":")[2:]])
    return ids, torch.tensor(vectors)


def recall(tower: nn.Module, made: Choices, index: tuple[list[int], Tensor], k: int) -> float:
    """The share of choices whose item is among the k nearest to the user."""
    ids, vectors = index
    users = torch.as_tensor(made.columns["user_id"])
    with torch.no_grad():
        nearest = (tower({"user_id": users}) @ vectors.T).topk(k).indices
    chosen = torch.as_tensor(made.columns["item_id"])
    return float((torch.tensor(ids)[nearest] == chosen[:, None]).any(1).float().mean())


def train(model: nn.Module, arguments: argparse.Namespace, made: Choices) -> tr.Trainer:
    trainer = tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=InBatchSoftmax(),
        label=None,
        strategy=tr.Strategy(arguments.mode),
    )
    trainer.fit(dataset(made, seed=1), epochs=arguments.epochs)
    return trainer


def table(name: str) -> tr.Table:
    return tr.Table(name, dim=16, optimizer=tr.optim.Adam(lr=3e-3))


def main() -> None:
    arguments = parse_arguments()
    cluster = tr.init()
    torch.manual_seed(1)
    made = choices(arguments.choices, seed=1, users=arguments.users)
    model = TwoTower(table("user"), table("item"), layers=(64, 32))
    trainer = train(model, arguments, made)
    trainer.evaluate(
        all_items(made),
        model=model.item,
        labels=False,
        dump=tr.Dump(path=arguments.index, fields=["output"]),
    )
    if cluster.worker == 0:
        index = read_index(arguments.index)
        test = choices(5000, seed=2, users=arguments.users)
        share = recall(model.user.eval(), test, index, arguments.k)
        result = {
            "items": len(index[0]),
            "k": arguments.k,
            "recall": share,
            "by_chance": arguments.k / len(index[0]),
            "workers": cluster.num_workers,
        }
        print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
