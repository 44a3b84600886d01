"""What a compute worker keeps of graphs, and when it drops them."""

import pytest
import torch

from trireme.train.compute import kept_graphs
from trireme.train.compute.kept_graphs import Graph, KeptGraphs
from trireme.train.compute.stage_messages import Owner

GRAPH = Graph([torch.zeros(1)], [], {}, {})
WORKER, OTHER = Owner(0, 1), Owner(1, 1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def graphs(clock: Clock) -> KeptGraphs:
    return KeptGraphs(10.0, clock)


def test_a_graph_is_taken_once(graphs: KeptGraphs) -> None:
    graphs.keep(WORKER, "1", GRAPH, 2)
    assert graphs.take(OTHER, "1") is None
    assert graphs.take(WORKER, "1") is GRAPH
    assert graphs.take(WORKER, "1") is None


def test_an_owner_has_at_most_as_many_as_it_says(graphs: KeptGraphs) -> None:
    graphs.keep(OTHER, "0", GRAPH, 2)
    for token in "123":
        graphs.keep(WORKER, token, GRAPH, 2)
    assert len(graphs) == 3
    assert graphs.take(WORKER, "1") is None
    assert graphs.take(WORKER, "2") is GRAPH


def test_all_owners_together_have_a_bound(
    graphs: KeptGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_graphs, "GRAPHS_MAX", 3)
    for token in "12345":
        graphs.keep(Owner(int(token), 1), token, GRAPH, 10)
    assert len(graphs) == 3
    assert graphs.take(Owner(2, 1), "2") is None


def test_a_successor_drops_the_graphs_of_the_process_before(graphs: KeptGraphs) -> None:
    graphs.keep(WORKER, "1", GRAPH, 2)
    graphs.keep(OTHER, "1", GRAPH, 2)
    graphs.meet(Owner(0, 2))
    assert len(graphs) == 1
    graphs.keep(WORKER, "2", GRAPH, 2)  # a message that was under way
    assert len(graphs) == 1


def test_graphs_that_are_dropped_or_old_are_not_kept(graphs: KeptGraphs, clock: Clock) -> None:
    graphs.keep(WORKER, "1", GRAPH, 5)
    graphs.keep(WORKER, "2", GRAPH, 5)
    graphs.drop(WORKER, ["1", "unknown"])
    assert len(graphs) == 1
    clock.now = 10.5
    graphs.meet(OTHER)
    assert len(graphs) == 0
