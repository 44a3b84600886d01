"""Exports serve batches of other sizes than the example's, one example too, or refuse them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trireme as tr
from trireme.errors import BadRequest
from trireme.inference import Predictor
from trireme.inference.export import export_model
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded


class Plain(nn.Module):
    """A model that reads no sizes."""

    width = 4

    def __init__(self) -> None:
        super().__init__()
        self.rows = tr.nn.EmbeddingBag(tr.Table("t", dim=4), features=["items"])
        self.top = nn.Linear(self.width, 1)

    def seen(self, batch: Any) -> torch.Tensor:
        rows: torch.Tensor = self.rows(batch).flatten(1)
        return rows

    def forward(self, batch: Any) -> Any:
        return self.top(self.seen(batch)).squeeze(1)


class Counting(Plain):
    """A model that reads how many ids each example has."""

    width = 5

    def seen(self, batch: Any) -> torch.Tensor:
        counts = batch["items"].offsets.diff()[:, None].float()
        return torch.cat([super().seen(batch), counts], 1)


ITEMS = {"items": [[1, 2], [3], [4, 5, 6]], "label": [1.0, 0.0, 1.0]}


def trained(model: nn.Module, data: Any, cluster: Cluster) -> tr.Trainer:
    adam = torch.optim.Adam(model.parameters())
    trainer = tr.Trainer(model, adam, loss=nn.functional.mse_loss, cluster=cluster)
    trainer.fit(data)
    return trainer


def test_a_model_that_counts_ids_is_exported_for_one_example_too(tmp_path: Path) -> None:
    with embedded(threads=1) as cluster:
        trainer = trained(Counting(), ITEMS, cluster)
        export_model(trainer, tmp_path / "export", batch=ITEMS)
        predictor = Predictor(tmp_path / "export")
        for items in ([[1, 2]], [[]], [[7], [1, 2, 3]]):
            expected = trainer.predict({"items": items})["output"]
            assert torch.equal(predictor.predict({"items": items}).outputs["output"], expected)


class Sequence(Plain):
    """A model of the single rows of each bag."""

    def __init__(self, reduced: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.rows = tr.nn.Embedding(self.rows.table, features="items")
        self.reduced = reduced

    def seen(self, batch: Any) -> torch.Tensor:
        return self.reduced(self.rows(batch), batch["items"].offsets)


@pytest.mark.parametrize(
    "reduced",
    [
        partial(tr.nn.sequence_pool, mode="mean"),
        lambda rows, offsets: tr.nn.sequence_pad(rows, offsets, 2, padding_side="left")[0][:, -1],
    ],
)
def test_sequences_are_exported(
    reduced: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    with embedded(threads=1) as cluster:
        trainer = trained(Sequence(reduced), ITEMS, cluster)
        export_model(trainer, tmp_path / "export", batch=ITEMS)
        predictor = Predictor(tmp_path / "export")
        for items in ([[1, 2]], [[]], [[7], [1, 2, 3], [], [2]]):
            expected = trainer.predict({"items": items})["output"]
            assert torch.equal(predictor.predict({"items": items}).outputs["output"], expected)


class Branching(Counting):
    """A model that says something else of batches for which a size is or is not something.

    is_other: of the batch and the outputs.
    """

    def __init__(self, is_other: Callable[[Any, torch.Tensor], bool]) -> None:
        super().__init__()
        self.is_other = is_other

    def forward(self, batch: Any) -> torch.Tensor:
        outputs = super().forward(batch)
        return outputs + 1 if self.is_other(batch, outputs) else outputs


class Second(Plain):
    """Compares all examples with the second one."""

    def forward(self, batch: Any) -> torch.Tensor:
        outputs = super().forward(batch)
        return outputs - outputs[1]


class Lonely(Plain):
    """Says 7 of an example by itself."""

    def forward(self, batch: Any) -> torch.Tensor:
        outputs = super().forward(batch)
        return outputs * 0 + 7 if outputs.shape[0] == 1 else outputs


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (partial(Branching, lambda _, x: x.shape[0] == 1), "output 'output' of one example as"),
        (Lonely, "output 'output' of one example as the model's"),
        (Second, "index 1 out of range"),
    ],
)
def test_a_model_that_is_exported_for_two_examples_and_more_is_so_with_a_warning(
    model: Callable[[], nn.Module], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with embedded(threads=1) as cluster:
        trainer = trained(model(), ITEMS, cluster)
        export_model(trainer, tmp_path / "export", batch=ITEMS)
        assert re.search(f"for two examples and more: .*{reason}", caplog.text)
        predictor = Predictor(tmp_path / "export")
        expected = trainer.predict(ITEMS)["output"]
        assert torch.equal(predictor.predict(ITEMS).outputs["output"], expected)
        with pytest.raises(BadRequest, match="expected columns of the same examples"):
            predictor.predict({"items": [[1, 2]]})


@pytest.mark.parametrize(
    ("is_other", "items"),
    [
        (lambda batch, _: batch["items"].values.shape[0] < 3, [[], [3]]),
        (lambda _, x: x.shape[0] - 2 == 1, [[1], [2], [3]]),
    ],
    ids=["ids", "examples"],
)
def test_conditions_on_other_sizes_stay_where_one_example_is_let_in(
    is_other: Callable[..., bool], items: list[list[int]], tmp_path: Path
) -> None:
    data = {"items": [*ITEMS["items"], [7, 8]], "label": [1.0, 0.0, 1.0, 0.0]}
    with embedded(threads=1) as cluster:
        trainer = trained(Branching(is_other), data, cluster)
        export_model(trainer, tmp_path / "export", batch=data)
        predictor = Predictor(tmp_path / "export")
        expected = trainer.predict({"items": [[1, 2, 3]]})["output"]
        actual = predictor.predict({"items": [[1, 2, 3]]}).outputs["output"]
        assert torch.equal(actual, expected)
        with pytest.raises(BadRequest, match="expected columns of the same examples"):
            predictor.predict({"items": items})


class Looking(Counting):
    """A model that reads all ids, and a column that belongs to the whole batch."""

    def forward(self, batch: Any) -> torch.Tensor:
        ids = batch["items"].values
        return super().forward(batch) + batch["all"][4] + ids.float().mean() / ids.shape[0]


def test_an_example_batch_has_ids_of_others_and_columns_of_the_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = tr.data.Ragged(torch.arange(9), torch.tensor([2, 2, 4, 7]))
    data = {"label": ITEMS["label"], "items": ids, "all": torch.arange(5.0)}
    with embedded(threads=1) as cluster:
        trainer = trained(Looking(), [data], cluster)
        export_model(trainer, tmp_path / "export", batch=data)
        assert "two examples" not in caplog.text
        one = {"items": [[1, 2]], "all": torch.arange(5.0)}
        expected = trainer.predict([one])["output"]
        assert torch.equal(Predictor(tmp_path / "export").predict(one).outputs["output"], expected)


class Several(Counting):
    """A model with outputs of other kinds than float32."""

    def forward(self, batch: Any) -> Any:
        logits = super().forward(batch)
        sizes = batch["items"].offsets.diff()
        return {"logit": logits, "is_click": logits > 0, "size": sizes, "half": logits.half()}


def test_outputs_of_other_kinds_are_exported(tmp_path: Path) -> None:
    with embedded(threads=1) as cluster:
        model = Several()
        sgd = torch.optim.SGD(model.parameters())
        trainer = tr.Trainer(model, sgd, loss=lambda out, _: out["logit"].mean(), cluster=cluster)
        export_model(trainer, tmp_path / "export", batch=ITEMS)
        expected = trainer.predict(ITEMS)
        actual = Predictor(tmp_path / "export").predict(ITEMS).outputs
        torch.testing.assert_close(actual, expected, atol=0, rtol=0)


def test_outputs_without_numbers_and_sizes_taken_as_numbers_are_refused(tmp_path: Path) -> None:
    class NoNumbers(Counting):
        def forward(self, batch: Any) -> torch.Tensor:
            outputs = super().forward(batch)
            return outputs / (outputs * 0)

    class NoRows(Plain):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch).sum()

    class Long(Plain):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch) + len(batch["items"].offsets)

    with embedded(threads=1) as cluster:
        trainer = trained(Counting(), ITEMS, cluster)
        save = partial(export_model, trainer, tmp_path / "export", batch=ITEMS)
        with pytest.raises(BadRequest, match=r"finite outputs .*, found others in 'output'"):
            save(model=NoNumbers())
        with pytest.raises(BadRequest, match="any number of examples, found that offsets 'items'"):
            save(model=Long())
    with embedded(threads=1) as cluster:
        model = NoRows()
        sgd = torch.optim.SGD(model.parameters())
        trainer = tr.Trainer(model, sgd, loss=lambda out, _: out, cluster=cluster)
        with pytest.raises(
            BadRequest, match=r"'output' with a row .* per example, found .* of \(\)"
        ):
            trainer.predict(ITEMS)
