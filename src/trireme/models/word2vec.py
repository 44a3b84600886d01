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
from trireme.models.hyper_parameters import HyperParameters
from trireme.nn import Embedding, EmbeddingBag
from trireme.table import Table
from trireme.train.recipe import Recipe


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


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and sparse_feature_dim
    (default 300). window_size and neg_num are SkipGramDataset's.
    """
    hyper = HyperParameters(config, sparse_feature_dim=300)
    bound = 0.5 / hyper.dim
    model = SkipGram(
        hyper.table("words", initializer=Uniform(-bound, bound)),
        hyper.table("contexts", initializer=Constant(0.0)),
    )
    return Recipe(
        model=model,
        loss=skip_gram_loss,
        optimizer=hyper.optimizer(model),
        label=None,
        schema=Schema(map(Sparse, ("center", "context", "negatives"))),
    )
