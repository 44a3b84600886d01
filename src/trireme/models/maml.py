"""MAML: the weights of a net from which a few steps suffice to tell apart classes not seen before,
here of characters.

Source: Finn et al., "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", ICML 2017.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trireme.config import Config
from trireme.data.batch import Batch, Column, Ragged
from trireme.data.schema import Dense, Schema
from trireme.errors import BadRequest
from trireme.metrics import TopK
from trireme.models.columns import tensor_of
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.layers import mlp
from trireme.models.meta_learning import IS_QUERY, TASK, Weights, sgd, tasks_of
from trireme.train.recipe import Recipe

IMAGE, LABEL, ANSWER = "image", "label", "answer"


class MAML(nn.Module):
    """The logits of the images of each task that are queries, by a copy of the net that has made
    some steps of gradient descent on the task's other images. Those have logits 0.

    Columns: "image", "label", and those of trireme.models.meta_learning.

    Args:
        net: from images (B, 1, S, S) to logits.
        side: S. lr: of the steps. steps: in training. test_steps: else.
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        side: int = 28,
        lr: float = 0.1,
        steps: int = 5,
        test_steps: int = 5,
    ) -> None:
        super().__init__()
        self.net, self.side, self.lr = net, side, lr
        self.steps, self.test_steps = steps, test_steps

    def forward(self, batch: Batch) -> Tensor:
        """(B, C) logits."""
        images = tensor_of(batch, IMAGE).view(-1, 1, self.side, self.side)
        labels = tensor_of(batch, LABEL).long()
        weights = dict(self.net.named_parameters())
        steps = self.steps if self.training else self.test_steps
        queries, logits = [], []
        for known, asked in tasks_of(batch):

            def loss_of(now: Weights, known: Tensor = known) -> Tensor:
                out = functional_call(self.net, now, (images[known],))
                return nn.functional.cross_entropy(out, labels[known])

            adapted = sgd(loss_of, weights, lr=self.lr, steps=steps)
            queries.append(asked)
            logits.append(functional_call(self.net, adapted, (images[asked],)))
        out = torch.cat(logits)
        return out.new_zeros(len(images), out.shape[1]).index_copy(0, torch.cat(queries), out)


class Convolutions(nn.Sequential):
    """Four times convolution, normalization by the batch at hand, ReLU and a maximum of 2 x 2; then
    a linear layer.

    Raises BadRequest: nothing is left of the image.
    """

    def __init__(
        self,
        *,
        side: int = 28,
        num_classes: int = 5,
        channels: int = 64,
        kernel: tuple[int, int] = (3, 3),
        stride: int = 1,
        padding: int = 1,
    ) -> None:
        layers: list[nn.Module] = []
        sides = [side, side]
        for before in (1, channels, channels, channels):
            convolution = nn.Conv2d(before, channels, kernel, stride, padding)
            nn.init.kaiming_normal_(convolution.weight)
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
            norm = nn.BatchNorm2d(channels, track_running_stats=False)
            layers += [convolution, norm, nn.ReLU(), nn.MaxPool2d(2)]
            sides = [
                ((one + 2 * padding - width) // stride + 1) // 2
                for one, width in zip(sides, kernel, strict=True)
            ]
        if min(sides) < 1:
            raise BadRequest(f"Convolutions: expected images larger than {side} x {side}")
        super().__init__(*layers, nn.Flatten(), mlp([channels * sides[0] * sides[1], num_classes]))


@dataclass(frozen=True)
class Images:
    """Makes of each task of a batch, "support", "support_label", "query" and "query_label", one
    example for each image, with "answer": the label, of queries alone.
    """

    num_known: int
    num_asked: int

    def __call__(self, batch: Batch) -> Batch:
        images, labels = (
            torch.cat(
                [
                    tensor_of(batch, f"{part}{ending}").view(batch.num_examples, num, -1)
                    for part, num in (("support", self.num_known), ("query", self.num_asked))
                ],
                1,
            )
            for ending in ("", "_label")
        )
        num_tasks, size = images.shape[:2]
        is_query = (torch.arange(size) >= self.num_known).repeat(num_tasks)
        label = labels.flatten()
        ends = nn.functional.pad(is_query.cumsum(0), (1, 0))
        columns: dict[str, Column] = {
            IMAGE: images.flatten(0, 1),
            LABEL: label,
            TASK: torch.arange(num_tasks).repeat_interleave(size),
            IS_QUERY: is_query.float(),
            ANSWER: Ragged(label[is_query].long(), ends),
        }
        return Batch(columns)


def query_loss(logits: Tensor, batch: Batch) -> Tensor:
    """The cross entropy of the queries."""
    is_query = tensor_of(batch, IS_QUERY) > 0
    labels = tensor_of(batch, LABEL).long()
    return nn.functional.cross_entropy(logits[is_query], labels[is_query])


def create(config: Config) -> Recipe:
    """Keys: clip_by_norm of trireme.models.hyper_parameters, and

    meta_optimizer.class, meta_optimizer.learning_rate: default Adam, 0.001.
    base_optimizer.class: SGD; base_optimizer.learning_rate: of the steps of a task, default 0.1.
    update_step, update_step_test: how many, in training and else, default 5.
    n_way, k_spt, k_query: classes of a task, default 5; images of each to learn it from, default 1,
        and to judge it by, default 15.
    imgsize: pixels of a side, default 28.
    bn_channel, conv_kernal, conv_stride, conv_padding: of the convolutions, default 64; 3, 3; 1; 1.

    Inputs: support, support_label, query, query_label: a task of all its images. Gradients are of
    first order, as in PaddleRec. It has no tables. An evaluation, too, judges all tasks, where
    PaddleRec takes the first one of each batch.

    Raises BadRequest: another base_optimizer, or images that are too small.
    """
    section = "hyper_parameters.meta_optimizer"
    hyper = HyperParameters(
        config,
        **{
            "optimizer.class": config.get(f"{section}.class", "Adam"),
            "optimizer.learning_rate": config.get(f"{section}.learning_rate", 1e-3),
        },
    )
    if str(base := hyper.get("base_optimizer.class", "SGD")).lower() != "sgd":
        raise BadRequest(f"hyper_parameters.base_optimizer.class: expected SGD, found {base!r}")
    ways, side = hyper.whole("n_way", 5, least=2), hyper.whole("imgsize", 28)
    num_known, num_asked = (
        ways * hyper.whole(key, default) for key, default in (("k_spt", 1), ("k_query", 15))
    )
    height, width, *more = hyper.sizes("conv_kernal", (3, 3), least=2)
    if more:
        raise BadRequest(f"hyper_parameters.conv_kernal: expected 2 sizes, found {2 + len(more)}")
    net = Convolutions(
        side=side,
        num_classes=ways,
        channels=hyper.whole("bn_channel", 64),
        kernel=(height, width),
        stride=hyper.whole("conv_stride", 1),
        padding=hyper.whole("conv_padding", 1, least=0),
    )
    model = MAML(
        net,
        side=side,
        lr=hyper.number("base_optimizer.learning_rate", 0.1),
        steps=hyper.whole("update_step", 5),
        test_steps=hyper.whole("update_step_test", 5),
    )
    parts = (("support", num_known), ("query", num_asked))
    fields = [(Dense(p, n * side * side), Dense(f"{p}_label", n)) for p, n in parts]
    return hyper.recipe(
        model,
        query_loss,
        schema=Schema([field for pair in fields for field in pair]),
        metrics=[TopK(1, name="accuracy", label=ANSWER)],
        prepare=Images(num_known, num_asked),
    )
