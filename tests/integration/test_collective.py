"""Mode collective: the bits of sync, without servers, on any number of workers."""

from __future__ import annotations

import pytest

import trireme as tr
from tests.integration import test_sync as exact
from tests.jobs import Job
from tests.ranks import run_ranks

COLLECTIVE = tr.Strategy("collective")


@pytest.mark.parametrize("name", exact.RULES)
def test_two_ranks_give_the_bits_of_sync_with_two_workers(name: str) -> None:
    rule = exact.RULES[name]
    with Job(1) as job:
        results = job.run(2, lambda cluster: exact.train(cluster, rule, [cluster.worker]))
    results += run_ranks(
        2, lambda cluster: exact.train(cluster, rule, [cluster.worker], strategy=COLLECTIVE)
    )
    exact.assert_same_bits(results)
