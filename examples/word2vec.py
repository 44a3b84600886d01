"""Word2vec: vectors of words from text files. It prints the nearest neighbours of some words.

trireme launch --server_num 1 --worker_num 2 examples/word2vec.py book.txt --words sea,ship

Without files it reads the reference pages that come with Python. The last line that worker 0 prints
is RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics

import torch
from torch import Tensor, nn

import trireme as tr
from trireme.models import SkipGram
from trireme.models.word2vec import skip_gram_loss


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="texts; default: Python's reference pages")
    parser.add_argument("--words", default="class,integer,import,loop", help="separated by commas")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--min_count", type=int, default=5)
    parser.add_argument("--mode", default="async", choices=("sync", "async"))
    return parser.parse_args()


def read_text(files: list[str]) -> list[list[str]]:
    """Paragraphs as lists of words."""
    if files:
        return tr.data.read_words(files)
    return [words for page in pydoc_data.topics.topics.values() for words in tr.data.words_of(page)]


def table(name: str, dim: int, start: tr.initializer.Initializer) -> tr.Table:
    return tr.Table(name, dim=dim, optimizer=tr.optim.Adam(lr=5e-3), initializer=start)


def nearest(vectors: Tensor, i: int, k: int = 5) -> list[int]:
    """The k rows in the direction most like that of row i."""
    directions = nn.functional.normalize(vectors, dim=1)
    likeness = directions @ directions[i]
    likeness[i] = -1
    return likeness.topk(k).indices.tolist()


def main() -> None:
    arguments = parse_arguments()
    cluster = tr.init()
    torch.manual_seed(1)
    data = tr.data.SkipGramDataset(
        read_text(arguments.files), batch_size=1024, min_count=arguments.min_count, seed=1
    )
    bound = 0.5 / arguments.dim
    model = SkipGram(
        table("words", arguments.dim, tr.initializer.Uniform(-bound, bound)),
        table("contexts", arguments.dim, tr.initializer.Constant(0.0)),
    )
    trainer = tr.Trainer(
        model, None, loss=skip_gram_loss, label=None, strategy=tr.Strategy(arguments.mode)
    )
    figures = trainer.fit(data, epochs=arguments.epochs)
    if cluster.worker == 0:
        numbers = torch.arange(len(data.words))
        with torch.no_grad():
            vectors = model.eval().center({"center": numbers})[:, 0]
        near = {
            word: [data.words[j] for j in nearest(vectors, data.words.index(word))]
            for word in arguments.words.split(",")
            if word in data.words
        }
        for word, others in near.items():
            print(f"{word}: {', '.join(others)}")
        result = {"pairs": figures["examples"], "loss": figures["loss"], "words": len(data.words)}
        print("RESULT " + json.dumps({**result, "near": near, "workers": cluster.num_workers}))


if __name__ == "__main__":
    main()
