"""train_from_dataset and infer_from_dataset: what they print, refuse and leave unchanged."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trireme as tr
from tests.integration.planted_model import Linear, Named, bce, loader, rows_of, trainer_for
from tests.jobs import Job
from trireme import fleet
from trireme.errors import BadRequest, NotFinite
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded


class Seen(Linear):
    """Keeps the mean of its logits in a buffer, and multiplies them by a column of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.num_batches = 0

    def forward(self, batch: Any) -> Tensor:
        logits = super().forward(batch)
        self.num_batches += 1
        self.mean = logits.detach().mean()
        return logits * batch["factor"]


def trainer_of(model: nn.Module, cluster: Cluster, **options: Any) -> tr.Trainer:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"metrics": [tr.metrics.AUC()], "loss": bce, **options}
    return tr.Trainer(model, sgd, cluster=cluster, progress=False, **options)


@pytest.mark.parametrize("threads", [1, 3])
def test_values_are_fetched_by_name(capsys: pytest.CaptureFixture[str], threads: int) -> None:
    with embedded() as cluster:
        fleet.train_from_dataset(
            trainer_of(Seen(), cluster, threads=threads),
            Named(1000, factor=torch.ones(1000)),
            fetch_list=["loss", "auc", "output", "mean", "num_batches", "ins_id", "bias"],
            fetch_info=["cost", "AUC", "logits", "m", "n", "who", "bias"],
            print_period=4,
        )
    lines = capsys.readouterr().out.splitlines()
    number = r"-?[\d.e-]+"
    pattern = (
        rf"train: batch (\d+): cost {number}, AUC {number}, logits \[({number} ){{8}}\.\.\.\] of"
        rf" shape \(50,\), m {number}, n \d+, who \[id\d+ .* \.\.\.\] of shape \(50,\),"
        rf" bias {number}"
    )
    result = [re.fullmatch(pattern, line) for line in lines]
    assert all(result), lines
    assert [int(match[1]) for match in result if match] == [4, 8, 12, 16, 20]


def test_only_the_first_worker_prints_and_every_worker_refuses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work(cluster: Cluster) -> None:
        trainer = trainer_for(cluster)
        with pytest.raises(BadRequest) as refused:
            trainer.fit(Named(400), report=tr.Report(values=["bais"]))
        assert "found nothing of that name for 'bais'; there are" in str(refused.value)
        for part in ("figures loss, auc, log_loss;", "outputs output;", "a, b, label", "bias"):
            assert part in str(refused.value)
        with pytest.raises(BadRequest, match="found a EmbeddingBag for 'rows'"):
            trainer.evaluate(Named(400), report=tr.Report(values=["rows"]))
        trainer.evaluate(Named(400), report=tr.Report(values=["label", "loss"], period=2))

    with Job(1) as job:
        job.run(2, work)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1] for line in lines] == [" batch 2", " batch 4"]


def test_wrong_requests_are_refused() -> None:
    with embedded() as cluster:
        trainer = trainer_for(cluster)
        for options, message in (
            ({"fetch_list": "loss"}, "fetch_list: expected a list of names, found 'loss'"),
            ({"fetch_list": ["loss"], "fetch_info": ["a", "b"]}, "one text in fetch_info"),
            ({"print_period": 0}, "expected print_period as an integer >= 1, found 0"),
            ({"stat_var_names": ["acu"]}, "of the metrics auc, log_loss, found acu"),
        ):
            for call in (fleet.train_from_dataset, fleet.infer_from_dataset):
                with pytest.raises(BadRequest, match=message):
                    call(trainer, loader(100), **options)
        with pytest.raises(BadRequest, match=r"of the metrics \(none\), found auc"):
            fleet.infer_from_dataset(trainer, loader(100), labels=False, stat_var_names=["auc"])
        with pytest.raises(BadRequest, match=r"of the metrics \(none\), found auc"):
            trainer.evaluate(loader(100), labels=False, report=tr.Report(merged=["auc"]))


