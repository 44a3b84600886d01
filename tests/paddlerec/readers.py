"""Folders of models of the shapes that PaddleRec's models have: their keys, the arrays that their
readers yield, and data that is easy to learn.
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


CRITEO = """
        slots = ["click", "1", "2", "3", "dense_feature"]
        found = {slot: [] for slot in slots}
        for one in line.split(" "):
            slot, value = one.split(":")
            found[slot].append(float(value) if slot == "dense_feature" else int(value))
        arrays = [np.array(found[slot] or [0]).astype("int64") for slot in slots[:-1]]
        yield [*arrays, np.array(found["dense_feature"]).astype("float32")]
"""
DIEN = """
        items, categories, item, category, label = line.split(";")
        items, categories = ([int(i) for i in ids.split()] for ids in (items, categories))
        pad = 4 - len(items)
        others = [i % 16 + 1 for i in items] + [1] * pad
        yield [
            np.array(items + [0] * pad), np.array(categories + [0] * pad),
            np.array(int(item)), np.array(int(category)), np.array(float(label)).astype("float32"),
            np.array([0] * len(items) + [-1e9] * pad).reshape(-1, 1).astype("float32"),
            np.array([int(item)] * 4), np.array([int(category)] * 4),
            np.array(others), np.array([1] * 4),
        ]
"""
CENSUS = """
        values = [float(value) for value in line.split(",")]
        income, marital = int(values[1]), int(values[0])
        yield [np.array(values[2:]).astype("float32"), np.array([income]), np.array([marital])]
"""
TRIGRAMS = """
        parts = line.split("\\t")[: self.num_parts]
        yield [np.array([float(v) for v in part.split(",")]).astype("float32") for part in parts]
"""
MIND = """
        items = [int(item) for item in line.split()]
        history = items[:-1] + [0] * (self.config.get("hyper_parameters.maxlen") + 1 - len(items))
        yield [np.array(history), np.array(items[-1:]), np.array([len(items) - 1])]
"""
MIND_INFER = """
        items = [int(item) for item in line.split()]
        pad = [0] * (self.config.get("hyper_parameters.maxlen") + 1 - len(items))
        answers = np.array(items[-1:] + pad)
        yield [np.array(items[:-1] + pad), np.array([len(items) - 1]), answers]
"""
AITM = """
        click, conversion, *ids = [int(value) for value in line.split(",")]
        yield click, conversion, ids
"""
GRAPH = """
        label, *nodes = [int(value) for value in line.split()]
        pairs = [(i, j) for i in range(len(nodes)) for j in range(i, len(nodes))]
        yield [
            np.array(len(nodes)), np.array(pairs), np.array(nodes, dtype="int32").reshape(-1, 1),
            np.array([[nodes[i], nodes[j]] for i, j in pairs]), np.eye(2)[label],
        ]
"""
TEXT = """
        *words, label = [int(word) for word in line.split()]
        yield np.array(words), np.array([label])
"""
RATINGS = """
        yield np.array([[float(rating) for rating in line.split()]]).astype("float32")
"""
# A Dataset whose examples have numbers. Each has the fields of all items, and of the first again.
ENSFM = """
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset


class RecDataset(Dataset):
    def __init__(self, file_list, config):
        super().__init__()
        assert config.get("runner.mode", "test") == "train"
        texts = [Path(name).read_text() for name in file_list]
        self.lines = [line.split() for text in texts for line in text.splitlines()]
        self.items = [[10 + item, item % 2] for item in (*range(8), 0)]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, number):
        user, *taken = [int(value) for value in self.lines[number]]
        taken = np.array(taken + [8] * (3 - len(taken)))
        return np.array([20 + user, user % 2]), np.array(self.items), taken, np.array(8)
"""


NEWS = """
        label, *ids = (part.split() for part in line.split(";"))
        clicked, titles = int(label[0]), [np.array(part).astype("int64") for part in ids]
        kinds = [np.zeros(3, "int64"), np.zeros(2, "int64")]
        yield [np.eye(3)[clicked].astype("int64"), *kinds, *kinds, *titles, *titles]
