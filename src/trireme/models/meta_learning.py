"""What models share that learn from many small tasks how to learn one: MAML of first order.

A batch has the examples of a few tasks. Columns: "task", the number of an example's task in the
batch; "is_query", 0 for the examples that a task is learnt from, 1 for those that it is judged by.
The others have outputs of 0, and no part in the loss.

Source: Finn et al., "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", ICML 2017.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from trireme.data.batch import Batch
from trireme.models.columns import tensor_of

TASK, IS_QUERY = "task", "is_query"
Weights = dict[str, Tensor]


def sgd(
    loss_of: Callable[[Weights], Tensor], weights: Mapping[str, Tensor], *, lr: float, steps: int
) -> Weights:
    """The weights after these steps of gradient descent. What comes of them has gradients for the
    weights as if each step had added a constant: MAML of first order.
    """
    now = {name: weight.detach() for name, weight in weights.items()}
    for _ in range(steps):
        leaves = {name: weight.requires_grad_() for name, weight in now.items()}
        with torch.enable_grad():  # also within an evaluation
            slopes = torch.autograd.grad(loss_of(leaves), list(leaves.values()))
        stepped = zip(leaves.items(), slopes, strict=True)
        now = {name: weight.detach() - lr * slope for (name, weight), slope in stepped}
    return {name: weight + (now[name] - weight).detach() for name, weight in weights.items()}


def tasks_of(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each task the places of the examples to learn from, and of those to judge by."""
    task_B, is_query_B = (tensor_of(batch, name).long() for name in (TASK, IS_QUERY))
    for number in torch.unique(task_B):
        places = torch.nonzero(task_B == number).flatten()
        yield places[is_query_B[places] == 0], places[is_query_B[places] == 1]
