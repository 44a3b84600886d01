"""Data: schemas, sources and datasets that yield batches of columns."""

from trireme.data.batch import Bags, Batch, Ragged

__all__ = ["Bags", "Batch", "Ragged"]
