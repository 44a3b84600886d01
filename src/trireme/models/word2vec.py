"""Word2vec: skip-gram with negative sampling. trireme.data.SkipGramDataset makes pairs and
negatives, so that their rows can be pulled ahead.

Source: Mikolov et al., "Distributed Representations of Words and Phrases and their
Compositionality", NIPS 2013.
"""

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch, Ragged
from trireme.data.schema import Schema, Sparse
from trireme.errors import BadRequest
from trireme.initializer import Constant, Uniform
from trireme.metrics import TopK
from trireme.models.columns import AllIds, values_of
from trireme.models.hyper_parameters import HyperParameters
from trireme.nn import Embedding, EmbeddingBag
from trireme.table import Table
from trireme.train.recipe import Evaluation, Recipe

ANALOGY = ("analogy_a", "analogy_b", "analogy_c", "analogy_d")
ALL_WORDS = "all_words"


class SkipGram(nn.Module):
    """logits = <center, context>, <center, negative> for each negative.

    Columns: "center" and "context", one word each; "negatives", the same number of words in every
    example.

    Args:
        words: table of the word vectors, which the center is looked up in.
        contexts: table of vectors for contexts and negatives, of the same dim.
    """

    def __init__(self, words: Table, contexts: Table) -> None:
        super().__init__()
        self.center = EmbeddingBag(words, features="center")
        self.context = EmbeddingBag(contexts, features="context")
        self.negatives = Embedding(contexts, features="negatives")

    def forward(self, batch: Batch) -> Tensor:
        """(B, 1 + K) logits: of the context, then of the K negatives.

        Raises:
            BadRequest: examples differ in their number of negatives.
        """
        if not torch.compiler.is_compiling():  # a graph cannot look at values
            _expect_equal_sizes(batch)
        center_B1D = self.center(batch)
        num, _, dim = center_B1D.shape
        others = torch.cat([self.context(batch), self.negatives(batch).view(num, -1, dim)], 1)
        logits: Tensor = (others @ center_B1D.transpose(1, 2)).squeeze(2)
        return logits


def _expect_equal_sizes(batch: Batch) -> None:
    negatives = batch["negatives"]
    if not isinstance(negatives, Ragged):
        return
    sizes = negatives.offsets.diff()
    if (sizes != sizes[:1]).any():
        raise BadRequest(
            "SkipGram: expected as many 'negatives' in every example, found between"
            f" {int(sizes.min())} and {int(sizes.max())}"
        )


def skip_gram_loss(logits: Tensor, batch: Batch) -> Tensor:
    """-log sigmoid(context) - sum of log sigmoid(-negative), averaged over examples."""
    positive = nn.functional.logsigmoid(logits[:, 0])
    negatives = nn.functional.logsigmoid(-logits[:, 1:]).sum(1)
    return -(positive + negatives).mean()


class Analogy(nn.Module):
    """Which word is to c as b is to a: the vector b - a + c, times those of all words, of length 1.

    Columns: "analogy_a", "analogy_b", "analogy_c", one word each, which are not answers; and
    "all_words", which AllIds adds.
    """

    def __init__(self, words: Table) -> None:
        super().__init__()
        self.known_words = EmbeddingBag(words, features=list(ANALOGY[:3]))
        self.answers = Embedding(words, features=ALL_WORDS)

    def forward(self, batch: Batch) -> Tensor:
        """(B, V) scores of the words."""
        a, b, c = self.known_words(batch).unbind(1)
        scores: Tensor = (b - a + c) @ nn.functional.normalize(self.answers(batch), dim=1).T
        for name in ANALOGY[:3]:
            words_B1 = values_of(batch, name)[:, None].to(scores.device)
            scores = scores.scatter(1, words_B1, torch.finfo(scores.dtype).min)
        return scores


def _analogies(words: Table, num_words: int) -> Evaluation:
    """What PaddleRec's word2vec_infer_reader reads: four words, and three of them once more."""
    return Evaluation(
        model=Analogy(words),
        metrics=[TopK(1, name="analogy", label=ANALOGY[3])],
        schema=Schema(map(Sparse, (*ANALOGY, "inputs_words"))),
        prepare=AllIds({ALL_WORDS: num_words}),
    )


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and sparse_feature_dim
    (default 300). window_size and neg_num are SkipGramDataset's, or the reader's. With
    sparse_feature_number, the number of words, what is evaluated are analogies.
    """
    hyper = HyperParameters(config, sparse_feature_dim=300)
    bound = 0.5 / hyper.dim
    words = hyper.table("words", initializer=Uniform(-bound, bound))
    model = SkipGram(words, hyper.table("contexts", initializer=Constant(0.0)))
    is_counted = hyper.get("sparse_feature_number") is not None
    return hyper.recipe(
        model,
        skip_gram_loss,
        schema=Schema(map(Sparse, ("center", "context", "negatives"))),
        evaluation=_analogies(words, hyper.whole("sparse_feature_number", 1))
        if is_counted
        else None,
    )
