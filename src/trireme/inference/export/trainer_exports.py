"""What a trainer writes for inference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from trireme.errors import BadRequest
from trireme.train.optimizer import DistributedOptimizer

if TYPE_CHECKING:
    from trireme.inference.export.exporting import Export


class InferenceExports:
    """The methods of a Trainer that write models for inference."""

    optimizer: DistributedOptimizer
    model: nn.Module
    _exports: dict[nn.Module, Path]  # the last one of each model

    def save_inference_model(
        self,
        path: str | Path,
        *,
        batch: Any,
        mode: Literal["base", "delta"] = "base",
        follows: str | Path | None = None,
        dtype: str | None = None,
        model: nn.Module | None = None,
    ) -> Export:
        """Write what `trireme.inference.Predictor` answers from: rows, the dense part, and what
        the model reads. Every worker calls it.

        Args:
            path: a new folder, on storage that servers and worker 0 share.
            batch: an example of the batches that will be asked, worker 0's; some ids of each
                feature should be in it.
            mode: "base": everything. "delta": what has changed since an export, which it follows:
                rows, keys removed, and the dense part; for Predictor.apply.
            follows: of a delta, the folder of that export; None: the last one that this trainer
                wrote of the model.
            dtype: of stored weights: "float32", "float16", or "int8" with a scale per row. None:
                float32; in a delta as in what it follows.
            model: what to write in place of the whole model: a part of it.

        Returns:
            What was written, and how far its numbers are from the trained ones.

        Raises:
            BadRequest: the folder exists or is outside the servers' root; torch.export cannot take
                the model; weights that the dtype cannot hold; a delta without an export of this
                run that it could follow: after loading a checkpoint, of the time before it.
        """
        from trireme.inference.export import exporting as inference  # loads torch.export's parts

        saved = self.model if model is None else model
        wish = inference.Wish(saved, Path(path), batch, dtype, self._followed(saved, mode, follows))
        export = inference.save(self.optimizer, wish)
        self._exports[saved] = Path(path)
        return export

    def _followed(self, model: nn.Module, mode: str, follows: str | Path | None) -> Path | None:
        """The folder of the export that a delta goes on from."""
        if mode not in ("base", "delta") or (mode == "base" and follows is not None):
            raise BadRequest(
                f"Trainer.save_inference_model: expected mode 'base', or 'delta' with follows=,"
                f" found {mode!r} with {follows!r}"
            )
        if mode == "base":
            return None
        folder = self._exports.get(model) if follows is None else Path(follows)
        if folder is None:
            raise BadRequest(
                "Trainer.save_inference_model: expected follows=FOLDER of an export, as this"
                " trainer has written none of the model"
            )
        return folder
