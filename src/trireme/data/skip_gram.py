"""Pairs of words with sampled negatives, from text: what skip-gram trains on.

Mikolov et al., "Distributed Representations of Words and Phrases and their Compositionality", NIPS
2013. All random numbers are drawn here, so that a batch names every row it needs.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from trireme.data.batch import Bags, Batch, check_stream
from trireme.errors import BadRequest, DataError, check_counts, check_numbers

_CHUNK = 10_000  # words whose pairs are made at once
_NOISE_POWER = 0.75
_NAMES = ("center", "context", "negatives")


def words_of(text: str) -> list[list[str]]:
    """The words of a text in lower case, a list for each paragraph. A word is a run of letters."""
    paragraphs = re.split(r"\n\s*\n", text.lower())
    words = [re.findall(r"[^\W\d_]+", paragraph) for paragraph in paragraphs]
    return [paragraph for paragraph in words if paragraph]


def read_words(paths: Iterable[str | os.PathLike[str]]) -> list[list[str]]:
    """The words of text files, as `words_of`. Raises DataError for a file that is not UTF-8."""
    paragraphs = []
    for path in paths:
        try:
            paragraphs += words_of(Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"read_words: expected UTF-8 in {path}, found {error}") from error
    return paragraphs


class SkipGramDataset:
    """Batches of (center, context, negatives), each a word's number in `words`.

    Frequent words are left out at random: one that is a fraction f of the text stays with
    probability sqrt(t / f) + t / f. Then a word is paired with the neighbours on both sides up to a
    distance drawn from 1 to `window`. Negatives are drawn by count to the power of 0.75; one may be
    the context itself. Pairs of 10,000 words are made and shuffled together; no window reaches
    beyond them.

    The pairs of an epoch depend on text, seed and epoch alone; streams cut the text into chunks of
    equal size.

    Args:
        sentences: lists of words; no pair reaches from one into the next.
        batch_size: pairs per batch; the last one of a stream may have fewer.
        window: largest distance.
        negatives: per pair.
        min_count: rarer words are left out.
        subsample: t above; 0 keeps every word.
        seed: of all random numbers.

    Attributes:
        words: the vocabulary, frequent words first.
        counts: (V,) number of occurrences of each.

    Raises:
        BadRequest: an argument out of range. DataError: no word is frequent enough.

    Threads: any for streams; one at a time for iterating, which counts epochs.
    """

    def __init__(
        self,
        sentences: Sequence[Sequence[str]],
        *,
        batch_size: int,
        window: int = 5,
        negatives: int = 5,
        min_count: int = 5,
        subsample: float = 1e-3,
        seed: int = 0,
    ) -> None:
        counts = {"batch_size": batch_size, "window": window, "negatives": negatives}
        check_counts("SkipGramDataset", **counts, min_count=min_count)
        check_counts("SkipGramDataset", low=0, seed=seed)
        check_numbers("SkipGramDataset", ">= 0", subsample=subsample)
        counted = Counter(word for words in sentences for word in words)
        kept = sorted(
            ((word, n) for word, n in counted.items() if n >= min_count),
            key=lambda item: (-item[1], item[0]),
        )
        if not kept:
            raise DataError(
                f"SkipGramDataset: expected words that occur {min_count} times or more, found "
                f"{len(counted)} words, none so often"
            )
        self.words = tuple(word for word, _ in kept)
        self.counts = np.array([n for _, n in kept])
        self.batch_size, self.window, self.negatives = batch_size, window, negatives
        numbers = {word: i for i, word in enumerate(self.words)}
        texts = [[numbers[word] for word in words if word in numbers] for words in sentences]
        self._words = np.concatenate([np.array(text, np.int64) for text in texts])
        self._sentences = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
        shares = self.counts / self.counts.sum()
        self._stays = np.ones(len(shares))
        if subsample:
            self._stays = np.sqrt(subsample / shares) + subsample / shares
        noise = self.counts**_NOISE_POWER
        self._noise = noise.cumsum() / noise.cumsum()[-1]
        self._seed, self._epoch = seed, 0

    @property
    def num_chunks(self) -> int:
        return -(-len(self._words) // _CHUNK)

    def __iter__(self) -> SkipGramStream:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self.stream(0, 1, epoch=epoch)

    def stream(
        self, index: int, num_streams: int, *, start: tuple[int, ...] | None = None, epoch: int = 0
    ) -> SkipGramStream:
        """Stream `index` of `num_streams`: every chunk of the text in exactly one. `start` and
        `epoch`, which determines the random numbers, are as in ArrayDataset.stream.
        """
        check_stream("SkipGramDataset", index, num_streams, epoch)
        begin, end = (self.num_chunks * i // num_streams for i in (index, index + 1))
        start = tuple(start or (begin, 0))
        if len(start) != 2 or not begin <= start[0] <= end or start[1] < 0:
            raise BadRequest(
                f"SkipGramDataset.stream: expected a position (chunk {begin} to {end}, pairs), "
                f"found {start}"
            )
        return SkipGramStream(self, range(begin, end), index, epoch, (start[0], start[1]))

    def pairs(self, chunk: int, epoch: int) -> NDArray[np.int64]:
        """(P, 2 + negatives): center, context and negatives of each pair of one chunk."""
        rng = np.random.default_rng([self._seed, epoch, chunk])
        part = slice(chunk * _CHUNK, (chunk + 1) * _CHUNK)
        words, sentences = self._words[part], self._sentences[part]
        stays = rng.random(len(words)) < self._stays[words]
        words, sentences = words[stays], sentences[stays]
        reach = rng.integers(1, self.window + 1, len(words))
        by_distance = []
        for distance in range(1, self.window + 1):
            left = np.flatnonzero(sentences[:-distance] == sentences[distance:])
            right = left + distance
            for center, context in ((left, right), (right, left)):
                near = reach[center] >= distance
                by_distance.append(np.stack([words[center[near]], words[context[near]]], 1))
        pairs = rng.permutation(np.concatenate(by_distance))
        draws = rng.random((len(pairs), self.negatives))
        return np.concatenate([pairs, np.searchsorted(self._noise, draws, side="right")], 1)


class SkipGramStream(Iterator[Batch]):
    """The batches of one stream; made by SkipGramDataset.stream.

    position: (chunk, pairs of it), after the latest batch returned.

    Threads: one at a time.
    """

    def __init__(
        self,
        dataset: SkipGramDataset,
        chunks: range,
        index: int,
        epoch: int,
        start: tuple[int, int],
    ) -> None:
        self.position: tuple[int, int] = start
        self._dataset, self._chunks = dataset, chunks
        self._index, self._epoch = index, epoch
        self._chunk: tuple[int, NDArray[np.int64]] | None = None

    def __next__(self) -> Batch:
        parts, wanted = [], self._dataset.batch_size
        chunk, done = self.position
        while wanted and chunk < self._chunks.stop:
            part = self._pairs(chunk)[done : done + wanted]
            if len(part):
                parts.append(part)
            wanted, done = wanted - len(part), done + len(part)
            if wanted:
                chunk, done = chunk + 1, 0
        if not parts:
            raise StopIteration
        self.position = (chunk, done)
        batch = _batch(np.concatenate(parts))
        batch.stream, batch.position = self._index, self.position
        return batch

    def fraction_read(self) -> float:
        """The fraction of the stream that has been returned, 0 to 1, to the nearest chunk."""
        return (self.position[0] - self._chunks.start) / max(len(self._chunks), 1)

    def _pairs(self, chunk: int) -> NDArray[np.int64]:
        if self._chunk is None or self._chunk[0] != chunk:
            self._chunk = (chunk, self._dataset.pairs(chunk, self._epoch))
        return self._chunk[1]


def _batch(pairs_BC: NDArray[np.int64]) -> Batch:
    num, width = pairs_BC.shape
    values = np.concatenate([pairs_BC[:, 0], pairs_BC[:, 1], pairs_BC[:, 2:].ravel()])
    sizes = np.repeat([1, 1, width - 2], num)
    offsets = np.concatenate([[0], sizes.cumsum()])
    return Batch({}, Bags(_NAMES, torch.from_numpy(values), torch.from_numpy(offsets)))
