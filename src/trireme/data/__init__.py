"""Data: schemas, sources and datasets that yield batches of columns.

InMemoryDataset, which shuffles over a cluster, is loaded on first use.
"""

from typing import TYPE_CHECKING

from trireme.data.array_dataset import ArrayDataset, ArrayStream
from trireme.data.arrow_reader import arrow
from trireme.data.batch import Bags, Batch, Ragged, Strings
from trireme.data.criteo import criteo
from trireme.data.csv import csv
from trireme.data.libsvm import libsvm
from trireme.data.multislot import multislot
from trireme.data.queue_dataset import QueueDataset, Stream
from trireme.data.schema import Content, Dense, InsId, Label, Number, Schema, Show, Sparse, Weight
from trireme.data.skip_gram import SkipGramDataset, SkipGramStream, read_words, words_of
from trireme.data.strings import string_keys
from trireme.lazy_names import lazy_names

if TYPE_CHECKING:
    from trireme.data.in_memory_dataset import InMemoryDataset, InMemoryStream

__all__ = [
    "ArrayDataset",
    "ArrayStream",
    "Bags",
    "Batch",
    "Content",
    "Dense",
    "InMemoryDataset",
    "InMemoryStream",
    "InsId",
    "Label",
    "Number",
    "QueueDataset",
    "Ragged",
    "Schema",
    "Show",
    "SkipGramDataset",
    "SkipGramStream",
    "Sparse",
    "Stream",
    "Strings",
    "Weight",
    "arrow",
    "criteo",
    "csv",
    "libsvm",
    "multislot",
    "read_words",
    "string_keys",
    "words_of",
]

__getattr__, __dir__ = lazy_names(__name__)
