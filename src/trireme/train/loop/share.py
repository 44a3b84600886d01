"""Which batches of a dataset are this worker's."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader, DistributedSampler

from trireme.errors import BadRequest
from trireme.job.cluster import Cluster

log = logging.getLogger("trireme.train")


@runtime_checkable
class Closes(Protocol):
    """A share of a dataset that reads ahead: it stops when closed."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Place:
    """How far a share has been read.

    batches: of the epoch so far. position: of the last of them, where the dataset gives one.
    """

    batches: int = 0
    position: tuple[int, ...] = ()


BEGIN = Place()


def share_of(
    dataset: Iterable[Any],
    cluster: Cluster,
    epoch: int = 0,
    place: Place = BEGIN,
    *,
    of: tuple[int, int] | None = None,
) -> Iterable[Any]:
    """A part of a dataset, in the order of this epoch, from a place on.

    A dataset with streams gives one. Of any other iterable, which must yield the same batches on
    all workers, each takes every num_workers-th; a DataLoader with a DistributedSampler shares by
    itself. A sampler with a `set_epoch` is told the epoch.

    Args:
        place: in a dataset whose `stream` takes a `start`, its position; in any other as many
            batches are read again and passed over.
        of: which part, of how many; default this worker's of all workers'.

    Raises:
        BadRequest: a DataLoader that would not yield the same batches on all workers.
    """
    at = (cluster.worker, cluster.num_workers) if of is None else of
    if at[0] == at[1]:  # of a worker that has come late, and only listens
        return ()
    if hasattr(dataset, "stream"):
        if place.position and _seeks(dataset):
            share: Iterable[Any] = dataset.stream(*at, epoch=epoch, start=place.position)
            return share
        share = dataset.stream(*at, epoch=epoch)
    else:
        share = _every_nth(dataset, at, epoch)
    return _behind(share, place.batches, dataset) if place.batches else share


def _seeks(dataset: Any) -> bool:
    return "start" in inspect.signature(dataset.stream).parameters


def _behind(share: Iterable[Any], num_batches: int, dataset: object) -> Iterator[Any]:
    kind = type(dataset).__name__
    if isinstance(dataset, Iterator):
        log.warning(
            "train: the first %d batches of this %s are passed over: none is trained on twice, and"
            " none is left out if it gives the same ones as before; nobody can check that",
            num_batches,
            kind,
        )
    else:
        log.info("train: a %s cannot seek: reading %d batches again", kind, num_batches)
    try:
        yield from itertools.islice(share, num_batches, None)
    finally:
        if isinstance(share, Closes):
            share.close()


def _every_nth(dataset: Iterable[Any], at: tuple[int, int], epoch: int) -> Iterator[Any]:
    index, num_parts = at
    if isinstance(dataset, DataLoader):
        for sampler in samplers(dataset):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)  # else every epoch has the order of the first
        if num_parts > 1:
            if _is_shared(dataset, at):
                return (batch for batch in dataset)
            _require_one_order(dataset)
    return (batch for number, batch in enumerate(dataset) if number % num_parts == index)


def samplers(loader: DataLoader[Any]) -> list[Any]:
    """What decides the order of a DataLoader."""
    batches = loader.batch_sampler  # None with batch_size=None
    samplers = [loader.sampler, batches, getattr(batches, "sampler", None)]
    return [sampler for sampler in samplers if sampler is not None]


def _is_shared(loader: DataLoader[Any], at: tuple[int, int]) -> bool:
    for sampler in samplers(loader):
        if isinstance(sampler, DistributedSampler):
            found = sampler.rank, sampler.num_replicas
            if found != at:
                raise BadRequest(
                    f"DataLoader: expected a DistributedSampler of rank {at[0]} and "
                    f"num_replicas {at[1]}, found {found[0]} and {found[1]}; without "
                    "one, batches are shared all the same"
                )
            return True
    return False


def _require_one_order(loader: DataLoader[Any]) -> None:
    for sampler in samplers(loader):
        if getattr(sampler, "generator", sampler) is None:  # it has one, which is not set
            raise BadRequest(
                "DataLoader: expected the same order on all workers, which share its batches, found"
                f" a random one ({type(sampler).__name__}); shuffle with"
                " generator=torch.Generator().manual_seed(n), the same n on all"
            )
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        raise BadRequest(
            "DataLoader: expected in_order=True, because all workers share its batches, found False"
        )
