"""TagSpace: a text becomes a vector by convolution, near those of its tags.

Source: Weston et al., "#TagSpace: Semantic Embeddings from Hashtags", EMNLP 2014.
"""

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Schema, Sparse
from trireme.metrics import TopK
from trireme.models.columns import PLACE, first_is_right
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.layers import mlp, text_convolution
from trireme.models.losses import MarginLoss
from trireme.models.sequences import SequenceRows
from trireme.nn import EmbeddingBag
from trireme.table import Table
from trireme.train.recipe import Recipe

TEXT, TAG, OTHERS = "text", "pos_tag", "neg_tag"


class TagSpace(nn.Module):
    """Cosines of a text with its tag, and with K others; -1 where an example has fewer others.

    The vector of a text is linear(max over the places of tanh(convolution(rows of the words))).
    Columns: "text", the words; "pos_tag", one each; "neg_tag", other tags.

    The paper has inner products where this has cosines, and the WARP loss, which draws other tags
    until one is too near, where this has the margin to the nearest of K.

    Args:
        words, tags: tables of the words and of the tags.
        num_others: K; other tags behind these are left out.
        length: words of a text; the ones behind are left out.
        padding_key: this word is no word.
        window: words that the convolution sees at once. channels: floats that it makes.

    Raises BadRequest: a text is shorter than the window.
    """

    def __init__(
        self,
        words: Table,
        tags: Table,
        *,
        num_others: int = 3,
        length: int = 45,
        padding_key: int = 0,
        window: int = 5,
        channels: int = 1000,
    ) -> None:
        super().__init__()
        self.words = SequenceRows(words, column=TEXT, length=length, padding_key=padding_key)
        self.tag = EmbeddingBag(tags, features=TAG)
        self.others = SequenceRows(tags, column=OTHERS, length=num_others, padding_key=None)
        self.convolution = text_convolution(words.width, channels, window, length=length)
        self.linear = mlp([channels, tags.width])

    def forward(self, batch: Batch) -> Tensor:
        """(B, 1 + K) cosines, that of the tag first."""
        words_BDL = self.words(batch).rows.transpose(1, 2)
        text_BD = self.linear(torch.tanh(self.convolution(words_BDL)).amax(2))
        others = self.others(batch)
        tags = torch.cat([self.tag(batch), others.rows], 1)
        cosines = nn.functional.cosine_similarity(text_BD[:, None], tags, dim=2)
        is_there = nn.functional.pad(others.is_there, (1, 0), value=True)
        return cosines.masked_fill(~is_there, -1.0)


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    emb_dim: floats per row of the tables "words" and "tags", default 10.
    text_len: words of a text, default 45. vocab_text_size: its last word is padding; without the
        key, word 0 is.
    win_size, hid_dim: words that the convolution sees at once, default 5, and floats that it makes,
        default 1000.
    margin: default 0.1. neg_size: other tags of an example, default 3.

    Inputs: text, pos_tag, neg_tag.
    """
    hyper = HyperParameters(config)
    dim = hyper.whole("emb_dim", 10)
    model = TagSpace(
        hyper.table("words", dim=dim),
        hyper.table("tags", dim=dim),
        num_others=hyper.whole("neg_size", 3),
        length=hyper.whole("text_len", 45),
        padding_key=hyper.whole("vocab_text_size", 1) - 1,
        window=hyper.whole("win_size", 5),
        channels=hyper.whole("hid_dim", 1000),
    )
    return hyper.recipe(
        model,
        MarginLoss(hyper.number("margin", 0.1, may_be_zero=True)),
        schema=Schema(map(Sparse, (TEXT, TAG, OTHERS))),
        metrics=[TopK(1, name="right_tag", label=PLACE)],
        prepare=first_is_right,
    )
