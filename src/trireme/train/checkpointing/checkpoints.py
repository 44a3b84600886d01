"""When a fit takes checkpoints, into which folders, and how many of them stay."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from trireme.errors import BadRequest, check_counts, check_numbers


@dataclass(frozen=True)
class Checkpoints:
    """Folders 1, 2, 3, ... below `path`: one for each checkpoint, the last at the end of the fit.

    Args:
        path: a folder for checkpoints alone, made if absent; on storage that all processes share.
        every_steps: save after this many steps: of the job in sync, of worker 0 in async. Or:
        every_s: save after this many seconds. In async, no save begins before the last one is done.
        keep: how many complete checkpoints stay in the folder; older ones are removed once a new
            one is complete. None: all.
        storage_options: for fsspec, where the path is a location such as s3://bucket/key.

    Raises:
        BadRequest: not one of `every_steps` and `every_s`, or a number out of range.
    """

    path: str | Path
    _: KW_ONLY
    every_steps: int | None = None
    every_s: float | None = None
    keep: int | None = 3
    storage_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if (self.every_steps is None) == (self.every_s is None):
            raise BadRequest(
                "Checkpoints: expected one of every_steps and every_s, found"
                f" every_steps={self.every_steps} and every_s={self.every_s}; every_s=600 saves"
                " every ten minutes"
            )
        for name in ("every_steps", "keep"):
            value = getattr(self, name)
            if value is not None:
                check_counts("Checkpoints", **{name: value})
        if self.every_s is not None:
            check_numbers("Checkpoints", "> 0", every_s=self.every_s)


@dataclass(frozen=True)
class CheckpointAtStop:
    """One checkpoint, in a numbered folder below `path`, when all workers are asked to stop."""

    path: str
    storage_options: Mapping[str, Any] | None = None
