"""Click data in Criteo's format from a planted model, so that the best possible AUC is known.

An example's logit is a bias plus one effect per category, per pair of two small categories, and per
integer. Its label is drawn from that logit, so no model can rank better than the logits. All
effects have a fixed spread under the distribution of the data, so the best AUC hardly depends on
the seed. Effects of rare categories are smaller: half a million examples show nearly all that can
be learned, and the AUC of a good model is within 0.02 of the best.

Ranks of categories are log-uniform: P(rank) ~ log(1 + 1 / (rank + 1)), close to 1 / (rank + 1).

    python examples/planted/clicks.py FOLDER [--examples N] [--test_examples N] [--files N]
        [--seed N]
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from trireme.data.criteo import NUM_DENSE, NUM_SPARSE
from trireme.errors import BadRequest

# 26 vocabularies from 4 to 200,000 categories, each about 1.5 times the one before.
VOCABULARY_SIZES = np.round(np.geomspace(4, 200_000, NUM_SPARSE)).astype(np.int64)
_PAIR = (2, 3)  # two small vocabularies whose combination has an effect of its own

# Standard deviations of the parts of the logit, and the bias. Together they give about a quarter of
# positives and a best AUC of about 0.85.
_SPARSE_SPREAD = 0.30
_PAIR_SPREAD = 0.60
_DENSE_SPREAD = 0.22
_BIAS = -1.55

_RARITY = 0.25  # before they are standardized, effects fall with (rank + 1) ** -_RARITY
_MISSING_SHARE = 0.04  # of the integers, and of the categories of larger vocabularies
_LARGEST_INTEGER = 65_535
_CHUNK = 50_000  # examples at a time, which bounds the memory

# One line before its unused bytes, all NUL, are dropped: digits fill words from the left.
_LINE = np.dtype(
    [
        ("label", "u1"),
        ("tab", "u1"),
        ("integers", [("digits", "<u8"), ("tab", "u1")], NUM_DENSE),
        ("categories", [("digits", "<u8"), ("tab", "u1")], NUM_SPARSE),
    ]
)


def write_planted_criteo(
    folder: str | os.PathLike[str],
    *,
    examples: int = 500_000,
    test_examples: int = 50_000,
    files: int = 8,
    seed: int = 1,
    progress: bool = True,
) -> dict[str, Any]:
    """Write folder/train/part-*.tsv, folder/test/part-*.tsv and folder/planted.json.

    Args:
        folder: must not exist; appears when it is complete.
        examples, test_examples: lines in train and in test; at least one each.
        files: files in train; test gets one for every ten of them, at least one.
        seed: of the planted model and the examples. The same arguments give the same bytes.
        progress: show a bar on standard error if it is a terminal.

    Returns:
        The contents of planted.json: the arguments, "auc_possible" (the AUC of the true logits on
        the test files) and "click_rate" (the share of positives among them).

    Raises:
        BadRequest: the folder exists, or a number is out of range.
        OSError: it cannot be written; then no files are left.
    """
    folder = Path(folder)
    test_files = max(files // 10, 1)
    if not 1 <= files <= examples or not test_files <= test_examples or seed < 0:
        raise BadRequest(
            "write_planted_criteo: expected 1 <= files <= examples, an example per test file and "
            f"seed >= 0, found files {files}, examples {examples}, test_examples {test_examples}, "
            f"seed {seed}"
        )
    if folder.exists():
        raise BadRequest(f"write_planted_criteo: expected no folder yet, found {str(folder)!r}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    unfinished.mkdir()
    try:
        model = _Planted(seed)
        console = Console(stderr=True)
        with Progress(console=console, disable=not (progress and console.is_terminal)) as bar:
            task = bar.add_task("writing planted examples", total=examples + test_examples)
            for _, labels in _write(unfinished / "train", model, 0, examples, files):
                bar.advance(task, len(labels))
            scored = []
            for part in _write(unfinished / "test", model, 1, test_examples, test_files):
                scored.append(part)
                bar.advance(task, len(part[1]))
        logits, labels = (np.concatenate(parts) for parts in zip(*scored, strict=True))
        result = {
            "examples": examples,
            "test_examples": test_examples,
            "files": files,
            "seed": seed,
            "auc_possible": exact_auc(logits, labels),
            "click_rate": float(labels.mean()),
        }
        (unfinished / "planted.json").write_text(json.dumps(result, indent=1) + "\n")
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return result


def exact_auc(scores: NDArray[np.float64], labels: NDArray[np.bool_]) -> float:
    """The AUC of scores without ties: Mann-Whitney's U per pair; NaN if there are no pairs."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    num_positive = int(labels.sum())
    pairs = num_positive * (len(labels) - num_positive)
    if pairs == 0:
        return float("nan")
    return float((ranks[labels].sum() - num_positive * (num_positive + 1) / 2) / pairs)


