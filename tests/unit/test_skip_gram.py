"""Skip-gram pairs of words: contents, the promised distribution, and resuming a stream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from trireme.data import SkipGramDataset, read_words
from trireme.errors import BadRequest, DataError

SENTENCES = [[f"w{i}" for i in range(start, start + 8)] for start in (0, 8, 16)]


def numbered(count: int, seed: int = 0) -> list[list[str]]:
    """`count` sentences of 12 words out of 60."""
    rng = np.random.default_rng(seed)
    return [[f"w{i}" for i in rng.integers(0, 60, 12)] for _ in range(count)]


def rows_of(batches: list) -> torch.Tensor:
    """(P, 3 + ...): center, context, negatives of all pairs."""
    parts = []
    for batch in batches:
        columns = [batch[name] for name in ("center", "context", "negatives")]
        values = [c.values[c.offsets[0] : c.offsets[-1]] for c in columns]
        parts.append(torch.cat([v.view(batch.num_examples, -1) for v in values], 1))
    return torch.cat(parts)


def test_words_are_runs_of_letters_in_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("The cat,\nthe_2nd DOG.\n\n \n\u00dcber\n\n3\n", encoding="utf-8")
    assert read_words([tmp_path / "a"]) == [["the", "cat", "the", "nd", "dog"], ["\u00fcber"]]
    (tmp_path / "b").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"expected UTF-8 in .*b, found"):
        read_words([tmp_path / "b"])


def test_the_vocabulary_is_in_the_order_of_counts() -> None:
    dataset = SkipGramDataset([["b", "a", "b"], ["c", "a", "b"]], batch_size=2, min_count=2)
    assert dataset.words == ("b", "a")
    assert dataset.counts.tolist() == [3, 2]
    with pytest.raises(DataError, match="occur 4 times or more, found 3 words, none so often"):
        SkipGramDataset([["b", "a", "b"], ["c", "a", "b"]], batch_size=2, min_count=4)


def test_pairs_are_neighbours_within_a_sentence_and_a_window() -> None:
    dataset = SkipGramDataset(SENTENCES, batch_size=7, window=3, min_count=1, subsample=0)
    place = {i: divmod(int(word[1:]), 8) for i, word in enumerate(dataset.words)}
    seen: dict[int, set[int]] = {}
    for epoch in range(40):
        for center, context, *_ in rows_of(list(dataset.stream(0, 1, epoch=epoch))).tolist():
            (sentence, i), (other, j) = place[center], place[context]
            assert sentence == other
            assert 1 <= abs(i - j) <= 3
            seen.setdefault(i, set()).add(j - i)
    assert seen[3] == {-3, -2, -1, 1, 2, 3}
    assert seen[0] == {1, 2, 3}


def test_near_words_are_paired_more_often_by_the_drawn_window() -> None:
    dataset = SkipGramDataset([["a", "b"] * 4000], batch_size=100, window=2, subsample=0)
    rows = rows_of(list(dataset))
    near = (rows[:, 0] != rows[:, 1]).float().mean()
    assert near == pytest.approx(2 / 3, abs=0.01)  # distance 1 always, 2 in half of the draws


def test_frequent_words_are_left_out_as_promised() -> None:
    text = (["often"] * 9 + ["rare"]) * 3000
    dataset = SkipGramDataset([text], batch_size=1000, window=1, subsample=0.01)
    stays = np.sqrt(0.01 / 0.9) + 0.01 / 0.9
    pairs = rows_of(list(dataset))[:, :2]
    # Each word that stays has a neighbour on both sides.
    share = (pairs == dataset.words.index("often")).float().mean().item()
    often, rare = 9 * stays, min(np.sqrt(0.01 / 0.1) + 0.01 / 0.1, 1.0)
    assert share == pytest.approx(often / (often + rare), abs=0.02)


def test_negatives_follow_counts_to_the_power_of_three_quarters() -> None:
    dataset = SkipGramDataset([["a"] * 16 * 800 + ["b"] * 800], batch_size=500, negatives=8)
    negatives = rows_of(list(dataset))[:, 2:]
    assert (negatives == 0).float().mean().item() == pytest.approx(8 / 9, abs=0.02)


@pytest.mark.parametrize("num_streams", [1, 3])
def test_a_stream_goes_on_behind_every_batch(num_streams: int) -> None:
    dataset = SkipGramDataset(numbered(3000), batch_size=3001, min_count=1, seed=4)
    assert dataset.num_chunks == 4
    for index in range(num_streams):
        whole = list(dataset.stream(index, num_streams, epoch=2))
        assert len(whole) > 1
        assert [batch.stream for batch in whole] == [index] * len(whole)
        for i, batch in enumerate(whole):
            rest = list(dataset.stream(index, num_streams, start=batch.position, epoch=2))
            assert len(rest) == len(whole) - i - 1
            for expected, actual in zip(whole[i + 1 :], rest, strict=True):
                assert torch.equal(expected.bags.values, actual.bags.values)
                assert expected.position == actual.position


def test_streams_share_the_pairs_of_an_epoch() -> None:
    dataset = SkipGramDataset(numbered(3000), batch_size=500, min_count=1, seed=4)
    whole = rows_of(list(dataset.stream(0, 1, epoch=1)))
    parts = [rows_of(list(dataset.stream(i, 3, epoch=1))) for i in range(3)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(rows_of(list(dataset.stream(0, 1, epoch=2)))[:500], whole[:500])
    first = iter(dataset)
    next(first)
    assert 0 <= first.fraction_read() < 1
    list(first)
    assert first.fraction_read() == 1.0


def test_arguments_out_of_range_are_refused() -> None:
    for options in ({"window": 0}, {"negatives": 0}, {"subsample": -1.0}, {"seed": -1}):
        with pytest.raises(BadRequest, match=f"expected {next(iter(options))} as a"):
            SkipGramDataset(SENTENCES, batch_size=1, **{"min_count": 1, **options})
    dataset = SkipGramDataset(SENTENCES, batch_size=1, min_count=1)
    with pytest.raises(BadRequest, match="found 1, 1 and 0"):
        dataset.stream(1, 1)
    with pytest.raises(BadRequest, match=r"expected a position \(chunk 0 to 1, pairs\)"):
        dataset.stream(0, 1, start=(2, 0))
