"""A worker sees its own pushes: alone, async, bounded and hybrid train as sync does, bit by bit,
and pull ahead all that the batch under way does not push.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.conditions import wait_until
from tests.integration import all_rules_model as all_rules
from tests.jobs import Job
from trireme.data.batch import Batch
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.policy import Policy, ScorePolicy
from trireme.server.server_stats import stats_of
from trireme.train.modes.on_servers import pull_ahead
from trireme.worker.pull import FollowingPull
from trireme.worker.transport import LockedTransport

DAY = 86400
NUM_BATCHES = 12
STRATEGIES = {
    "sync": tr.Strategy("sync"),
    "async": tr.Strategy("async"),
    "bounded": tr.Strategy("bounded", staleness=1),
    "hybrid": tr.Strategy("hybrid"),
}


@pytest.fixture(autouse=True, params=[0, pull_ahead.EARLY_BYTES_MIN], ids=["any", "many"])
def early_bytes_min(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Whether any row that may is pulled ahead, or many at a time only, of which there are none."""
    monkeypatch.setattr(pull_ahead, "EARLY_BYTES_MIN", request.param)
    return int(request.param)


@pytest.mark.parametrize("clips", [False, True])
def test_async_equals_sync_with_every_rule_admission_and_kind_of_row(
    clips: bool, tmp_path: Path
) -> None:
    results = {}
    for mode in ("sync", "async"):
        with embedded(threads=1) as cluster:
            results[mode, 0] = all_rules.run(cluster, mode, tmp_path / mode, clips=clips)
    for num_servers in (1, 3):
        folder = tmp_path / f"{num_servers}"
        with Job(num_servers) as job:
            [results["async", num_servers]] = job.run(
                1, lambda cluster, to=folder: all_rules.run(cluster, "async", to, clips=clips)
            )
    expected = results["sync", 0]
    for result in results.values():
        assert result["figures"] == expected["figures"]
        for name, weights in expected["weights"].items():
            np.testing.assert_array_equal(result["weights"][name], weights, name)
    for folder in ("async", "1", "3"):
        for save in ("after 2", "after 3"):
            all_rules.assert_same_checkpoints(tmp_path / "sync" / save, tmp_path / folder / save)


class Overlapping:
    """Batches of 6 ids: `same` of each are those of the batch before, the others are new."""

    def __init__(self, same: int) -> None:
        self.same = same

    def stream(self, index: int, num_streams: int, *, epoch: int = 0) -> Iterator[Batch]:
        rng = np.random.default_rng(self.same)
        ids = np.arange(6)
        for number in range(NUM_BATCHES):
            ids = np.concatenate([ids[: self.same], 100 * number + 10 + np.arange(6 - self.same)])
            label = torch.from_numpy(rng.normal(size=6).astype(np.float32))
            yield Batch({"id": torch.from_numpy(rng.permutation(ids)), "label": label})


class Model(nn.Module):
    """Two tables that share the ids; the policy is that of one of them."""

    def __init__(self, policy: Policy | None = None) -> None:
        super().__init__()
        rule = tr.optim.Adagrad(lr=0.5)
        first = tr.Table("first", dim=3, optimizer=rule, policy=policy)
        self.rows = tr.nn.EmbeddingBag(first, features=["id"])
        self.others = tr.nn.EmbeddingBag(tr.Table("second", dim=2, optimizer=rule), features=["id"])
        width = sum(rows.table.width for rows in (self.rows, self.others))
        self.top = nn.Linear(width, 1)
        with torch.no_grad():
            self.top.weight.copy_(torch.linspace(-1, 1, width)[None])
            self.top.bias.zero_()

    def forward(self, batch: Any) -> torch.Tensor:
        x = torch.cat([rows(batch).flatten(1) for rows in (self.rows, self.others)], 1)
        return self.top(x).squeeze(1)


Loop = Callable[[Model, tr.DistributedOptimizer, Cluster, Any], list[float]]


