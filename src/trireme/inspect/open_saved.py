"""Opens a path that holds a checkpoint or an export."""

from pathlib import Path

from trireme.checkpoint.format.manifest import MANIFEST
from trireme.errors import BadRequest
from trireme.inference.export_manifest import is_export
from trireme.inspect.saved_checkpoint import SavedCheckpoint
from trireme.inspect.saved_export import SavedExport
from trireme.inspect.saved_model import SavedModel
from trireme.storage.storage import open_storage

SHOWN_MAX = 8


def open_saved(path: str) -> SavedModel:
    """Raises BadRequest if there is neither, Corruption if the manifest is damaged."""
    if "://" not in path and is_export(Path(path)):
        return SavedExport(Path(path).absolute())
    storage = open_storage(path, None)
    if storage.size(MANIFEST) is None:
        names = sorted(name for name in storage.folders() if not name.startswith("."))
        hint = f"; folders there: {', '.join(names[:SHOWN_MAX])}" if names else ""
        raise BadRequest(f"inspect: expected {storage.name}/{MANIFEST}, found none{hint}")
    return SavedCheckpoint(storage)
