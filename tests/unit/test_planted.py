"""Generated click data: the files, their labels, and the best possible AUC."""

from __future__ import annotations

import json

import numpy as np
import pytest

from examples.planted import clicks as planted
from examples.planted.clicks import VOCABULARY_SIZES, _Planted, exact_auc, write_planted_criteo
from trireme.data import QueueDataset, criteo
from trireme.errors import BadRequest
from trireme.metrics import AUC


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted") / "data"
    result = write_planted_criteo(folder, examples=30_000, test_examples=20_000, files=3, seed=5)
    return folder, result


def read(pattern) -> list:
    return list(QueueDataset(pattern, schema=criteo(), batch_size=5000))


def test_the_files_are_criteo_text_of_the_promised_size(written):
    folder, result = written
    assert sorted(path.name for path in folder.iterdir()) == ["planted.json", "test", "train"]
    assert json.loads((folder / "planted.json").read_text()) == result
    train, test = read(folder / "train" / "part-*.tsv"), read(folder / "test" / "part-*.tsv")
    assert len(list((folder / "train").iterdir())) == 3
    assert sum(batch.num_examples for batch in train) == 30_000
    assert sum(batch.num_examples for batch in test) == 20_000
    labels = np.concatenate([batch["label"].numpy() for batch in test])
    assert labels.mean() == pytest.approx(result["click_rate"], abs=1e-6)
    assert 0.15 < labels.mean() < 0.35
    missing = 1 - sum(batch.bags.values.numel() for batch in train) / (26 * 30_000)
    assert 0.02 < missing < 0.05


def test_categories_follow_the_promised_distribution(written):
    folder, _ = written
    train = read(folder / "train" / "part-*.tsv")
    for name, size in (("C1", VOCABULARY_SIZES[0]), ("C26", VOCABULARY_SIZES[25])):
        parts = [batch[name] for batch in train]
        keys = np.concatenate([p.values[p.offsets[0] : p.offsets[-1]].numpy() for p in parts])
        counts = np.sort(np.unique(keys, return_counts=True)[1])[::-1] / len(keys)
        expected = np.log(1 + 1 / np.arange(1, 4)) / np.log(size + 1)
        assert counts[:3] == pytest.approx(expected, abs=0.01)
        assert len(counts) <= size


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_labels_are_drawn_from_the_logits_and_the_best_auc_is_about_085(seed):
    _, logits, labels = _Planted(seed).draw(np.random.default_rng(seed), 60_000)
    probabilities = 1 / (1 + np.exp(-logits))
    order = np.argsort(logits)
    for part in np.array_split(order, 20):
        sd = np.sqrt((probabilities[part] * (1 - probabilities[part])).sum()) / len(part)
        assert labels[part].mean() == pytest.approx(probabilities[part].mean(), abs=4.5 * sd)
    assert exact_auc(logits, labels) == pytest.approx(0.85, abs=0.015)


def test_rare_categories_say_less():
    effects = np.abs(_Planted(1).effects[-1])
    head, tail = effects[:100].mean(), effects[-100_000:].mean()
    ranks = np.arange(1, len(effects) + 1) ** -0.25
    assert tail / head == pytest.approx(ranks[-100_000:].mean() / ranks[:100].mean(), rel=0.3)


def test_the_claimed_auc_is_that_of_the_true_logits(written):
    _, result = written
    auc, model = AUC(), _Planted(5)
    text, logits, labels = model.draw(np.random.default_rng([5, 1, 0]), 20_000)
    auc.update(logits, labels)
    assert auc.compute() == pytest.approx(result["auc_possible"], abs=1e-5)
    assert text.tobytes() == (written[0] / "test" / "part-0.tsv").read_bytes()


def test_the_same_arguments_give_the_same_bytes(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_planted_criteo(tmp_path / name, examples=100, test_examples=10, files=2, seed=seed)
    a, b, c = ((tmp_path / n / "train" / "part-1.tsv").read_bytes() for n in "abc")
    assert a == b
    assert a != c
    assert a != (tmp_path / "a" / "train" / "part-0.tsv").read_bytes()


def test_nothing_is_left_after_a_failure(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_Planted, "draw", fail)
    with pytest.raises(OSError, match="No space left"):
        write_planted_criteo(tmp_path / "data", examples=100, test_examples=10)
    assert list(tmp_path.iterdir()) == []


def test_arguments_out_of_range_are_refused(tmp_path):
    with pytest.raises(BadRequest, match="expected no folder yet"):
        write_planted_criteo(tmp_path, examples=100, test_examples=10)
    for options in (
        {"examples": 0},
        {"examples": 3},
        {"test_examples": 0},
        {"files": 0},
        {"seed": -1},
    ):
        with pytest.raises(BadRequest, match="expected 1 <= files <= examples"):
            write_planted_criteo(tmp_path / "data", **options)
    assert list(tmp_path.iterdir()) == []


def test_it_runs_as_a_command(tmp_path, capsys):
    arguments = [str(tmp_path / "data"), "--examples", "200", "--test_examples", "100"]
    planted.main([*arguments, "--files", "2"])
    assert json.loads(capsys.readouterr().out)["examples"] == 200
    with pytest.raises(SystemExit, match="expected no folder yet"):
        planted.main(arguments)
