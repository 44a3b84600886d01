"""Which checkpoints of a folder are kept."""

from __future__ import annotations

import logging

from trireme.checkpoint.format.manifest import Manifest, read_manifest
from trireme.checkpoint.worker_side.publication import remove_checkpoint
from trireme.errors import BadRequest, Corruption
from trireme.storage.storage import Storage

log = logging.getLogger("trireme.checkpoint")


def retain(newest: Storage, keep: int) -> list[str]:
    """Remove all but the newest `keep` complete checkpoints of the folder that `newest` is in.

    Those that deltas among the kept ones need to be loaded on top of stay too, and so does what is
    damaged or no checkpoint at all. Returns the names of those removed.
    """
    parent, own = newest.parent()
    found: dict[str, Manifest] = {}
    for name in parent.folders():
        try:
            found[name] = read_manifest(parent.below(name))
        except (BadRequest, Corruption) as error:
            log.debug("retention: passes over %s/%s: %s", parent.name, name, error)
    order = sorted(found, key=lambda name: (found[name].saved_at, found[name].version))
    order = [name for name in order if name != own] + [own]
    kept = set(order[-keep:])
    for name in reversed(order):
        if name in kept and (needed := _before(name, found)) is not None:
            kept.add(needed)
    removed = [name for name in order if name not in kept]
    for name in removed:
        remove_checkpoint(parent.below(name))
    return removed


def _before(name: str, found: dict[str, Manifest]) -> str | None:
    """The newest checkpoint that a delta may be loaded on top of; None for other modes."""
    delta = found[name]
    if delta.mode != "delta":
        return None
    before = [of for of, manifest in found.items() if manifest.id in delta.chain]
    return max(before, key=lambda of: found[of].version, default=None)
