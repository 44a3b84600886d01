"""Which batches of a dataset a worker trains on."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import xxhash
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, DistributedSampler

from trireme.data.array_dataset import ArrayStream, as_dataset
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.worker.script import DataCut

log = logging.getLogger("trireme.train")


@runtime_checkable
class Closable(Protocol):
    """Batches that are read ahead, until they are closed."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class EpochPosition:
    """How far the batches of an epoch have been read."""

    batches: int = 0  # their number
    position: tuple[int, ...] = ()  # of the last one, where the dataset has positions

    @classmethod
    def after(cls, pushed: tuple[int, ...], epoch: int, num_pushes: int = 0) -> EpochPosition:
        """Where a stream goes on after its last push, of this position; else a push is a batch."""
        is_here = len(pushed) > 1 and pushed[0] == epoch
        return cls(pushed[1], pushed[2:]) if is_here else cls(num_pushes)


EPOCH_START = EpochPosition()


def cut_of(dataset: Iterable[Any] | None) -> DataCut:
    """How a dataset is cut into the batches or files that positions count."""
    if isinstance(dataset, (list, tuple)):
        digest = xxhash.xxh32()  # each worker takes every S-th: all must have one list
        for leaf in pytree.tree_leaves((dataset[:1], dataset[-1:])):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_meta:
                flat = leaf.detach().cpu().contiguous().reshape(-1)
                digest.update(flat.view(torch.uint8).numpy().tobytes())
        return DataCut(f"{len(dataset)} batches (XXH32 {digest.hexdigest()} of both ends)")
    return DataCut(str(getattr(dataset, "cut", "")), bool(getattr(dataset, "own_files", False)))


def worker_batches(
    dataset: Iterable[Any],
    cluster: Cluster,
    epoch: int = 0,
    start: EpochPosition = EPOCH_START,
    *,
    part: tuple[int, int] | None = None,
    shaped: bool = False,
) -> Iterable[Any]:
    """A part of a dataset, in the order of this epoch.

    A dataset with streams gives one stream. Of any other iterable, which must yield the same
    batches on all workers, a worker takes every num_workers-th; a DataLoader with a
    DistributedSampler gives each worker its own. A sampler with a `set_epoch` gets the epoch.
    A DataFrame, or columns by name, is an ArrayDataset.

    Args:
        start: where to begin: at the position, if the dataset's `stream` takes a `start`; else that
            many batches are read again and left out.
        part: which part, of how many; default this worker's.
        shaped: of columns without examples one batch of none, whose outputs have their shape.

    Raises:
        BadRequest: a DataLoader that would not yield the same batches on all workers.
    """
    index, num_parts = (cluster.worker, cluster.num_workers) if part is None else part
    if index == num_parts:  # of a late worker, which only listens
        return ()
    batches: Iterable[Any]
    dataset = as_dataset(dataset)
    if hasattr(dataset, "stream"):
        if start.position and "start" in inspect.signature(dataset.stream).parameters:
            batches = dataset.stream(index, num_parts, epoch=epoch, start=start.position)
            return batches
        batches = dataset.stream(index, num_parts, epoch=epoch)
        if shaped and isinstance(batches, ArrayStream):
            batches = batches.or_no_examples()
    else:
        batches = _every_nth(dataset, index, num_parts, epoch)
    return _skipped(batches, start.batches, dataset) if start.batches else batches


def _skipped(batches: Iterable[Any], num_batches: int, dataset: object) -> Iterator[Any]:
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
        yield from itertools.islice(batches, num_batches, None)
    finally:
        if isinstance(batches, Closable):
            batches.close()


def _every_nth(dataset: Iterable[Any], index: int, num_parts: int, epoch: int) -> Iterator[Any]:
    if isinstance(dataset, DataLoader):
        for sampler in samplers(dataset):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)  # else every epoch has the order of the first
        if num_parts > 1:
            if _is_distributed(dataset, index, num_parts):
                return (batch for batch in dataset)
            _check_order(dataset)
    return (batch for number, batch in enumerate(dataset) if number % num_parts == index)


def samplers(loader: DataLoader[Any]) -> list[Any]:
    """What decides the order of a DataLoader."""
    batches = loader.batch_sampler  # None with batch_size=None
    inner = getattr(batches, "sampler", None)
    return [sampler for sampler in (loader.sampler, batches, inner) if sampler is not None]


def unseeded_sampler(loader: DataLoader[Any]) -> Any:
    """A sampler with a generator that is not set: each process has another order. None: none."""
    unseeded = (s for s in samplers(loader) if getattr(s, "generator", s) is None)
    return next(unseeded, None)


def _is_distributed(loader: DataLoader[Any], index: int, num_parts: int) -> bool:
    for sampler in samplers(loader):
        if isinstance(sampler, DistributedSampler):
            if (sampler.rank, sampler.num_replicas) != (index, num_parts):
                raise BadRequest(
                    f"DataLoader: expected a DistributedSampler of rank {index} and "
                    f"num_replicas {num_parts}, found {sampler.rank} and {sampler.num_replicas};"
                    " without one, batches are shared all the same"
                )
            return True
    return False


def _check_order(loader: DataLoader[Any]) -> None:
    """Raises BadRequest: workers may not see the same order."""
    if (sampler := unseeded_sampler(loader)) is not None:
        raise BadRequest(
            "DataLoader: expected the same order on all workers, which share its batches, found"
            f" a random one ({type(sampler).__name__}); shuffle with"
            " generator=torch.Generator().manual_seed(n), the same n on all"
        )
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        raise BadRequest(
            "DataLoader: expected in_order=True, because all workers share its batches, found False"
        )
