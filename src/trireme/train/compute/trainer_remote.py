"""What compute workers run for a Trainer: its model, or stages of it."""

from __future__ import annotations

from torch import nn

from trireme.job.cluster import Cluster
from trireme.nn.stages import Stages
from trireme.train.compute.remote_model import RemoteModel, remote_model
from trireme.train.compute.remote_stages import RemoteStages
from trireme.train.loop.scoring import Loss

Remote = RemoteModel | RemoteStages


def remote_of(cluster: Cluster, model: nn.Module, loss: Loss, label: str | None) -> Remote | None:
    """The model on the compute workers of the job; None: it has none. Raises BadRequest: labels of
    the compute workers and of the model that do not fit.
    """
    if not cluster.heter:
        return None
    if isinstance(model, Stages):
        return RemoteStages(cluster, model, loss, label)
    return remote_model(cluster, model, loss, label)
