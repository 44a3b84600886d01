"""Checks for jobs whose workers share the streams of a pass."""

import hashlib
from collections.abc import Sequence

from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.table import Table
from trireme.worker.dense_parameters import DenseParameters


def agree_on_model(
    cluster: Cluster, tables: Sequence[Table], dense: DenseParameters, optimizer: str
) -> None:
    """Raises SchemaMismatch, before anything has changed: a worker that joins later has another
    model.
    """
    if not cluster.num_streams:
        return
    parts = [f"table {table.schema.to_wire()}" for table in tables]
    parts += [f"block {spec.to_wire()}" for spec in dense.specs]
    digest = hashlib.blake2b(repr([optimizer, *parts]).encode(), digest_size=8).hexdigest()
    names = ", ".join(f"{table.name} of dims {list(table.schema.dims)}" for table in tables)
    model = f"tables {names or 'none'}; {len(dense)} parameters under {optimizer}; digest {digest}"
    cluster.client.coordinator.agree(f"model made at {cluster.client.script.location}", model)


def check_own_stream(subject: str, cluster: Cluster) -> None:
    """Raises BadRequest: this worker has no stream except those that it leases."""
    if cluster.num_streams:
        raise BadRequest(
            f"{subject}: expected a loop over streams that workers share out, found one that takes"
            f" none of the {cluster.num_streams}: train with Trainer.fit or tr.prefetch"
        )


def check_data(dataset: object, cluster: Cluster) -> None:
    """Raises BadRequest: some worker cannot read every stream of this data."""
    if not cluster.num_streams:
        return
    has_own_files = getattr(dataset, "own_files", False)
    if has_own_files or not (hasattr(dataset, "stream") or isinstance(dataset, Sequence)):
        own = " of files of each worker's own" if has_own_files else ""
        raise BadRequest(
            "train: expected data that every worker can read any stream of, because workers share"
            f" out {cluster.num_streams} streams: a dataset with stream(index, num_streams,"
            f" epoch=...), or a list of batches; found a {type(dataset).__name__}{own}"
        )
