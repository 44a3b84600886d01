"""Models of the zoo, small, trained for a few batches of random examples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

import trireme as tr
from trireme.config import Config
from trireme.data import Bags, Batch, Dense, Schema, Sparse
from trireme.job.cluster import Cluster
from trireme.models import zoo

NUM_KEYS = 500
SMALL: dict[str, dict[str, Any]] = {
    "deepfm": {"fc_sizes": [16, 8], "sparse_feature_dim": 6},
    "din": {"fc_sizes": [8], "item_emb_size": 6, "cat_emb_size": 4},
    "slot_dnn": {"slot_num": 5, "fc_sizes": [8, 4], "sparse_feature_dim": 5},
    "two_tower": {"fc_sizes": [8, 4], "sparse_feature_dim": 6},
}
RAGGED = {"din": ("hist_item_seq", "hist_cat_seq"), "slot_dnn": ("2", "3", "4", "5", "6")}


def examples(name: str, num: int, seed: int, *, schema: Schema, keys: int = NUM_KEYS) -> Batch:
    """`num` random examples; ragged features have 0 to 4 ids, DIN's two histories equally many."""
    rng = np.random.default_rng(seed)
    columns: dict[str, Any] = {}
    for field in schema.fields:
        if not isinstance(field, Sparse):
            shape = (num, field.dim) if isinstance(field, Dense) else (num,)
            columns[field.name] = torch.from_numpy((rng.random(shape) > 0.5).astype(np.float32))
    ragged = RAGGED.get(name, ())
    history = rng.integers(0, 5, num)
    sizes = [
        np.ones(num, int)
        if feature not in ragged
        else history
        if name == "din"
        else rng.integers(0, 5, num)
        for feature in schema.sparse
    ]
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    values = rng.integers(1, keys, int(offsets[-1]))
    bags = Bags(schema.sparse, torch.from_numpy(values), torch.from_numpy(offsets))
    return Batch(columns, bags)


def recipe_of(name: str) -> Any:
    torch.manual_seed(3)
    return zoo.load(name).create(Config({"hyper_parameters": SMALL[name]}))


def trainer_of(name: str, cluster: Cluster, recipe: Any | None = None) -> tr.Trainer:
    recipe = recipe_of(name) if recipe is None else recipe
    return tr.Trainer.from_recipe(recipe, progress=False, cluster=cluster)


def train(
    name: str, trainer: tr.Trainer, schema: Schema, *, batches: int = 4, seed: int = 0
) -> None:
    """Train on random examples."""
    data = [examples(name, 32, seed + i, schema=schema) for i in range(batches)]
    loss = trainer.fit(data)["loss"]
    assert math.isfinite(loss)