"""
FOLLOWED = """
        first, *others = (int(item) for item in line.split())
        items, times = (first + np.arange(5)) % 20 + 1, np.abs(np.arange(4)[:, None] - np.arange(4))
        mode = self.config.get("runner.mode", "test")
        yield [items[:4], times, *((items[1:], np.array(others)) if mode == "train" else
               (np.array([items[4], *(i % 20 + 1 for i in range(items[4], items[4] + 100))]),))]
"""


def write(name: str, folder: Path) -> Path:
    """Make the folder of a model: config.yaml, its readers, two files to train on, one to test."""
    make, hyper, runner, readers = _MODELS[name]
    text = COMMON.format(
        hyper="\n".join(f"  {line}" for line in hyper),
        runner="\n".join(f"  {line}" for line in runner),
        infer="infer_reader" if "infer_reader" in readers else "reader",
        auc=name in HAVE_AUC,
    )
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(text)
    (folder / "counts.txt").write_text("5\n" * 12)
    (folder / "ratings.txt").write_text("".join(_rating_lines()))
    (folder / "trusts.txt").write_text("".join(f"{u}\t{(u + 2) % 10}\n" for u in range(10)))
    for reader, (prepare, body) in readers.items():
        head = HEAD.format(prepare=prepare) if prepare else ""
        (folder / f"{reader}.py").write_text(head + body)
    for part, num_files in (("train", 2), ("test", 1)):
        (folder / "data" / part).mkdir(parents=True)
        for number in range(num_files):
            draw = random.Random(10 * num_files + number)
            lines = [make(draw, part) for _ in range(150)]
            (folder / "data" / part / f"part-{number}").write_text("\n".join(lines) + "\n")
    return folder


HAVE_AUC = ("autoint", "dcn", "dien", "din", "escm2", "esmm", "lr", "mmoe", "sign", "xdeepfm")


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


def _criteo(draw: random.Random, _: str) -> str:
    label = draw.randrange(2)
    ids = [f"{slot}:{100 * slot + 2 * draw.randrange(1, 9) + label}" for slot in (1, 2, 3)]
    numbers = [f"dense_feature:{draw.random():.3f}" for _ in range(2)]
    return " ".join([f"click:{label}", *numbers, *ids[: draw.randrange(2, 4)]])


def _census(draw: random.Random, _: str) -> str:
    numbers = [draw.uniform(-1, 1) for _ in range(4)]
    marital, income = (int(numbers[i] + numbers[i + 1] > 0) for i in (0, 2))
    return ",".join(map(str, (marital, income, *numbers)))


def _trigrams(draw: random.Random, _: str) -> str:
    right, wrong = draw.sample(range(5), 2)
    terms = [[int(topic == i) for i in range(5)] for topic in (right, right, wrong)]
    return "\t".join(",".join(map(str, one)) for one in terms)


def _following(draw: random.Random, _: str) -> str:
    topic = draw.randrange(2)
    items = [2 * draw.randrange(1, 20) + topic for _ in range(draw.randrange(4, 7))]
    return " ".join(map(str, items))


def _news(draw: random.Random, _: str) -> str:
    topics = draw.sample(range(4), 3)
    clicked = draw.randrange(3)
    titles = [f"{topic} {draw.randrange(4, 20)}" for topic in (*topics, *[topics[clicked]] * 2)]
    return f"{clicked};{' '.join(titles[:3])};{' '.join(titles[3:])}"


def _followed(draw: random.Random, _: str) -> str:
    first = draw.randrange(20)
    others = [(first + 1 + draw.randrange(2, 19) + place) % 20 + 1 for place in range(4)]
    return " ".join(map(str, (first, *others)))


def _pair(draw: random.Random, _: str) -> str:
    user, item = draw.randrange(20), draw.randrange(20)
    return f"{user},{item},{int(user % 2 == item % 2)}"


def _vocabularies(draw: random.Random, _: str) -> str:
    """Ids of three vocabularies, all from 0: of the first and the last they say the label."""
    click = draw.randrange(2)
    conversion = click * draw.randrange(2)
    return f"{click},{conversion},{2 * draw.randrange(4) + click},{draw.randrange(8)},{conversion}"


def _nodes(draw: random.Random, _: str) -> str:
    label = draw.randrange(2)
    return " ".join(map(str, (label, *(2 * draw.randrange(4) + label for _ in range(3)))))


def _text(draw: random.Random, _: str) -> str:
    label = draw.randrange(2)
    words = [draw.randrange(3, 20) for _ in range(6)]
    words[draw.randrange(6)] = 1 + label
    return " ".join(map(str, (*words, 0, 0, label)))


def _rated(draw: random.Random, _: str) -> str:
    taste = draw.randrange(2)
    ratings = [(1 + 4 * (item % 2 == taste)) * draw.randrange(2) for item in range(6)]
    return " ".join(map(str, ratings))


def _shopper(draw: random.Random, _: str) -> str:
    user = draw.randrange(20)
    taken = draw.sample(range(user % 2, 8, 2), draw.randrange(1, 4))
    return " ".join(map(str, (user, *taken)))


def _rating_lines() -> list[str]:
    """Users take the items of their kind; of five lines the first one is held back for tests. So
    items are numbered 0, 2, 4, 6, 1, 3, 5, 7.
    """
    items = [(user, item) for user in range(10) for item in (0, 0, 2, 4, 6)]
    return [f"{user}\t{item + user % 2}\t2\n" for user, item in items]


def _three_numbers(draw: random.Random, _: str) -> str:
    user = draw.randrange(10)
    right, wrong = (4 * (kind % 2) + draw.randrange(4) for kind in (user, user + 1))
    return f"{user},{right},{wrong}"


PAIR = """
        yield [np.array([int(one)]) for one in line.split(",")]
