"""Which batches of a dataset are this worker's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from trireme.cluster import Cluster
from trireme.errors import BadRequest


def share_of(dataset: Iterable[Any], cluster: Cluster, epoch: int = 0) -> Iterable[Any]:
    """This worker's part of a dataset, in the order of this epoch.

    A dataset with streams gives one. Of any other iterable, which must yield the same batches on
    all workers, each takes every num_workers-th; a DataLoader with a DistributedSampler shares by
    itself. A sampler with a `set_epoch` is told the epoch.

    Raises:
        BadRequest: a DataLoader that would not yield the same batches on all workers.
    """
    if hasattr(dataset, "stream"):
        share: Iterable[Any] = dataset.stream(cluster.worker, cluster.num_workers, epoch=epoch)
        return share
    if isinstance(dataset, DataLoader):
        for sampler in _samplers(dataset):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)  # else every epoch has the order of the first
        if cluster.num_workers > 1:
            if _is_shared(dataset, cluster):
                return (batch for batch in dataset)
            _require_one_order(dataset)
    return (
        batch
        for number, batch in enumerate(dataset)
        if number % cluster.num_workers == cluster.worker
    )


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    """What decides the order of a DataLoader."""
    batches = loader.batch_sampler  # None with batch_size=None
    samplers = [loader.sampler, batches, getattr(batches, "sampler", None)]
    return [sampler for sampler in samplers if sampler is not None]


def _is_shared(loader: DataLoader[Any], cluster: Cluster) -> bool:
    for sampler in _samplers(loader):
        if isinstance(sampler, DistributedSampler):
            found = sampler.rank, sampler.num_replicas
            if found != (cluster.worker, cluster.num_workers):
                raise BadRequest(
                    f"DataLoader: expected a DistributedSampler of rank {cluster.worker} and "
                    f"num_replicas {cluster.num_workers}, found {found[0]} and {found[1]}; without "
                    "one, batches are shared all the same"
                )
            return True
    return False


def _require_one_order(loader: DataLoader[Any]) -> None:
    for sampler in _samplers(loader):
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
