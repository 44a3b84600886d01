"""Real text as user behaviour: which word follows which in reference pages that come with Python.

Words are items; their last two letters are their category. Every fifth paragraph is for the test.
"""

from __future__ import annotations

import functools
import itertools
import pydoc_data.topics
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from trireme.data import Ragged, words_of

_MIN_COUNT = 5
_HISTORY = 8
_PART = 5  # one of this number of paragraphs is for the test

Columns = dict[str, Any]


@functools.cache
def paragraphs(is_smoke: bool) -> list[list[str]]:
    text = [words for page in pydoc_data.topics.topics.values() for words in words_of(page)]
    return text[:60] if is_smoke else text


class Words:
    """The words that occur at least five times, numbered from 1 by falling frequency."""

    def __init__(self, text: list[list[str]]) -> None:
        counts = Counter(word for words in text for word in words)
        common = [(word, count) for word, count in counts.most_common() if count >= _MIN_COUNT]
        self.numbers = {word: i for i, (word, _) in enumerate(common, 1)}
        endings = {ending: i for i, ending in enumerate(sorted({w[-2:] for w, _ in common}), 1)}
        self.categories = np.array([0, *(endings[word[-2:]] for word, _ in common)])
        shares = np.array([0, *(count for _, count in common)], np.float64)
        self.shares = shares / shares.sum()

    def sentences(self, text: list[list[str]]) -> Iterator[list[int]]:
        for words in text:
            yield [self.numbers[word] for word in words if word in self.numbers]

    @functools.cached_property
    def items(self) -> Columns:
        ids = np.arange(1, len(self.categories))
        return {"item_id": ids, "item_cat": self.categories[1:]}


def parts(text: list[list[str]]) -> tuple[Words, list[list[str]], list[list[str]]]:
    """The words, the paragraphs to train on and those for the test."""
    test = text[::_PART]
    train = [words for i, words in enumerate(text) if i % _PART]
    return Words(train), train, test


def next_words(words: Words, text: list[list[str]]) -> Columns:
    """Columns user_id, a word; item_id, the next one, its item_cat and item_share."""
    pairs = [pair for sentence in words.sentences(text) for pair in itertools.pairwise(sentence)]
    user, item = np.array(pairs).T
    columns = {"user_id": user, "item_id": item, "item_cat": words.categories[item]}
    return {**columns, "item_share": words.shares[item]}


def words_after_others(words: Words, text: list[list[str]], seed: int) -> Columns:
    """Columns hist_item_seq, hist_cat_seq: up to eight words; target_item, target_cat: with label 1
    the next one, with label 0 another, drawn by its share of the text.
    """
    rng = np.random.default_rng(seed)
    history: list[int] = []
    ends, target = [0], []
    for sentence in words.sentences(text):
        for i in range(1, len(sentence)):
            before = sentence[max(0, i - _HISTORY) : i]
            for item in (sentence[i], -1):
                history += before
                ends.append(len(history))
                target.append(item)
    item, past = np.array(target), np.array(history)
    label = (item > 0).astype(np.float32)
    drawn = rng.choice(len(words.shares), len(item), p=words.shares)
    item = np.where(item > 0, item, drawn)
    offsets = torch.tensor(ends)
    return {
        "hist_item_seq": Ragged(torch.from_numpy(past), offsets),
        "hist_cat_seq": Ragged(torch.from_numpy(words.categories[past]), offsets),
        "target_item": item,
        "target_cat": words.categories[item],
        "label": label,
    }
