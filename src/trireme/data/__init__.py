"""Data: schemas, sources and datasets that yield batches of columns."""

from trireme.data.array_dataset import ArrayDataset, ArrayStream
from trireme.data.batch import Bags, Batch, Ragged
from trireme.data.criteo import criteo
from trireme.data.queue_dataset import QueueDataset, Stream
from trireme.data.schema import Dense, InsId, Label, Schema, Show, Sparse, Weight
from trireme.data.strings import string_keys

__all__ = [
    "ArrayDataset",
    "ArrayStream",
    "Bags",
    "Batch",
    "Dense",
    "InsId",
    "Label",
    "QueueDataset",
    "Ragged",
    "Schema",
    "Show",
    "Sparse",
    "Stream",
    "Weight",
    "criteo",
    "string_keys",
]
