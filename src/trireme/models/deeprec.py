"""DeepRec: an autoencoder of a user's ratings, which fills in those that are missing.

Source: Kuchaiev and Ginsburg, "Training Deep AutoEncoders for Collaborative Filtering", 2017.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trireme.config import Config
from trireme.data.batch import Batch
from trireme.data.schema import Dense, Schema
from trireme.errors import BadRequest
from trireme.models.columns import tensor_of
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.layers import mlp
from trireme.train.recipe import Recipe

RATINGS = "ratings"


class DeepRec(nn.Module):
    """f(x) = decoder(dropout(encoder(x))) of the ratings x of all items, 0 where there is none.

    Column: "ratings", a number for each item.

    Args:
        layers: the number of items, then the widths of the encoder's layers; the decoder's are the
            same, backwards. All have a SELU.
        dropout: of the encoder's last layer, in training.
        refeeds: how many times in training f is applied to its own output, as in the paper's dense
            re-feeding: an f(x) should be f(f(x)), too.
    """

    def __init__(
        self, *, layers: Sequence[int] = (17768, 512, 512, 1024), dropout: float = 0.8,
        refeeds: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        encoder, decoder = (
            mlp(sizes, activation=nn.SELU, activates_last=True) for sizes in (layers, layers[::-1])
        )
        self.layers = nn.Sequential(encoder, nn.Dropout(dropout), decoder)
        for linear in self.layers.modules():
            if isinstance(linear, nn.Linear):
                nn.init.xavier_uniform_(linear.weight)
        self.refeeds = refeeds

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """(B, items) "ratings"; in training also "refed_1", ..., each made of the one before."""
        outputs = [self.layers(tensor_of(batch, RATINGS))]
        for _ in range(self.refeeds if self.training else 0):
            outputs.append(self.layers(outputs[-1].detach()))
        names = (RATINGS, *(f"refed_{i + 1}" for i in range(len(outputs) - 1)))
        return dict(zip(names, outputs, strict=True))


def rating_loss(outputs: dict[str, Tensor], batch: Batch) -> Tensor:
    """The mean squared error of the given ratings; plus those of each output that was made of
    another one. Without re-feeding its root is the RMSE.
    """
    ratings = tensor_of(batch, RATINGS)
    first, *refed = outputs.values()
    is_rated = ratings != 0
    error = ((first - ratings) * is_rated).square().sum() / is_rated.sum().clamp(min=1)
    before = [first, *refed][:-1]
    again = [nn.functional.mse_loss(y, x.detach()) for x, y in zip(before, refed, strict=True)]
    return torch.stack([error, *again]).sum()


def create(config: Config) -> Recipe:
    """Keys:

    hyper_parameters.layer_sizes: the number of items, and the widths of the encoder's layers;
        default 17768, 512, 512, 1024.
    hyper_parameters.dp_drop_prob: dropout of the last of these, default 0.
    hyper_parameters.optimizer.learning_rate, momentum, weight_decay: of SGD; default 0.005, 0.9 and
        0.
    hyper_parameters.clip_by_norm: gradients of a step are scaled to this norm at most, default 1.
        PaddleRec has no limit, and overflows with its sample, users with a rating each.
    runner.aug_step: re-feedings of a batch, default 1. They are parts of one step here; PaddleRec
        makes a step of each. Its rate is halved after 24, 36, 48, 66 and 72 epochs; here it stays.

    Inputs: ratings. The loss of an evaluation is the mean squared error.

    Raises BadRequest: another optimizer.
    """
    hyper = HyperParameters(config, clip_by_norm=1.0)
    optimizer = str(hyper.get("optimizer.class", "SGD"))
    if optimizer.lower() not in ("sgd", "momentum"):
        raise BadRequest(f"hyper_parameters.optimizer.class: expected SGD, found {optimizer!r}")
    refeeds = HyperParameters(config, "runner").whole("aug_step", 1, least=0)
    layers = hyper.sizes("layer_sizes", (17768, 512, 512, 1024), least=2)
    dropout = hyper.share("dp_drop_prob", 0.0)
    model = DeepRec(layers=layers, dropout=dropout, refeeds=refeeds)
    return hyper.recipe(
        model,
        rating_loss,
        optimizer=torch.optim.SGD(
            model.parameters(),
            lr=hyper.number("optimizer.learning_rate", 0.005),
            momentum=hyper.number("optimizer.momentum", 0.9, may_be_zero=True),
            weight_decay=hyper.number("optimizer.weight_decay", 0.0, may_be_zero=True),
        ),
        schema=Schema([Dense(RATINGS, layers[0])]),
    )
