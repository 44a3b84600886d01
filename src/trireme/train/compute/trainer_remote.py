"""What compute workers run for a Trainer: its model, or stages of it."""

from __future__ import annotations

from torch import nn

from trireme.job.cluster import Cluster
from trireme.nn.stages import Stages
from trireme.train.compute.remote_model import RemoteModel, remote_model
from trireme.train.compute.remote_stages import RemoteStages
from trireme.train.loop.scoring import Scorer

Remote = RemoteModel | RemoteStages


def remote_of(cluster: Cluster, model: nn.Module, scorer: Scorer) -> Remote | None:
    """The model on the compute workers of the job; None: it has none. Raises BadRequest: labels of
    the compute workers and of the model that do not fit.
    """
    if not cluster.heter:
        return None
    if isinstance(model, Stages):
        return RemoteStages(cluster, model, scorer)
    return remote_model(cluster, model, scorer)
