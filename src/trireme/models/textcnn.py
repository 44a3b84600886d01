"""TextCNN: the class of a text, by convolutions of several widths.

Source: Kim, "Convolutional Neural Networks for Sentence Classification", EMNLP 2014.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Label, Schema, Sparse
from trireme.metrics import TopK
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.layers import mlp, text_convolution
from trireme.models.sequences import SequenceRows
from trireme.table import Table
from trireme.train.recipe import Recipe

TEXT = "text"
_WINDOWS = (1, 2, 3)


class TextCNN(nn.Module):
    """logits = MLP(of each convolution the maximum over the places).

    Args:
        words: table of the words of the column "text", whose key 0 is padding.
        num_classes: C.
        length: words of a text; the ones behind are left out.
        windows: words that each convolution sees at once. channels: floats that each makes.
        hidden: width of the hidden layer, with tanh.

    The paper has no hidden layer, and dropout in its place.

    Raises BadRequest: a text is shorter than a window.
    """

    def __init__(
        self,
        words: Table,
        *,
        num_classes: int = 2,
        length: int = 100,
        windows: Sequence[int] = _WINDOWS,
        channels: int = 128,
        hidden: int = 96,
    ) -> None:
        super().__init__()
        self.words = SequenceRows(words, column=TEXT, length=length)
        self.convolutions = nn.ModuleList(
            text_convolution(words.width, channels, window, length=length) for window in windows
        )
        self.mlp = mlp([len(windows) * channels, hidden, num_classes], activation=nn.Tanh)

    def forward(self, batch: Batch) -> Tensor:
        """(B, C) logits."""
        words_BDL = self.words(batch).rows.transpose(1, 2)
        maxima = [torch.tanh(part(words_BDL)).amax(2) for part in self.convolutions]
        logits: Tensor = self.mlp(torch.cat(maxima, 1))
        return logits


def class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of (B, C) logits and the numbers of the classes, (B,)."""
    return nn.functional.cross_entropy(logits, labels.long())


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    emb_dim: floats per row of the table "words", default 128. max_len: words of a text, default
        100.
    cnn_filter_size1, cnn_filter_size2, cnn_filter_size3: words that the convolutions see at once,
        default 1, 2, 3; cnn_dim: floats that each makes, default 128.
    hid_dim: width of the hidden layer, default 96. class_dim: classes, default 2.

    Inputs: text, label.
    """
    hyper = HyperParameters(config)
    model = TextCNN(
        hyper.table("words", dim=hyper.whole("emb_dim", 128)),
        num_classes=hyper.whole("class_dim", 2),
        length=hyper.whole("max_len", 100),
        windows=[hyper.whole(f"cnn_filter_size{n}", n) for n in _WINDOWS],
        channels=hyper.whole("cnn_dim", 128),
        hidden=hyper.whole("hid_dim", 96),
    )
    return hyper.recipe(
        model,
        class_loss,
        label="label",
        schema=Schema([Sparse(TEXT), Label("label")]),
        metrics=[TopK(1, name="accuracy", label="label")],
    )