def test_a_wrong_report_is_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"values": "loss"}, "expected values as a list of names, found 'loss'"),
        ({"values": ["loss"], "labels": ["a", "b"]}, "expected 1 labels, one for each of values"),
        ({"period": 0}, "expected period as an integer >= 1, found 0"),
    ]
    for options, message in wrong:
        with pytest.raises(BadRequest, match=message):
            tr.Report(**options)


@pytest.mark.parametrize(
    ("mode", "threads", "in_loop", "behind"),
    [
        ("async", 1, "wait pull forward backward push other", "read unique pull push"),
        ("async", 3, "wait pull forward backward push other", "read unique"),
        ("sync", 1, "wait pull forward backward push other", "read unique"),
    ],
)
def test_debug_logs_where_time_is_spent(
    capsys: pytest.CaptureFixture[str], mode: str, threads: int, in_loop: str, behind: str
) -> None:
    with embedded() as cluster:
        trainer = trainer_for(cluster, mode, threads)
        trainer.fit(Named(500), report=tr.Report(timing=True, period=5))
    *lines, staleness = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"train: staleness of 10 pushes at servers: \d+ at 50 %, \d+ at 99 %, \d+ at 100 %",
        staleness,
    )
    pattern = (
        r"train: (batch 5|batch 10|all 10 batches): (\d+) in ([\d.]+) s, [\d,]+ examples/s;"
        r" loop(?: of 3 threads)?: (.*); behind it: (.*)"
    )
    result = [re.fullmatch(pattern, line) for line in lines]
    assert all(result), lines
    assert [match[1] for match in result if match] == ["batch 5", "batch 10", "all 10 batches"]
    assert [match[2] for match in result if match] == ["5", "5", "10"]
    last = result[-1]
    assert last is not None
    parts, others = (
        {p.split()[0]: float(p.split()[1]) for p in g.split(", ")} for g in last.groups()[3:]
    )
    assert list(parts) == in_loop.split()
    assert list(others) == behind.split()
    assert all(value > 0 for name, value in parts.items() if name != "wait")
    assert all(value > 0 for name, value in others.items() if name != "read")
    assert sum(parts.values()) == pytest.approx(float(last[3]) * threads, abs=0.003)


def test_debug_takes_reading_and_parsing_from_a_source_that_knows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Stream:
        def __init__(self, batches: Any) -> None:
            self.batches, self.seconds = batches, {"read": 0.0, "parse": 0.0}

        def __iter__(self) -> Any:
            for batch in self.batches:
                self.seconds = {
                    "read": self.seconds["read"] + 1,
                    "parse": 2 + self.seconds["parse"],
                }
                yield batch

    class Source(Named):
        def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Any:
            return Stream(super().stream(index, num_streams))

    with embedded() as cluster:
        trainer_for(cluster).evaluate(Source(500), report=tr.Report(timing=True, period=500))
    [line] = capsys.readouterr().out.splitlines()
    assert "behind it: read 10.0000 s, parse 20.0000 s, unique" in line
    assert "backward" not in line


class Beginning(Named):
    """The first seven batches."""

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Any:
        return itertools.islice(super().stream(index, num_streams, epoch=epoch), 7)


def rows(cluster: Cluster, model: Linear) -> np.ndarray:
    set_default(cluster)
    return rows_of(cluster, model)


@pytest.mark.parametrize(("threads", "mode"), [(1, "async"), (3, "async"), (1, "sync")])
def test_a_batch_whose_outputs_are_not_finite_is_named_and_not_applied(
    threads: int, mode: str
) -> None:
    factor = torch.ones(1000)
    factor[[355, 357, 399]] = torch.tensor([torch.inf, torch.nan, torch.inf])
    with embedded() as cluster:
        model = Seen()
        trainer = trainer_of(model, cluster, threads=threads, strategy=tr.Strategy(mode))
        with pytest.raises(NotFinite) as actual:
            trainer.fit(Named(1000, factor=factor))
        message = str(actual.value)
        assert re.search("found -?(inf|nan) in output 'output' of examples with ins_id", message)
        assert "ins_id 'id355', 'id357', 'id399'; the batch of 50" in message
        assert r"before position (400,) of stream 0; nothing of it was pushed" in message
        at = cluster.client.stream_position()
        assert (at.sequence, at.position) == (7, (0, 7, 350))  # epoch, batches, and where
        found_rows = rows(cluster, model)
    if mode == "sync":  # else the weights of a step are of an age that depends on the threads
        with embedded() as cluster:
            model = Seen()
            trainer_of(model, cluster, strategy=tr.Strategy(mode)).fit(
                Beginning(1000, factor=factor)
            )
            assert (found_rows == rows(cluster, model)).all()
    assert np.isfinite(found_rows).all()