"""
_SGD = "optimizer: {class: SGD, learning_rate_base_lr: 0.5, strategy: async}"
_ADAM = "optimizer: {class: adam, learning_rate: 0.01, strategy: async}"
_Maker = Callable[[random.Random, str], str]
_Model = tuple[_Maker, list[str], list[str], dict[str, tuple[str, str]]]
_MODELS: dict[str, _Model] = {
    "aitm": (
        _vocabularies,
        ["optimizer: {class: Adam, learning_rate: 0.02}", "embedding_size: 4", "dims: [16, 8]",
         "drop_prob: [0.1, 0.1]", "feature_vocabulary: [['101', 8], ['121', 8], ['122', 2]]"],
        [],
        {"reader": ("pass", AITM)},
    ),
    "sign": (
        _nodes,
        ["optimizer: {class: adam, learning_rate: 0.05, strategy: async}", "pred_edges: 1",
         "dim: 8", "hidden_layer: 32", "l0_para: [0.66, -0.1, 1.1]", "l0_weight: 0.001",
         "l2_weight: 0.001"],
        ["is_train: True"],
        {"reader": ("pass", GRAPH)},
    ),
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
    "xdeepfm": (
        _criteo,
        [_ADAM, "sparse_inputs_slots: 4", "sparse_feature_number: 1000", "sparse_feature_dim: 4",
         "dense_input_dim: 2", "fc_sizes: [8]", "layer_sizes_dnn: [8]", "layer_sizes_cin: [4, 2]",
         "distributed_embedding: 0"],
        [],
        {"reader": ("pass", CRITEO)},
    ),
    "dcn": (
        _criteo,
        [_ADAM, "sparse_inputs_slots: 4", "sparse_feature_number: 1000", "sparse_feature_dim: 4",
         "dense_input_dim: 2", "fc_sizes: [8]", "cross_num: 2", "l2_reg_cross: 0.00005",
         "clip_by_norm: 100.0", "is_sparse: False"],
        [],
        {"reader": ("pass", CRITEO)},
    ),
    "autoint": (
        _lr,
        [_ADAM, "feature_number: 1000", "embedding_dim: 4", "fc_sizes: []", "use_residual: True",
         "scaling: True", "use_wide: True", "use_sparse: True", "head_num: 2", "num_field: 3",
         "attn_layer_sizes: [4, 4]", "distributed_embedding: 0"],
        [],
        {"reader": ("pass", LR)},
    ),
    "dien": (
        _din,
        ["optimizer: {class: adam, learning_rate_base_lr: 0.05, strategy: async}",
         "use_DataLoader: True", "item_emb_size: 8", "cat_emb_size: 8", "is_sparse: False",
         "item_count: 63001", "cat_count: 801", "distributed_embedding: 0"],
        [],
        {"reader": ("pass", DIEN)},
    ),
    "mmoe": (
        _census,
        ["optimizer: {class: adam, learning_rate: 0.05, strategy: async}", "feature_size: 4",
         "expert_num: 8", "gate_num: 2", "expert_size: 16", "tower_size: 8"],
        ["use_inference: False"],
        {"reader": ("pass", CENSUS)},
    ),
    "escm2": (
        _esmm,
        [_ADAM, "sparse_feature_number: 1000", "sparse_feature_dim: 4", "num_field: 4",
         "feature_size: 16", "expert_num: 4", "expert_size: 8", "tower_size: 8", "global_w: 1.0",
         "counterfactual_w: 0.01"],
        ["auc_num: 2", "counterfact_mode: DR"],
        {"reader": ("pass", ESMM)},
    ),
    "dssm": (
        _trigrams,
        [_ADAM, "trigram_d: 5", "neg_num: 1", "slice_end: 8", "fc_sizes: [8, 8]",
         "fc_acts: ['relu', 'relu']"],
        [],
        {"reader": ("self.num_parts = 3", TRIGRAMS),
         "infer_reader": ("self.num_parts = 2", TRIGRAMS)},
    ),
    "mind": (
        _following,
        ["optimizer: {class: Adam, learning_rate: 0.05}", "item_count: 60", "embedding_dim: 8",
         "hidden_size: 8", "neg_samples: 20", "maxlen: 6", "pow_p: 1.0"],
        ["batches_per_epoch: 100"],
        {"reader": ("config.get('runner.batches_per_epoch')", MIND),
         "infer_reader": ("pass", MIND_INFER)},
    ),
    "naml": (
        _news,
        ["optimizer: {class: Adam, learning_rate: 0.02, strategy: async}", "word_dict_size: 20",
         "article_content_size: 2", "article_title_size: 2", "browse_size: 2", "category_size: 4",
         "neg_condidate_sample_size: 2", "word_dimension: 8", "sub_category_size: 10",
         "category_dimension: 4",
         "hidden_size: 16"],
        ["use_xpu: False"],
        {"reader": ("pass", NEWS)},
    ),
    "tisas": (
        _followed,
        ["optimizer: {class: adam, learning_rate: 0.02}", "num_users: 300", "num_items: 20",
         "num_blocks: 1", "num_heads: 1", "maxlen: 4", "hidden_units: 16", "time_span: 8"],
        ['mode: "train"'],
        {"reader": ("pass", FOLLOWED)},
    ),
    "ncf": (
        _pair,
        ["optimizer: {class: adam, learning_rate: 0.1}", "num_users: 20", "num_items: 20",
         "mf_dim: 4", "mode: NCF_NeuMF", "fc_layers: [8, 8, 4]"],
        [],
        {"reader": ("pass", PAIR)},
    ),
    "textcnn": (
        _text,
        ["optimizer: {class: adam, learning_rate: 0.05}", "is_sparse: False", "dict_dim: 20",
         "max_len: 8", "cnn_dim: 8", "cnn_filter_size1: 1", "cnn_filter_size2: 2",
         "cnn_filter_size3: 3", "emb_dim: 8", "hid_dim: 8", "class_dim: 2"],
        [],
        {"reader": ("pass", TEXT)},
    ),
    "deeprec": (
        _rated,
        ["optimizer: {class: SGD, learning_rate: 0.05, momentum: 0.9, weight_decay: 0.0}",
         "dp_drop_prob: 0.0", "layer_sizes: [6, 8, 4]"],
        ["mode: train"],
        {"reader": ("config.get('runner.mode')", RATINGS)},
    ),
    "ensfm": (
        _shopper,
        ["optimizer: {class: adam, learning_rate: 0.05}", "num_users: 99", "num_items: 99",
         "mf_dim: 8", "negative_weight: 0.5"],
        ["mode: train"],
        {"reader": ("", ENSFM)},
    ),
    "mhcn": (
        _three_numbers,
        ["optimizer: {class: Adam, learning_rate: 0.05}", "n_layer: 2", "num_factors: 8"],
        ["rating_file: ratings.txt", "relation_file: trusts.txt", "is_train: True", "top_k: 4"],
        {"reader": ("pass", PAIR)},
    ),
}  # fmt: skip