def plain(model: Model, optimizer: Any, cluster: Cluster, data: Any) -> list[float]:
    """The losses of a plain loop."""
    losses = []
    for batch in tr.prefetch(data, model, cluster=cluster):
        loss = nn.functional.mse_loss(model(batch), batch["label"])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def when_pulled_ahead(model: Model, optimizer: Any, cluster: Cluster, data: Any) -> list[float]:
    """A loop that steps when the pull thread has the next batch."""
    losses = []
    for number, batch in enumerate(tr.prefetch(data, model, cluster=cluster)):
        losses.append(nn.functional.mse_loss(model(batch), batch["label"]))
        losses[-1].backward()
        if number < NUM_BATCHES - 1:
            wait_until(lambda: cluster.metrics.queues["pulled"]() > 0)
        optimizer.step()
    return [loss.item() for loss in losses]


def every_other(model: Model, optimizer: Any, cluster: Cluster, data: Any) -> list[float]:
    """One that steps with the gradients of two batches."""
    losses = []
    for number, batch in enumerate(tr.prefetch(data, model, cluster=cluster)):
        loss = nn.functional.mse_loss(model(batch), batch["label"])
        loss.backward()
        if number % 2:
            optimizer.step()
        losses.append(loss.item())
    return losses


def steps_again(model: Model, optimizer: Any, cluster: Cluster, data: Any) -> list[float]:
    """One whose second step of a batch follows without a lookup, and has no gradients of rows."""
    losses = []
    for batch in tr.prefetch(data, model, cluster=cluster):
        loss = nn.functional.mse_loss(model(batch), batch["label"])
        loss.backward()
        optimizer.step()
        model.top.weight.sum().backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def looks_up_more(model: Model, optimizer: Any, cluster: Cluster, data: Any) -> list[float]:
    """One whose steps have rows of the next batch too, which it looks up itself."""
    following = [batch["id"] for batch in data.stream(0, 1)][1:]
    losses = []
    for number, batch in enumerate(tr.prefetch(data, model, cluster=cluster)):
        loss = nn.functional.mse_loss(model(batch), batch["label"])
        if number < len(following):
            loss = loss + model({"id": following[number]}).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(
    cluster: Cluster, strategy: tr.Strategy, loop: Loop, same: int, policy: Policy | None = None
) -> list[Any]:
    model = Model(policy)
    optimizer = tr.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, strategy=strategy, cluster=cluster
    )
    if policy is not None and policy.name == ScorePolicy.name:  # a day for two batches
        optimizer.set_time(lambda: 100 * DAY + optimizer.num_steps // 2 * DAY)
    losses = loop(model, optimizer, cluster, Overlapping(same))
    return [losses, *(p.detach().tolist() for p in model.parameters())]


@pytest.mark.parametrize("same", [0, 2, 6])
@pytest.mark.parametrize("mode", ["async", "bounded", "hybrid"])
def test_alone_every_mode_misses_no_step_whatever_batches_share(mode: str, same: int) -> None:
    results = []
    for strategy in (STRATEGIES["sync"], STRATEGIES[mode]):
        with Job(2) as job:
            results += job.run(1, lambda cluster, s=strategy: run(cluster, s, plain, same))
            stats = [stats_of(server.state) for server in job.servers]
    assert results[0] == results[1]
    if mode != "hybrid":  # where it may be unknown whether a push was applied when rows were read
        assert [list(server["staleness"]) for server in stats] == [["0"], ["0"]]


@pytest.mark.parametrize("mode", ["async", "hybrid"])
@pytest.mark.parametrize("same", [2, 6])
def test_the_rest_is_pulled_right_behind_the_push(
    mode: str, same: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, methods = [], []
    real = LockedTransport.call_all

    def note(self: LockedTransport, calls: Any, timeout_s: float) -> Any:
        methods.append([call.method for call in calls])
        return real(self, calls, timeout_s)

    for name, loop in (("sync", plain), (mode, when_pulled_ahead)):
        with Job(2) as job:
            results += job.run(
                1, lambda cluster, s=STRATEGIES[name], loop=loop: run(cluster, s, loop, same)
            )
        monkeypatch.setattr(LockedTransport, "call_all", note)
    assert results[0] == results[1]
    assert methods.count(["ps.push"] * 2 + ["ps.pull"] * 2) == NUM_BATCHES - 1
    assert methods.count(["ps.push"] * 2) == 1  # nothing follows the last one


def test_after_a_refresh_nothing_older_is_read() -> None:
    """As an evaluation within a loop, which trains on with what it has been evaluated with."""
    with Job(1) as job, job.join(0, 1) as cluster:
        state = job.servers[0].state
        model = Model()
        optimizer = tr.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, cluster=cluster
        )
        for number, batch in enumerate(tr.prefetch(Overlapping(2), model, cluster=cluster)):
            before = model.top.weight.detach().clone()
            model(batch).sum().backward()
            if number < NUM_BATCHES - 1:
                wait_until(lambda: cluster.metrics.queues["pulled"]() > 0)
            optimizer.step()
            optimizer.flush()
            if number == 3:
                specs = {spec.param: spec.id for spec in state.blocks.specs()}
                others = torch.from_numpy(state.blocks.read([specs["top.weight"]]))
                state.blocks.add([specs["top.weight"]], np.full(5, 100, np.float32), [(1, 1)])
                optimizer.refresh()
                torch.testing.assert_close(model.top.weight[0], others + 100)
            if number == 4:
                torch.testing.assert_close(before[0], others + 100)


@pytest.mark.parametrize("loop", [every_other, steps_again, looks_up_more])
def test_a_loop_may_push_what_other_forward_passes_have_looked_up(loop: Loop) -> None:
    results = []
    for strategy in (STRATEGIES["sync"], STRATEGIES["async"]):
        with embedded(threads=1) as cluster:
            results.append(run(cluster, strategy, loop, 2))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "policy",
    [Policy(max_rows=4096), ScorePolicy(pulls_statistics=True, decay_rate=0.5)],
    ids=["evicts", "fades"],
)
def test_rows_that_change_without_a_push_of_their_key_are_pulled_late(policy: Policy) -> None:
    results = []
    for strategy in (STRATEGIES["sync"], STRATEGIES["async"]):
        with embedded(threads=1) as cluster:
            results.append(run(cluster, strategy, plain, 3, policy))
            [stats] = cluster.client.stats()
    assert results[0] == results[1]
    assert stats["tables"]["first"]["rows"] > 0


