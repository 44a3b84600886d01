"""Mode collective: the bits of sync, without servers, on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trireme as tr
from tests.integration import all_rules_model as all_rules
from tests.integration import test_own_pushes as own_pushes
from tests.integration import test_sync as exact
from tests.integration.test_predecessor import Model, counts, make_trainer
from tests.integration.test_uneven import BATCH, EPOCHS, LENGTHS, Data, expected_counts
from tests.jobs import Job
from tests.long import sampled
from tests.ranks import run_ranks
from trireme.errors import BadRequest
from trireme.job.cluster import Cluster
from trireme.train.modes.collective import byte_exchange

COLLECTIVE = tr.Strategy("collective")


@pytest.mark.parametrize("name", exact.RULES)
def test_two_ranks_equal_plain_torch_and_sync_with_two_workers_bit_for_bit(name: str) -> None:
    rule = exact.RULES[name]
    with Job(1) as job:
        results = job.run(2, lambda cluster: exact.train(cluster, rule, [cluster.worker]))
    results += run_ranks(
        2, lambda cluster: exact.train(cluster, rule, [cluster.worker], strategy=COLLECTIVE)
    )
    exact.assert_same_bits(results)
    _, after = exact.plain_torch(rule)
    for part, values in after.items():
        np.testing.assert_allclose(results[0][part], values, atol=exact.ATOL, rtol=0, err_msg=part)


@sampled(keep=3)
@pytest.mark.parametrize("clips", [True, False], ids=["clip_norm", "scored"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_rows_of_every_rule_and_kind_have_the_bits_of_sync(
    num_ranks: int, clips: bool, tmp_path: Path
) -> None:
    with Job(2) as job:
        expected = job.run(
            num_ranks,
            lambda cluster: all_rules.run(cluster, "sync", tmp_path / "sync", clips=clips),
        )
    actual = run_ranks(
        num_ranks,
        lambda cluster: all_rules.run(cluster, "collective", tmp_path / "ranks", clips=clips),
    )
    for of_sync, of_rank in zip(expected, actual, strict=True):
        assert of_rank["figures"] == of_sync["figures"]
        exact.assert_same_bits([of_sync["weights"], of_rank["weights"]])
    for name in ("after 2", "after 3"):
        all_rules.assert_same_checkpoints(tmp_path / "sync" / name, tmp_path / "ranks" / name)


def test_each_batch_counts_once_whatever_the_lengths_of_the_streams() -> None:
    def work(cluster: Cluster) -> tuple[dict[str, float], dict[int, int]]:
        trainer = make_trainer(cluster, Model(), "collective")
        trained = trainer.fit(Data(), epochs=EPOCHS)
        cluster.client.coordinator.gather({}, [])
        return trained, counts(cluster)

    for trained, actual in run_ranks(3, work):
        assert trained["examples"] == sum(LENGTHS) * BATCH
        assert actual == expected_counts(is_sync=True)


def test_shows_are_those_of_the_data_time_of_the_batch() -> None:
    """The time may move on after a step, which has pulled rows for the next batch."""
    policy = tr.policy.ScorePolicy(pulls_statistics=True, decay_rate=0.5)

    def work(cluster: Cluster, strategy: tr.Strategy) -> list[Any]:
        return own_pushes.run(cluster, strategy, own_pushes.plain, 3, policy)

    with Job(2) as job:
        expected = job.run(2, lambda cluster: work(cluster, tr.Strategy("sync")))
    assert run_ranks(2, lambda cluster: work(cluster, COLLECTIVE)) == expected


def test_a_job_with_servers_refuses_the_mode() -> None:
    with (
        Job(1) as job,
        pytest.raises(BadRequest, match=r"torchrun, or trireme launch --server_num 0"),
    ):
        job.run(1, lambda cluster: make_trainer(cluster, Model(), "collective"))


def test_messages_larger_than_a_chunk_are_exchanged_in_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(byte_exchange, "CHUNK_BYTES", 3 * 128)
    rule = exact.RULES["adam"]
    with Job(1) as job:
        results = job.run(3, lambda cluster: exact.train(cluster, rule, [cluster.worker % 2]))
    results += run_ranks(
        3, lambda cluster: exact.train(cluster, rule, [cluster.worker % 2], strategy=COLLECTIVE)
    )
    exact.assert_same_bits(results)
