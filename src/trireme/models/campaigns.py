"""The campaigns of MetaHeac as PaddleRec's readers yield them, made into examples with features.

Shapes: B examples, F features, L ids of a feature at most, S sets of users.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trireme.data.batch import Batch, Column, Ragged
from trireme.errors import BadRequest
from trireme.models.columns import ragged_of
from trireme.models.meta_learning import IS_QUERY, TASK

LABEL = "label"
# The most ids of each dynamic feature; the shorter ones are padded.
LONGEST = (10, 10, 10, 5, 5, 5, 5)


@dataclass(frozen=True)
class Tasks:
    """Makes examples with features of what PaddleRec's readers yield: "support" and "query", the
    ids of several users of each of `num_tasks` tasks, and their labels.

    The ids of a task are, one kind after the other: static features of all its users, dynamic ones
    padded to LONGEST, how many of these are there, and features of the ad.
    """

    num_tasks: int
    num_static: int
    num_ad: int

    def __call__(self, batch: Batch) -> Batch:
        """Raises BadRequest: numbers of ids and labels that do not fit."""
        parts: list[list[Tensor]] = []
        sizes, labels = [], []
        for number, is_query, ids, label in self._sets(batch):
            widths = (self.num_static, sum(LONGEST), len(LONGEST), self.num_ad)
            if len(ids) != len(label) * sum(widths):
                raise BadRequest(
                    f"Tasks: expected {sum(widths)} ids of each of {len(label)} users, found"
                    f" {len(ids)} of all"
                )
            kinds = torch.split(ids, [len(label) * width for width in widths])
            parts.append([one.view(len(label), -1) for one in kinds])
            sizes.append((number, is_query, len(label)))
            labels.append(label)
        static, dynamic, lengths, ad = (torch.cat(kind) for kind in zip(*parts, strict=True))
        counts = torch.tensor([size for *_, size in sizes])
        task, is_query_S = torch.tensor([two for *two, _ in sizes]).unbind(1)
        columns: dict[str, Column] = {
            LABEL: torch.cat(labels).float(),
            TASK: task.repeat_interleave(counts),
            IS_QUERY: is_query_S.repeat_interleave(counts).float(),
            **_single("static", static),
            **_padded(dynamic, lengths),
            **_single("ad", ad),
        }
        return Batch(columns)

    def _sets(self, batch: Batch) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """The users of each task to learn from, then to judge by: the task's number, which of the
        two, ids and labels.
        """
        for example, task in itertools.product(range(batch.num_examples), range(self.num_tasks)):
            for is_query, part in enumerate(("support", "query")):
                both = []
                for name in (part, f"{part}_label"):
                    values, offsets = ragged_of(batch, name)[:2]
                    own = values[int(offsets[example]) : int(offsets[example + 1])]
                    if len(own) % self.num_tasks:
                        raise BadRequest(
                            f"Tasks: expected as many values in {name!r} of each of"
                            f" {self.num_tasks} tasks, found {len(own)} of all"
                        )
                    both.append(own.view(self.num_tasks, -1)[task])
                yield example * self.num_tasks + task, is_query, both[0], both[1]


def _single(kind: str, ids_BF: Tensor) -> dict[str, Ragged]:
    places = torch.arange(len(ids_BF) + 1)
    return {f"{kind}_{i}": Ragged(ids, places) for i, ids in enumerate(ids_BF.T.contiguous())}


def _padded(ids: Tensor, lengths_BF: Tensor) -> dict[str, Ragged]:
    """The dynamic features without padding."""
    columns = {}
    for i, ids_BL in enumerate(torch.split(ids, list(LONGEST), 1)):
        length_B = lengths_BF[:, i].clamp(0, LONGEST[i])
        is_there_BL = torch.arange(LONGEST[i]) < length_B[:, None]
        ends = nn.functional.pad(length_B.cumsum(0), (1, 0))
        columns[f"dynamic_{i}"] = Ragged(ids_BL[is_there_BL], ends)
    return columns
