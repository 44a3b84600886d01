"""Which checkpoints of a folder are kept."""

import logging

from trireme.checkpoint.format.manifest import CheckpointManifest, read_manifest
from trireme.checkpoint.worker_side.publication import remove_checkpoint
from trireme.errors import BadRequest, Corruption
from trireme.storage.storage import Storage

log = logging.getLogger("trireme.checkpoint")


def retain(newest: Storage, keep: int) -> list[str]:
    """Remove all but the newest `keep` complete checkpoints of the parent folder of `newest`.

    A checkpoint that a kept delta must be loaded on top of stays too, and so does everything that
    is damaged or not a checkpoint. Returns the names of those removed.
    """
    parent, own = newest.parent()
    manifests: dict[str, CheckpointManifest] = {}
    for name in parent.folders():
        try:
            manifests[name] = read_manifest(parent.below(name))
        except (BadRequest, Corruption) as error:
            log.debug("retention: passes over %s/%s: %s", parent.name, name, error)
    order = sorted(manifests, key=lambda name: (manifests[name].saved_at, manifests[name].version))
    order = [name for name in order if name != own] + [own]
    kept = set(order[-keep:])
    for name in reversed(order):
        if name in kept and (needed := _predecessor(name, manifests)) is not None:
            kept.add(needed)
    removed = [name for name in order if name not in kept]
    for name in removed:
        remove_checkpoint(parent.below(name))
    return removed


def _predecessor(name: str, manifests: dict[str, CheckpointManifest]) -> str | None:
    """The newest checkpoint that a delta may be loaded on top of; None for other modes."""
    delta = manifests[name]
    if delta.mode != "delta":
        return None
    earlier = [other for other, manifest in manifests.items() if manifest.id in delta.chain]
    return max(earlier, key=lambda other: manifests[other].version, default=None)