class _Planted:
    """The effects, and the text of every category and integer."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        rng = np.random.default_rng(seed)
        self.effects = [
            _standardized(
                rng.normal(size=size) * np.arange(1, size + 1) ** -_RARITY, _probabilities(size)
            )
            * _SPARSE_SPREAD
            for size in VOCABULARY_SIZES
        ]
        first, second = (VOCABULARY_SIZES[f] for f in _PAIR)
        pair_probabilities = np.outer(_probabilities(first), _probabilities(second))
        pair_effects = rng.normal(size=(first, second))
        self.pair_effects = _standardized(pair_effects, pair_probabilities) * _PAIR_SPREAD
        self.integer_means = rng.uniform(0.5, 4.0, NUM_DENSE)  # of the logarithms
        self.integer_spreads = rng.uniform(0.8, 1.8, NUM_DENSE)
        self.integer_effects = rng.choice([-1.0, 1.0], NUM_DENSE) * _DENSE_SPREAD
        # An odd factor permutes the 32-bit numbers: no two categories share a token.
        self.tokens = [
            _hex_words(
                (np.arange(size, dtype=np.uint32) + np.uint32(f << 20)) * np.uint32(2654435761)
            )
            for f, size in enumerate(VOCABULARY_SIZES)
        ]
        self.decimals = _decimal_words(_LARGEST_INTEGER)

    def draw(
        self, rng: np.random.Generator, num: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.float64], NDArray[np.bool_]]:
        """The text of `num` examples, their true logits and their labels."""
        lines = np.zeros(num, _LINE)
        logits = np.full(num, _BIAS)
        for j in range(NUM_DENSE):
            logs = rng.normal(self.integer_means[j], self.integer_spreads[j], num)
            integers = np.minimum(np.exp(logs), _LARGEST_INTEGER).astype(np.int64)
            missing = rng.random(num) < _MISSING_SHARE
            integers[missing] = 0
            scaled = (np.log1p(integers) - self.integer_means[j]) / self.integer_spreads[j]
            logits += self.integer_effects[j] * scaled
            words = self.decimals[integers]
            words[missing] = 0
            lines["integers"]["digits"][:, j] = words
        pair = []
        for f, size in enumerate(VOCABULARY_SIZES):
            ranks = _log_uniform_ranks(rng, size, num)
            effects, words = self.effects[f][ranks], self.tokens[f][ranks]
            if f > max(_PAIR):
                missing = rng.random(num) < _MISSING_SHARE
                effects[missing], words[missing] = 0, 0
            elif f in _PAIR:
                pair.append(ranks)
            logits += effects
            lines["categories"]["digits"][:, f] = words
        logits += self.pair_effects[pair[0], pair[1]]
        labels = rng.random(num) < 1 / (1 + np.exp(-logits))
        lines["label"] = ord("0") + labels
        lines["tab"] = lines["integers"]["tab"] = lines["categories"]["tab"] = ord("\t")
        lines["categories"]["tab"][:, -1] = ord("\n")
        text = lines.view(np.uint8)
        return text[text != 0], logits, labels


def _write(
    folder: Path, model: _Planted, split: int, examples: int, files: int
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.bool_]]]:
    """Write one split; yields logits and labels, chunk by chunk."""
    folder.mkdir()
    for number in range(files):
        rng = np.random.default_rng([model.seed, split, number])
        rest = examples * (number + 1) // files - examples * number // files
        with open(folder / f"part-{number}.tsv", "wb") as file:
            while rest:
                text, logits, labels = model.draw(rng, min(rest, _CHUNK))
                file.write(text.data)
                rest -= len(labels)
                yield logits, labels


def _log_uniform_ranks(rng: np.random.Generator, size: int, num: int) -> NDArray[np.int64]:
    """`num` ranks 0..size-1: the floor of a variable that is log-uniform on 1..size+1, less 1."""
    values: NDArray[np.int64] = np.exp(rng.random(num) * np.log(size + 1)).astype(np.int64)
    return np.minimum(values, size) - 1  # rounding can reach size + 1


def _probabilities(size: int) -> NDArray[np.float64]:
    """The probability of each rank under _log_uniform_ranks."""
    logs: NDArray[np.float64] = np.log(np.arange(1, size + 2))
    shares: NDArray[np.float64] = np.diff(logs) / logs[-1]
    return shares


def _standardized(
    effects: NDArray[np.float64], probabilities: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Values scaled to mean 0 and standard deviation 1 under the probabilities."""
    centred = effects - (effects * probabilities).sum()
    scaled: NDArray[np.float64] = centred / np.sqrt((centred**2 * probabilities).sum())
    return scaled


def _hex_words(values: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Each value as 8 hexadecimal digits, the first in the lowest byte."""
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    shifts = np.arange(28, -4, -4).astype(np.uint32)
    text: NDArray[np.uint8] = digits[values[:, None] >> shifts & 15]
    return text.view(np.uint64).ravel()


def _decimal_words(largest: int) -> NDArray[np.uint64]:
    """The decimal digits of 0..largest without leading zeros, NUL-padded to 8 bytes."""
    return np.arange(largest + 1).astype("S8").view(np.uint64)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python examples/planted/clicks.py",
        description="Write click data in Criteo's format whose best possible AUC is known.",
    )
    parser.add_argument("folder")
    parser.add_argument("--examples", type=int, default=500_000)
    parser.add_argument("--test_examples", type=int, default=50_000)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    try:
        result = write_planted_criteo(**vars(parser.parse_args(arguments)))
    except (BadRequest, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
