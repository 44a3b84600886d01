"""A look at the rows of a table: weights, the largest, the nearest; on one process, several servers
and SSD, and while another worker trains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import trireme as tr
from tests.jobs import Job
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.nn import EmbeddingBag, keys_of
from trireme.nn.ids import keys_of_column
from trireme.policy import ShowClick, SparseAccessor
from trireme.server.row_tier import make_row_tier

DIM = 512
MOVIES = [f"movie {i}" for i in range(300)]
SHOWS = pd.DataFrame(
    {"movie": MOVIES, "show": np.arange(300.0), "click": 0.0, "user": range(300)},
)


class Model(torch.nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        policy = SparseAccessor(show_click=ShowClick("show", "click"), embedx_threshold=None)
        table = tr.Table("t", dim=dim, salt=True, policy=policy, optimizer=tr.optim.Adagrad(lr=0.1))
        self.rows, self.table = EmbeddingBag(table, features=["movie", "user"]), table

    def forward(self, batch: tr.data.Batch) -> torch.Tensor:
        movie, user = self.rows(batch).unbind(1)
        return (movie * user).sum(1)


def trained(cluster: Cluster) -> Model:
    set_default(cluster)
    model = Model()
    loss = torch.nn.functional.mse_loss
    trainer = tr.Trainer(model, None, loss=loss, label="click", progress=False, cluster=cluster)
    trainer.fit(SHOWS)
    trainer.optimizer.flush()
    return model


def check(cluster: Cluster) -> None:
    model = trained(cluster)
    view = tr.TableView(model.table, "movie", MOVIES, cluster=cluster)
    assert len(view) == 600  # movies and users
    assert view["movie 7"].shape == (DIM,)
    looked_up = model.eval().rows({"movie": MOVIES, "user": SHOWS["user"]})[:, 0]
    assert torch.equal(view[MOVIES], looked_up.detach())
    assert torch.equal(view[["movie 7", "movie 2", "movie 7"]], looked_up[[7, 2, 7]].detach())
    best = view.top("show", 3)
    assert best.values == ["movie 299", "movie 298", "movie 297"]
    assert best.numbers == [299.0, 298.0, 297.0]
    assert view.nearest(view["movie 7"], 2, metric="cosine").values[0] == "movie 7"
    similar = looked_up[:5].double() @ looked_up.double().T
    expected = similar.topk(4).indices.tolist()
    for faiss in (False, True):
        nearest = view.nearest(looked_up[:5].detach(), 4, faiss=faiss)
        assert [[MOVIES.index(v) for v in one.values] for one in nearest] == expected
    users = tr.TableView(model.table, "user", [3, 999], cluster=cluster)
    assert users.top("show", 5).values == [3], "999 has no row"
    everything = tr.TableView(model.table, cluster=cluster)
    best = everything.top("show", 4)
    assert best.numbers == [299.0, 299.0, 298.0, 298.0], "a movie and a user each"
    keys = np.concatenate(
        [keys_of_column("movie", MOVIES[-2:], salted=True), keys_of("user", [298, 299])]
    )
    assert sorted(best.values) == sorted(keys.tolist())
    assert len(everything.top("time", 1000).values) == 600
    with pytest.raises(BadRequest, match="expected one of time, show, click, score of table 't'"):
        everything.top("<b>", 1)
    with pytest.raises(BadRequest, match="k of 1 to 10000, found 10001"):
        everything.top("show", 10_001)
    with pytest.raises(BadRequest, match="a feature whose values these are"):
        everything["movie 7"]
    with pytest.raises(BadRequest, match="expected values of 'movie' to choose among"):
        tr.TableView(model.table, "movie", cluster=cluster).top("show", 1)


@pytest.fixture
def ssd_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "ssd"
    folder.mkdir()
    return folder


def test_embedded() -> None:
    with embedded() as cluster:
        check(cluster)


def test_rows_on_ssd(ssd_dir: Path) -> None:
    with embedded(tier=make_row_tier("7MiB", str(ssd_dir))) as cluster:
        check(cluster)
        assert cluster.server is not None
        tier = cluster.server.tables["t"].rows.tier
        assert tier is not None
        assert tier["rows"] > 0, "some rows are on SSD"


def test_three_servers() -> None:
    with Job(3) as job:
        job.run(1, check)


def test_one_worker_looks_while_the_other_is_in_a_pass() -> None:
    """In sync a pass of one worker alone cannot end, but a look does."""

    def work(cluster: Cluster) -> list[str]:
        model = Model()
        trainer = tr.Trainer(
            model,
            None,
            loss=torch.nn.functional.mse_loss,
            label="click",
            strategy=tr.Strategy("sync"),
            progress=False,
            cluster=cluster,
        )
        trainer.fit(SHOWS)
        seen = []
        if cluster.worker == 0:
            view = tr.TableView(model.table, "movie", MOVIES, cluster=cluster)
            seen = view.top("show", 1).values
        trainer.fit(SHOWS)
        return seen

    with Job(2) as job:
        assert job.run(2, work) == [["movie 299"], []]


def test_wrong_calls_are_refused() -> None:
    with embedded() as cluster:
        table = tr.Table("plain", dim=2)
        view = tr.TableView(table, "id", [1, 2], cluster=cluster)
        assert view.top("time", 1).values == []
        with pytest.raises(BadRequest, match="expected one of time of table 'plain', found 'show'"):
            view.top("show", 1)
        wrong: list[tuple[Any, str]] = [(0, "0"), (2.5, "2.5"), ("3", "'3'")]
        for k, shown in wrong:
            for take in (view.top, tr.TableView(table, cluster=cluster).top):
                with pytest.raises(BadRequest, match=f"k as an integer >= 1, found {shown}"):
                    take("time", k)
        assert tr.TableView(table, cluster=cluster).top("time", np.int64(2)).values == []
        with pytest.raises(BadRequest, match=r"D = 2, and metric one of .*\(1, 3\) and 'dot'"):
            view.nearest([1.0, 2.0, 3.0], 1)
        for vectors in ("Heat", ["Heat"], None):
            with pytest.raises(BadRequest, match="expected vectors as a tensor or array"):
                view.nearest(vectors, 1)
        for faiss in (False, True):
            with pytest.raises(BadRequest, match=r"without NaN and infinities, .* nan\] at 1"):
                view.nearest([[1.0, 2.0], [1.0, float("nan")]], 1, faiss=faiss)
        with pytest.raises(BadRequest, match="TableView: expected a Table, found 'plain'"):
            tr.TableView("plain", cluster=cluster)
        with pytest.raises(BadRequest, match="distinct values of 'id', found one twice"):
            tr.TableView(table, "id", [1, 1], cluster=cluster)
        with pytest.raises(BadRequest, match="one value of feature 'id' each, found 0 at 1"):
            tr.TableView(table, "id", ["a", ""], cluster=cluster)
