"""MatchPyramid: how well a document answers a query, by convolution of the products of all pairs of
their words.

Source: Pang et al., "Text Matching as Image Recognition", AAAI 2016.
"""

from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Schema, Sparse
from trireme.errors import BadRequest
from trireme.initializer import Normal
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.layers import mlp
from trireme.models.sequences import SequenceRows
from trireme.table import Table
from trireme.train.recipe import Evaluation, Recipe

LEFT, RIGHT = "sentence_left", "sentence_right"
# The only values of PaddleRec's keys that its network follows.
_FIXED = {
    "conv_act": "relu",
    "hidden_act": "relu",
    "pool_type": "max",
    "pool_padding": "VALID",
    "channels": 1,
    "out_size": 1,
}


class MatchPyramid(nn.Module):
    """score = MLP(the maxima of each field of relu(convolution(products of pairs of words))).

    Columns: "sentence_left" and "sentence_right", words.

    Args:
        words: table of the words.
        lengths: words of the two sentences; the ones behind are left out.
        padding_key: this word is no word.
        window: words of each sentence that the convolution sees at once. kernels: how many
            convolutions.
        pool, stride: size of a field of which the maximum is taken, and steps between two fields.
        hidden: width of the MLP's hidden layer.

    Raises BadRequest: a field is larger than the matrix of products.
    """

    def __init__(
        self,
        words: Table,
        *,
        lengths: tuple[int, int] = (20, 500),
        padding_key: int = 0,
        window: tuple[int, int] = (2, 10),
        kernels: int = 8,
        pool: tuple[int, int] = (6, 50),
        stride: tuple[int, int] = (6, 50),
        hidden: int = 20,
    ) -> None:
        super().__init__()
        fields = [(n - p) // s + 1 for n, p, s in zip(lengths, pool, stride, strict=True)]
        if min(fields) < 1:
            raise BadRequest(f"MatchPyramid: expected a pool within {lengths} words, found {pool}")
        self.sentences = nn.ModuleList(
            SequenceRows(words, column=name, length=length, padding_key=padding_key)
            for name, length in zip((LEFT, RIGHT), lengths, strict=True)
        )
        # The result has the size of the matrix. padding="same" warns of a copy that it makes.
        (above, below), (before, behind) = ((n // 2 - 1 + n % 2, n // 2) for n in window)
        self.pad = nn.ZeroPad2d((before, behind, above, below))
        self.convolution = nn.Conv2d(1, kernels, window)
        self.pool = nn.MaxPool2d(pool, stride)
        self.mlp = mlp([kernels * fields[0] * fields[1], hidden, 1])

    def forward(self, batch: Batch) -> Tensor:
        """(B,) scores."""
        left_BLD, right_BRD = (part(batch).rows for part in self.sentences)
        products_B1LR = (left_BLD @ right_BRD.transpose(1, 2)).unsqueeze(1)
        fields = self.pool(self.convolution(self.pad(products_B1LR)).relu())
        scores: Tensor = self.mlp(fields.flatten(1))
        return scores.squeeze(1)


def halves_loss(scores: Tensor, _: Batch) -> Tensor:
    """By how much the scores of the second half of a batch come closer than 1 to those of the first
    half: a batch is pairs of a query with a right and with a wrong document, all right ones first.

    Raises BadRequest: an odd number of examples.
    """
    if len(scores) % 2:
        raise BadRequest(
            "halves_loss: expected batches of right documents and as many wrong ones behind them,"
            f" found {len(scores)} examples"
        )
    right, wrong = scores.chunk(2)
    return (1 - right + wrong).relu().mean()


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, and

    emb_size: floats per row of the table "words", default 50. vocab_size: its last word is padding;
        without the key, word 0 is.
    sentence_left_size, sentence_right_size: words of the two, default 20 and 500.
    kernel_num, conv_filter: convolutions, default 8, and words of both that one sees, default 2
        and 10.
    pool_size, pool_stride: fields of which the maxima are taken, default 6, 50, and steps between
        them, default the same.
    hidden_size: width of the hidden layer, default 20.
    conv_act, hidden_act, pool_type, pool_padding, channels, out_size: relu, relu, max, VALID, 1, 1.

    Inputs: sentence_left, sentence_right. An example has no label: of each batch the first half are
    right documents, the second half wrong ones for the same queries, so the batch size must be that
    of the data. An evaluation computes scores alone.

    Raises BadRequest: other values of the last keys.
    """
    hyper = HyperParameters(config)
    for key, value in _FIXED.items():
        hyper.fixed(key, value)
    dim, pool = hyper.whole("emb_size", 50), hyper.pair("pool_size", (6, 50))
    model = MatchPyramid(
        # The product of two rows begins with variance 1.
        hyper.table("words", dim=dim, initializer=Normal(std=dim**-0.25)),
        lengths=(hyper.whole("sentence_left_size", 20), hyper.whole("sentence_right_size", 500)),
        padding_key=hyper.whole("vocab_size", 1) - 1,
        window=hyper.pair("conv_filter", (2, 10)),
        kernels=hyper.whole("kernel_num", 8),
        pool=pool,
        stride=hyper.pair("pool_stride", pool),
        hidden=hyper.whole("hidden_size", 20),
    )
    return hyper.recipe(
        model,
        halves_loss,
        schema=Schema([Sparse(LEFT), Sparse(RIGHT)]),
        evaluation=Evaluation(model=model),
    )
