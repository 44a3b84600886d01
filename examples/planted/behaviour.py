"""User behaviour from planted models: clicks after a history, conversions after clicks, choices
among items. The best possible scores are known, and only models of the right structure reach them.

Columns are those of ArrayDataset. The same arguments give the same columns. Keys start at 1; 0 is
padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trireme.data.batch import Ragged

_CATEGORIES = 20
_ITEMS_PER_CATEGORY = 20
_INTERESTS = 2  # categories that a user likes
_HISTORY_MAX = 12


@dataclass(frozen=True)
class Planted:
    """Examples and their true logits.

    columns: for ArrayDataset.
    logits: (N,) of the drawn label, by the label's name.
    """

    columns: dict[str, Any]
    logits: dict[str, NDArray[np.float64]]


def clicks_after_history(num: int, *, seed: int) -> Planted:
    """Columns hist_item_seq, hist_cat_seq (ragged, some empty), target_item, target_cat, label.

    A user reads items of few categories. The more of them have the candidate's category, the
    likelier the click. Items and categories alone carry no information.
    """
    rng = np.random.default_rng([seed, 1])
    lengths = rng.integers(0, _HISTORY_MAX + 1, num)
    interests = rng.integers(0, _CATEGORIES, (num, _INTERESTS))
    readers = np.repeat(np.arange(num), lengths)
    read = interests[readers, rng.integers(0, _INTERESTS, len(readers))]
    is_match = rng.random(num) < 0.5
    target = np.where(is_match, interests[:, 0], rng.integers(0, _CATEGORIES, num))
    agreeing = np.bincount(readers, read == target[readers], minlength=num)
    logits = 3.0 * np.log1p(agreeing) - 2.0
    offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
    columns: dict[str, Any] = {
        "hist_item_seq": Ragged(torch.from_numpy(_items_of(rng, read)), offsets),
        "hist_cat_seq": Ragged(torch.from_numpy(read + 1), offsets),
        "target_item": _items_of(rng, target),
        "target_cat": target + 1,
        "label": _drawn(rng, logits),
    }
    return Planted(columns, {"label": logits})


def clicks_and_conversions(num: int, *, seed: int, features: tuple[str, ...]) -> Planted:
    """Columns `features`, click, conversion: 50 ids of each feature affect both labels, and the
    kinds (id modulo 5) of the first two features affect the conversion.

    There is no conversion without a click. The logits of "conversion" are those of both together.
    """
    fixed = np.random.default_rng(17)
    effects = fixed.normal(size=(2, len(features), 50)) * 1.5 / np.sqrt(len(features))
    pairs = fixed.normal(size=(5, 5))
    rng = np.random.default_rng([seed, 2])
    ids = rng.integers(0, 50, (num, len(features)))
    sums = effects[:, np.arange(len(features)), ids].sum(2)
    click, conversion = sums[0] - 1.0, sums[1] + pairs[ids[:, 0] % 5, ids[:, 1] % 5] - 0.5
    clicked = _drawn(rng, click)
    converted = clicked * _drawn(rng, conversion)
    columns: dict[str, Any] = {"click": clicked, "conversion": converted}
    columns |= {name: ids[:, f] + 1 + 50 * f for f, name in enumerate(features)}
    both = -np.log(np.exp(-click) + np.exp(-conversion) + np.exp(-click - conversion))
    return Planted(columns, {"click": click, "conversion": both})


@dataclass(frozen=True)
class Choices:
    """Users who choose items.

    columns: user_id, item_id, item_cat, and item_share: the share of the choices that are of this
        item.
    items: item_id and item_cat of every item.
    """

    columns: dict[str, Any]
    items: dict[str, Any]


def choices(num: int, *, seed: int, users: int = 500, planted: int = 23) -> Choices:
    """Users choose among 400 items in 20 categories. Each user prefers some categories, and some
    items are popular.

    Args:
        seed: of the choices.
        planted: seed of the preferences, which training and test choices have in common.
    """
    fixed = np.random.default_rng(planted)
    num_items = _CATEGORIES * _ITEMS_PER_CATEGORY
    categories = np.arange(num_items) // _ITEMS_PER_CATEGORY
    tastes = fixed.normal(size=(users, _CATEGORIES)) * 2.0
    popularity = fixed.normal(size=num_items)
    weights = np.exp(tastes[:, categories] + popularity)
    cumulative = (weights / weights.sum(1, keepdims=True)).cumsum(1)
    rng = np.random.default_rng([seed, 3])
    who = rng.integers(0, users, num)
    what = (rng.random(num)[:, None] > cumulative[who]).sum(1).clip(max=num_items - 1)
    share = np.bincount(what, minlength=num_items) / num
    columns: dict[str, Any] = {
        "user_id": who + 1,
        "item_id": what + 1,
        "item_cat": categories[what] + 1,
        "item_share": share[what],
    }
    items: dict[str, Any] = {"item_id": np.arange(num_items) + 1, "item_cat": categories + 1}
    return Choices(columns, items)


def _items_of(rng: np.random.Generator, categories: NDArray[np.int64]) -> NDArray[np.int64]:
    """A random item of each category."""
    items: NDArray[np.int64] = categories * _ITEMS_PER_CATEGORY + 1
    return items + rng.integers(0, _ITEMS_PER_CATEGORY, len(categories))


def _drawn(rng: np.random.Generator, logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Labels, 0 or 1."""
    return (rng.random(len(logits)) < 1 / (1 + np.exp(-logits))).astype(np.float64)
