"""TDM learns nodes of a tree, and finds items along it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import trireme as tr
from tests.paddlerec.tree import write_tree
from tests.seeds import SEED
from trireme.config import Config
from trireme.data import Batch, Ragged
from trireme.errors import BadRequest, DataError
from trireme.job.cluster import Cluster
from trireme.models import TDM, zoo
from trireme.models.columns import Draws
from trireme.models.tdm import AllNodes, BeamSearch, LayerSamples, TreeIndex, node_loss


@pytest.fixture
def tree(tmp_path: Path) -> TreeIndex:
    """16 leaves of ids 300, 301, ..."""
    return TreeIndex.read(write_tree(tmp_path / "tree.pb", [(15 + i, 300 + i) for i in range(16)]))


def leaves(ids: list[int], position: int = 0) -> Batch:
    users = torch.eye(16)[torch.tensor(ids) - 300]
    column = Ragged(torch.tensor(ids), torch.arange(len(ids) + 1))
    return Batch({"user_item": users, "unit_id": column}, position=(position,))


def test_a_tree_is_read_with_its_levels_and_paths(tmp_path: Path) -> None:
    gaps = [(7, 40), (8, 41), (10, 42), (14, 43)]
    tree = TreeIndex.read(write_tree(tmp_path / "tree.pb", gaps))
    assert [layer.tolist() for layer in tree.layers] == [[0], [1, 2], [3, 4, 6], [7, 8, 10, 14]]
    places = tree.places(np.array([43, 40, 42]))
    assert places.tolist() == [3, 0, 2]
    assert tree.paths(places, 1).tolist() == [[2, 6, 14], [1, 3, 7], [1, 4, 10]]
    with pytest.raises(DataError, match="expected ids of leaves, found 44"):
        tree.places(np.array([40, 44]))
    wide = TreeIndex.read(write_tree(tmp_path / "wide.pb", [(4, 1), (12, 300)], branch=3))
    assert [layer.tolist() for layer in wide.layers] == [[0], [1, 3], [4, 12]]


def test_a_tree_refuses_other_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected a tree in .*none, found none"):
        TreeIndex.read(tmp_path / "none")
    whole = write_tree(tmp_path / "tree.pb", [(3, 0), (5, 1)]).read_bytes()
    one = write_tree(tmp_path / "one.pb", [(1, 0)], branch=1).read_bytes()
    for content in (b"", b"text", whole[:-1], whole[:9], one, bytes(8)):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(DataError, match=r"expected a tree in .*other"):
            TreeIndex.read(tmp_path / "other")
    nodes = [(3, 0), (2, 1)]
    with pytest.raises(DataError, match="expected leaves of one level in"):
        TreeIndex.read(write_tree(tmp_path / "uneven.pb", nodes))
    with pytest.raises(BadRequest, match="tree_path: expected a file, found None"):
        zoo.load("tdm").create(Config({}))
    write_tree(tmp_path / "tree.pb", [(1, 0), (2, 1)])
    (tmp_path / "config.yaml").write_text(
        "hyper_parameters: {tree_path: tree.pb, start_sample_layer: 2}\n"
    )
    with pytest.raises(BadRequest, match="start_sample_layer: expected a level below 2, found 2"):
        zoo.load("tdm").create(Config.load(tmp_path / "config.yaml"))


def test_samples_are_the_path_and_other_nodes_of_each_level(tree: TreeIndex) -> None:
    sample = LayerSamples(tree, 0, (3, 1, 2, 5, 7))
    batch = sample(leaves([300, 313]))
    labels, nodes = batch["node_labels"], batch["nodes"].values.view(2, -1)
    assert labels.shape == nodes.shape == (2, 1 + 2 + 3 + 6 + 8)
    assert nodes[labels > 0].view(2, -1).tolist() == [[0, 1, 3, 7, 15], [0, 2, 6, 13, 28]]
    levels = [[0], [1] * 2, [2] * 3, [3] * 6, [4] * 8]
    level_of = torch.log2(nodes + 1.0).long()
    assert level_of.tolist() == [[level for part in levels for level in part]] * 2
    for row, is_right in zip(nodes, labels > 0, strict=True):
        assert not set(row[is_right].tolist()) & set(row[~is_right].tolist())
    assert torch.equal(sample(leaves([300, 313]))["nodes"].values, batch["nodes"].values)
    other = sample(leaves([300, 313], position=1))
    assert not torch.equal(other["nodes"].values, batch["nodes"].values)
    twice = Batch({"unit_id": Ragged(torch.tensor([300, 301]), torch.tensor([0, 2]))})
    with pytest.raises(
        BadRequest, match="1 ids in 'unit_id' of every example, found 2 in example 0"
    ):
        sample(twice)


def test_tdm_finds_the_items_of_users_along_the_tree(cluster: Cluster, tree: TreeIndex) -> None:
    rows = tr.Table(
        "node", dim=8, optimizer=tr.optim.Adam(lr=0.05), initializer=tr.initializer.Normal(std=0.5)
    )
    model = TDM(rows, width=16)
    sample = LayerSamples(tree, 1, (1, 2, 4, 6), Draws(SEED))
    draw = np.random.default_rng(SEED)
    batches = [sample(leaves((300 + draw.integers(0, 16, 100)).tolist(), n)) for n in range(60)]
    optimizer = tr.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.03), model)
    for batch in tr.prefetch(batches, model):
        optimizer.zero_grad()
        node_loss(model(batch), batch).backward()
        optimizer.step()
    optimizer.flush()
    model.eval()
    tested = AllNodes(tree)(leaves(list(range(300, 316))))
    with torch.no_grad():
        scores = BeamSearch(model, tree, keep=3).eval()(tested)
        whole = BeamSearch(model, tree, keep=16).eval()(tested)
    assert scores.shape == (16, 16)
    lowest = torch.finfo(torch.float32).min
    assert ((scores > lowest).sum(1) == 6).all()  # children of three nodes
    torch.testing.assert_close(scores[scores > lowest], whole[scores > lowest])
    assert (whole > lowest).all()
    assert (scores.argmax(1) == tested["leaf_place"]).float().mean() > 0.8


def test_a_search_passes_over_children_that_are_not_there(cluster: Cluster, tmp_path: Path) -> None:
    gaps = TreeIndex.read(write_tree(tmp_path / "gaps.pb", [(7, 0), (8, 1), (10, 2), (14, 3)]))
    model = TDM(tr.Table("node", dim=4), width=16)
    batch = Batch(
        {"user_item": torch.rand(2, 16), "unit_id": Ragged(torch.tensor([3, 1]), torch.arange(3))}
    )
    batch = AllNodes(gaps)(batch)
    assert batch["leaf_place"].tolist() == [3, 1]
    scores = BeamSearch(model, gaps, keep=2).eval()(batch)
    reached = (scores > torch.finfo(torch.float32).min).sum(1)
    assert ((reached >= 2) & (reached <= 3)).all()
