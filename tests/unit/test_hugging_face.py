"""Datasets of Hugging Face as columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest

from trireme.data.array_dataset import ArrayDataset, as_dataset
from trireme.data.user_columns import columns_of
from trireme.errors import DataError


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    made = datasets.Dataset.from_dict(
        {
            "user": list(range(1000)),
            "genres": [["war"], [], None, ["war", "drama"]] * 250,
            "label": [0.0, 1.0] * 500,
        }
    )
    made.save_to_disk(str(tmp_path / "d"))
    return datasets.load_from_disk(str(tmp_path / "d"))


def test_its_columns_are_the_file_without_a_copy(saved: Any) -> None:
    before = pa.total_allocated_bytes()
    columns = columns_of(saved)
    assert pa.total_allocated_bytes() == before
    assert columns is not None
    assert columns["user"].to_pylist() == list(range(1000))


def test_its_batches_are_those_of_its_table(saved: Any) -> None:
    (batch,) = ArrayDataset(saved, batch_size=1000)
    assert batch["user"].tolist() == list(range(1000))
    assert batch["genres"].offsets[:5].tolist() == [0, 1, 1, 1, 3]
    assert batch["label"][:2].tolist() == [0.0, 1.0]
    formatted = saved.with_format("torch")
    assert next(iter(ArrayDataset(formatted)))["user"][0] == 0


def test_chosen_rows_are_in_their_order(saved: Any) -> None:
    (batch,) = ArrayDataset(saved.select([7, 3, 5]))
    assert batch["user"].tolist() == [7, 3, 5]


def test_several_datasets_are_refused_and_a_stream_is_no_table(saved: Any) -> None:
    with pytest.raises(DataError, match=r"found those named train; choose one, as in data"):
        ArrayDataset(datasets.DatasetDict(train=saved))
    stream = saved.to_iterable_dataset().batch(10)
    assert as_dataset(stream) is stream
