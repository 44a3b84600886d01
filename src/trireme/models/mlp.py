"""The multi-layer perceptron that the models share."""

import itertools
import math
from collections.abc import Sequence

from torch import nn


def mlp(
    sizes: Sequence[int], *, gain: float = 1.0, activation: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    """Linear layers of these widths with an activation between them, weights
    Normal(gain / sqrt(fan_in)), biases 0.
    """
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.normal_(linear.weight, std=gain / math.sqrt(fan_in))
        nn.init.zeros_(linear.bias)
        layers += [linear, activation()]
    return nn.Sequential(*layers[:-1])