def test_a_loss_that_is_not_finite_names_the_batch() -> None:
    with embedded() as cluster:
        trainer = trainer_of(
            Linear(), cluster, metrics=[], loss=lambda out, labels: (out * torch.nan).mean()
        )
        with pytest.raises(
            NotFinite, match=r"a loss of nan over examples 0, 1, 2, 3, 4 and 45 more"
        ):
            trainer.fit(loader(500))
        with pytest.raises(NotFinite, match=r"ins_id 'id0', 'id1', .* and 45 more"):
            trainer.evaluate(Named(500))
        empty = [{name: values[:0] for name, values in next(iter(loader(50))).items()}]
        with pytest.raises(NotFinite, match=r"there is none: a mean over an empty batch is NaN"):
            trainer.fit(empty)
        assert cluster.client.stream_position().sequence == 0
        with pytest.raises(NotFinite, match="expected finite gradients in step 1, found nan"):
            trainer.fit(loader(500), check_nan=False)


def test_a_label_that_is_not_finite_is_named() -> None:
    batches = list(loader(500))
    batches[3]["label"][7] = torch.nan
    with embedded() as cluster:
        trainer = trainer_of(Linear(), cluster, metrics=[], loss=lambda out, y: (out - y).mean())
        named = r"a loss of nan .* batch of 50, whose column 'label' has NaN or infinity, before"
        with pytest.raises(NotFinite, match=named):
            trainer.fit(batches)


def test_a_batch_without_examples_leaves_the_mean_loss_as_it_is() -> None:
    some = list(loader(500))
    empty = [{name: values[:0] for name, values in some[0].items()}]
    with embedded() as cluster:
        trainer = trainer_of(Linear(), cluster, metrics=[])
        figures = [trainer.evaluate(data, check_nan=False) for data in (some, [*empty, *some])]
        assert figures[0]["loss"] == figures[1]["loss"]


def test_an_output_that_is_not_by_example_names_the_batch() -> None:
    class Normed(Linear):
        def forward(self, batch: Any) -> dict[str, Tensor]:
            logits = super().forward(batch)
            return {"logits": logits, "norm": logits.sum() / 0}

    with embedded() as cluster:
        trainer = trainer_of(Normed(), cluster, metrics=[], loss=lambda out, _: out["norm"])
        with pytest.raises(NotFinite, match=r"nan in output 'norm' of .* 'id4' and 45 more; the"):
            trainer.fit(Named(500))


def test_metrics_cover_all_workers_unless_configured_otherwise(tmp_path: Path) -> None:
    def work(cluster: Cluster) -> list[dict[str, float]]:
        trainer = trainer_for(cluster)
        trainer.load(tmp_path / "trained")
        data = Named(1000, seed=1)
        return [
            trainer.evaluate(data),
            trainer.evaluate(data, report=tr.Report(merged=["log_loss"])),
            trainer.evaluate(data, labels=False),
            trainer.evaluate(data, model=trainer.model.rows),
        ]

    with embedded() as cluster:
        trainer = trainer_for(cluster)
        trainer.fit(Named(1000))
        trainer.save(tmp_path / "trained")
        expected, *_ = work(cluster)
    with Job(2) as job:
        results = job.run(3, work)
    for every, logs_only, *unlabelled in results:
        assert every["auc"] == expected["auc"]
        assert logs_only["log_loss"] == pytest.approx(expected["log_loss"])
        for figures in unlabelled:
            assert figures.keys() == {"examples", "examples_per_s"}
            assert figures["examples"] == 1000
    assert len({logs_only["auc"] for _, logs_only, *_ in results}) == 3
