"""Folders of models of the shapes that PaddleRec's din, logistic_regression, esmm and word2vec
have: their keys, the arrays that their readers yield, and data that is easy to learn.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

COMMON = """
runner:
  train_data_dir: data/train
  test_data_dir: data/test
  train_reader_path: reader
  infer_reader_path: {infer}
  use_gpu: 0
  use_auc: {auc}
  train_batch_size: 20
  infer_batch_size: 20
  epochs: 2
  print_interval: 5
  model_save_path: output
  infer_load_path: output
  infer_start_epoch: 0
  infer_end_epoch: 2
{runner}
hyper_parameters:
{hyper}
"""
HEAD = """
import numpy as np
from torch.utils.data import IterableDataset


class RecDataset(IterableDataset):
    def __init__(self, file_list, config):
        super().__init__()
        self.file_list, self.config = file_list, config
        {prepare}

    def __iter__(self):
        for name in self.file_list:
            with open(name) as lines:
                for line in lines:
                    yield from self.arrays(line.strip())

    def arrays(self, line):
"""
DIN = """
        items, categories, item, category, label = line.split(";")
        items, categories = ([int(i) for i in ids.split()] for ids in (items, categories))
        pad = 4 - len(items)
        yield [
            np.array(items + [0] * pad), np.array(categories + [0] * pad),
            np.array(int(item)), np.array(int(category)), np.array(float(label)),
            np.array([0] * len(items) + [-1e9] * pad).reshape(-1, 1).astype("int64"),
            np.array([int(item)] * 4), np.array([int(category)] * 4),
        ]
"""
LR = """
        pairs = [one.split(":") for one in line.split()]
        of = lambda name: [value for key, value in pairs if key == name]
        yield (
            np.array([int(v) for v in of("label")]), np.array([int(v) for v in of("feat_idx")]),
            np.array([float(v) for v in of("feat_value")], np.float32),
        )
"""
ESMM = """
        _, click, conversion, *ids = line.split(",")
        longest = self.config.get("hyper_parameters.max_len", 3)
        fields = [[] for _ in range(4)]
        for one in ids:
            fields[int(one.split(":")[0])].append(int(one.split(":")[1]))
        padded = [(ids + [0] * longest)[:longest] for ids in fields]
        yield [*map(np.array, padded), np.array([int(click)]), np.array([int(conversion)])]
"""
WORDS = """
        words = [int(word) for word in line.split()]
        for center, context in zip(words, words[1:]):
            negatives = [(center + i) % len(self.counts) for i in range(self.negatives)]
            yield [np.array([center]), np.array([context]), np.array(negatives)]
"""
WORDS_READ = """path = self.config.get("runner.word_count_dict_path")
        with open(self.config.get("config_abs_dir", None) + "/" + path) as counts:
            self.counts = counts.read().split()
        self.negatives = self.config.get("hyper_parameters.neg_num")
        assert self.config.get("runner.batch_size") is None"""
ANALOGIES = """
        words = [int(word) for word in line.split()]
        yield [*([np.array([word]) for word in words]), np.array(words[:3])]
"""


def write(name: str, folder: Path) -> Path:
    """Make the folder of a model: config.yaml, its readers, two files to train on, one to test."""
    make, hyper, runner, readers = _MODELS[name]
    text = COMMON.format(
        hyper="\n".join(f"  {line}" for line in hyper),
        runner="\n".join(f"  {line}" for line in runner),
        infer="infer_reader" if "infer_reader" in readers else "reader",
        auc=name != "word2vec",
    )
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(text)
    (folder / "counts.txt").write_text("5\n" * 12)
    for reader, (prepare, body) in readers.items():
        (folder / f"{reader}.py").write_text(HEAD.format(prepare=prepare) + body)
    for part, num_files in (("train", 2), ("test", 1)):
        (folder / "data" / part).mkdir(parents=True)
        for number in range(num_files):
            draw = random.Random(10 * num_files + number)
            lines = [make(draw, part) for _ in range(150)]
            (folder / "data" / part / f"part-{number}").write_text("\n".join(lines) + "\n")
    return folder


def _din(draw: random.Random, _: str) -> str:
    label, size = draw.randrange(2), draw.randrange(1, 5)
    item = 2 * draw.randrange(1, 9) + label
    history = [str(2 * draw.randrange(1, 9) + label) for _ in range(size)]
    return f"{' '.join(history)};{' '.join(['1'] * size)};{item};1;{label}"


def _lr(draw: random.Random, _: str) -> str:
    label = draw.randrange(2)
    ids = [f"feat_idx:{100 * i + 2 * draw.randrange(1, 4) + label}" for i in range(1, 4)]
    return " ".join([*ids, *["feat_value:1.0"] * 2, "feat_value:0.5", f"label:{label}"])


def _esmm(draw: random.Random, _: str) -> str:
    click = draw.randrange(2)
    conversion = click * draw.randrange(2)
    ids = [f"{field}:{10 * field + 2 * click + conversion + 1}" for field in (0, 1, 1, 3)]
    return ",".join(["1", str(click), str(conversion), *ids])


def _words(draw: random.Random, part: str) -> str:
    start = draw.randrange(9)
    if part == "test":
        return f"{start} {start + 1} {start + 1} {start + 2}"
    return " ".join(str((start + i) % 12) for i in range(6))


_SGD = "optimizer: {class: SGD, learning_rate_base_lr: 0.5, strategy: async}"
_ADAM = "optimizer: {class: adam, learning_rate: 0.01, strategy: async}"
_Maker = Callable[[random.Random, str], str]
_Model = tuple[_Maker, list[str], list[str], dict[str, tuple[str, str]]]
_MODELS: dict[str, _Model] = {
    "din": (
        _din,
        [_SGD, "use_DataLoader: True", "item_emb_size: 8", "cat_emb_size: 8", "is_sparse: False",
         "item_count: 63001", "cat_count: 801", "act: sigmoid"],
        [],
        {"reader": ("pass", DIN)},
    ),
    "lr": (
        _lr,
        [_ADAM, "sparse_feature_number: 1000", "num_field: 3"],
        [],
        {"reader": ("pass", LR)},
    ),
    "esmm": (
        _esmm,
        [_ADAM, "sparse_feature_number: 1000", "sparse_feature_dim: 4", "num_field: 4",
         "ctr_fc_sizes: [16]", "cvr_fc_sizes: [8, 4]"],
        ["auc_num: 2"],
        {"reader": ("pass", ESMM)},
    ),
    "word2vec": (
        _words,
        ["optimizer: {class: sgd, learning_rate: 1.0, decay_steps: 100000}", "neg_num: 3",
         "sparse_feature_number: 12", "sparse_feature_dim: 8"],
        ["word_count_dict_path: counts.txt"],
        {"reader": (WORDS_READ, WORDS), "infer_reader": ("pass", ANALOGIES)},
    ),
}  # fmt: skip