@pytest.mark.parametrize(("same", "ahead"), [(0, 12), (2, 8), (6, 0)])
def test_a_row_is_pulled_once_and_ahead_unless_the_batch_before_pushes_it(
    same: int, ahead: int, early_bytes_min: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if early_bytes_min:
        ahead = 0
    pulls: list[tuple[bool, int]] = []
    with embedded(threads=1) as cluster:
        pull = cluster.client.pull

        def note(keys: Any, *, blocks: bool = False, **options: Any) -> Any:
            pulls.append((blocks, sum(map(len, keys.values()))))
            return pull(keys, blocks=blocks, **options)

        push = cluster.client.push

        def note_following(
            *args: Any, following: FollowingPull | None = None, **options: Any
        ) -> None:
            if following is not None:
                pulls.append((True, sum(map(len, following.keys.values()))))
            push(*args, following=following, **options)

        monkeypatch.setattr(cluster.client, "pull", note)
        monkeypatch.setattr(cluster.client, "push", note_following)
        run(cluster, STRATEGIES["async"], plain, same)
    counts = [num for blocks, num in pulls if not blocks]
    assert sum(num for _, num in pulls) == 12 * 12  # two tables, 12 batches of 6 ids
    assert counts.count(ahead) >= 11 if ahead else len(counts) == (not early_bytes_min)
    assert sum(counts) == (0 if early_bytes_min else 12) + 11 * ahead
    assert sum(num for blocks, num in pulls if blocks) == 144 - sum(counts)
