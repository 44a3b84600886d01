"""Checkpoints: what servers and a worker write, and read again on any number of servers."""

from trireme.ps.checkpoint.calls import SAVE_TIMEOUT_S
from trireme.ps.checkpoint.handlers import CheckpointHandlers
from trireme.ps.checkpoint.hot import check_hot
from trireme.ps.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from trireme.ps.checkpoint.modes import mode_of
from trireme.ps.checkpoint.storage import Storage, open_storage
from trireme.ps.checkpoint.verify import verify_checkpoint
from trireme.ps.checkpoint.worker import finish_save, load_checkpoint, read_tensors, save_checkpoint

__all__ = [
    "CheckpointHandlers",
    "MANIFEST",
    "Manifest",
    "SAVE_TIMEOUT_S",
    "Storage",
    "check_hot",
    "finish_save",
    "load_checkpoint",
    "mode_of",
    "open_storage",
    "read_manifest",
    "read_tensors",
    "save_checkpoint",
    "verify_checkpoint",
]
