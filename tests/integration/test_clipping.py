"""Gradient clipping: in sync over the whole step as in one process, otherwise per worker."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration import test_sync as exact
from tests.integration.durable_servers import DurableServers
from tests.jobs import Job, in_threads
from tests.own_batches import OwnBatches
from tests.programs import Template
from tests.seeds import SEED
from tests.tables import T_ROWS
from trireme import fleet
from trireme.errors import BadRequest, NotFinite
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded

RULE = exact.RULES["sgd"]
CLIPS = {"norm": {"clip_norm": 0.8}, "value": {"clip_value": 0.05}}
LENGTHS = (40, 25)
Weights = dict[str, np.ndarray]


def stream_batches(stream: int) -> list[dict[str, torch.Tensor]]:
    return exact.stream_batches(stream)[: LENGTHS[stream]]


def train(
    cluster: Cluster,
    streams: list[int],
    clip: dict[str, float],
    strategy: tr.Strategy | None = None,
    blocks: tr.Blocks | None = None,
) -> Weights:
    model = exact.Model(RULE)
    optimizer = tr.DistributedOptimizer(
        RULE.dense(model.parameters(), **RULE.options),
        model,
        strategy=strategy or tr.Strategy("sync"),
        blocks=blocks,
        cluster=cluster,
        **clip,
    )
    source = OwnBatches([batch for stream in streams for batch in stream_batches(stream)])
    for batch in tr.prefetch(source, model, cluster=cluster):
        nn.functional.mse_loss(model(batch), batch["label"]).backward()
        optimizer.step(examples=batch.num_examples)
    cluster.client.coordinator.gather({}, [])
    optimizer.refresh()
    return weights_of(cluster, model)


def weights_of(cluster: Cluster, model: exact.Model) -> Weights:
    keys = exact.keys_in_bucket_order()
    rows = cluster.client.pull({T_ROWS: keys}).rows[T_ROWS].numpy()
    return {"rows": rows[np.argsort(keys)], **model.dense_weights()}


def plain_torch(streams: list[list[dict[str, torch.Tensor]]], kind: str) -> tuple[Weights, int]:
    """One process on the union of the batches; and how many steps were clipped."""
    model = exact.Model(RULE)
    initial = exact.initial_rows(model.table)
    rows = nn.Embedding.from_pretrained(torch.tensor(initial), freeze=False)
    parameters = [*model.mlp.parameters(), *rows.parameters()]
    optimizer = torch.optim.SGD(parameters, **RULE.options)
    num_clipped = 0
    for parts in itertools.zip_longest(*streams):
        present = [part for part in parts if part is not None]
        batch = {name: torch.cat([part[name] for part in present]) for name in present[0]}
        ids = torch.stack([batch[f] for f in exact.FEATURES], 1)
        x = torch.cat([rows(ids).flatten(1), batch["dense"]], 1)
        optimizer.zero_grad()
        nn.functional.mse_loss(model.mlp(x).squeeze(1), batch["label"]).backward()
        limit = next(iter(CLIPS[kind].values()))
        if kind == "norm":
            num_clipped += bool(nn.utils.clip_grad_norm_(parameters, limit) > limit)
        else:
            largest = max(float(p.grad.abs().max()) for p in parameters if p.grad is not None)
            num_clipped += largest > limit
            nn.utils.clip_grad_value_(parameters, limit)
        optimizer.step()
    return {"rows": rows.weight.detach().numpy(), **model.dense_weights()}, num_clipped


@pytest.mark.parametrize("kind", CLIPS)
def test_sync_clips_the_step_as_one_process_and_any_servers_give_the_same_bits(kind: str) -> None:
    results = []
    for num_servers, blocks in ((1, None), (2, tr.Blocks(64, place="hash")), (3, tr.Blocks(None))):

        def work(cluster: Cluster, blocks: tr.Blocks | None = blocks) -> Weights:
            return train(cluster, [cluster.worker], CLIPS[kind], blocks=blocks)

        with Job(num_servers) as job:
            results += job.run(2, work)
    exact.assert_same_bits(results)
    expected, num_clipped = plain_torch([stream_batches(0), stream_batches(1)], kind)
    assert num_clipped > 5
    assert kind == "value" or num_clipped < LENGTHS[0]
    for part, values in expected.items():
        np.testing.assert_allclose(results[0][part], values, atol=1e-5, rtol=0, err_msg=part)


@pytest.mark.parametrize("kind", CLIPS)
@pytest.mark.parametrize("mode", ["sync", "async", "bounded", "geo", "hybrid"])
def test_a_single_worker_clips_like_one_process_in_every_mode(
    mode: str, kind: str, default_cluster: Cluster
) -> None:
    knobs: dict[str, dict[str, Any]] = {"bounded": {"staleness": 1}, "geo": {"k": 1}}
    strategy = tr.Strategy(mode, **knobs.get(mode, {}))
    model = exact.Model(RULE)
    inner = RULE.dense(model.parameters(), **RULE.options)
    if (mode, kind) == ("hybrid", "norm"):
        with pytest.raises(BadRequest, match="they have no norm in common"):
            tr.DistributedOptimizer(inner, model, strategy=strategy, clip_norm=1.0)
        return
    optimizer = tr.DistributedOptimizer(inner, model, strategy=strategy, **CLIPS[kind])
    for batch in stream_batches(0):
        nn.functional.mse_loss(model(batch), batch["label"]).backward()
        optimizer.step(examples=len(batch["label"]))
    optimizer.end_pass()
    expected, num_clipped = plain_torch([stream_batches(0)], kind)
    assert num_clipped > 5
    actual = weights_of(default_cluster, model)
    for part, values in expected.items():
        np.testing.assert_allclose(actual[part], values, atol=1e-5, rtol=0, err_msg=part)


def test_a_gradient_without_a_norm_is_not_pushed_or_not_applied() -> None:
    """Each worker checks its gradients; in sync servers check the sum, and all workers stop."""

    def optimizer_of(cluster: Cluster, mode: str) -> tuple[exact.Model, tr.DistributedOptimizer]:
        model = exact.Model(RULE)
        dense = RULE.dense(model.parameters(), **RULE.options)
        optimizer = tr.DistributedOptimizer(
            dense, model, strategy=tr.Strategy(mode), clip_norm=1.0, cluster=cluster
        )
        return model, optimizer

    def set_gradients(model: exact.Model, value: float) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)

    def sync(cluster: Cluster) -> None:
        model, optimizer = optimizer_of(cluster, "sync")
        set_gradients(model, 3e38)
        optimizer.step(examples=0)  # so that the gradients are added

    with Job(2) as job:
        with pytest.raises(NotFinite, match=r"expected finite gradients in step 1, found"):
            job.run(2, sync)
        states = [server.state for server in job.servers]
        actual = [state.blocks.read(state.assignment.owned_blocks()) for state in states]
        assert sorted(np.concatenate(actual)) == sorted(
            np.concatenate([w.reshape(-1) for w in exact.Model(RULE).dense_weights().values()])
        )

    def alone(cluster: Cluster) -> None:
        model, optimizer = optimizer_of(cluster, "async")
        set_gradients(model, math.nan if cluster.worker == 1 else 1.0)
        with pytest.raises(NotFinite) if cluster.worker == 1 else contextlib.nullcontext():
            optimizer.step()
        cluster.client.coordinator.gather({}, [])
        optimizer.refresh()
        assert all(np.isfinite(values).all() for values in model.dense_weights().values())

    with Job(2) as job:
        job.run(2, alone)


@pytest.mark.parametrize("mode", ["sync", "async", "bounded", "geo"])
def test_after_a_gradient_without_a_norm_the_next_batch_trains(
    default_cluster: Cluster, mode: str
) -> None:
    knobs: dict[str, dict[str, Any]] = {"bounded": {"staleness": 1}, "geo": {"k": 1}}
    model = exact.Model(RULE)
    inner = RULE.dense(model.parameters(), **RULE.options)
    strategy = tr.Strategy(mode, **knobs.get(mode, {}))
    optimizer = tr.DistributedOptimizer(inner, model, strategy=strategy, clip_norm=1.0)
    bad, good = stream_batches(0)[:2]
    (math.nan * nn.functional.mse_loss(model(bad), bad["label"])).backward()
    with pytest.raises(NotFinite):
        optimizer.step(examples=len(bad["label"]))
    assert optimizer.num_steps == 0
    nn.functional.mse_loss(model(good), good["label"]).backward()
    optimizer.step(examples=len(good["label"]))
    optimizer.end_pass()
    assert optimizer.num_steps == 1
    assert all(np.isfinite(values).all() for values in weights_of(default_cluster, model).values())


def test_killed_servers_apply_a_clipped_step_with_the_norm_that_it_had(
    programs: Template, tmp_path: Path
) -> None:
    with Job(2) as job:
        expected = job.run(2, lambda cluster: train(cluster, [cluster.worker], CLIPS["norm"]))
    with DurableServers(programs, 2, tmp_path, log_bytes=1 << 16) as servers:
        done, over = threading.Event(), threading.Event()

        def kill() -> None:
            random = Random(SEED)
            for number in range(4):
                if over.wait(random.uniform(0, 0.3)):
                    break
                servers.kill(number % 2)
                servers.start(number % 2)
            done.set()

        def work(worker: int) -> Weights:
            with servers.join(worker, 2) as cluster:
                actual = train(cluster, [worker], CLIPS["norm"])
                over.set()
                assert done.wait(60)
                return actual

        killer = threading.Thread(target=kill)
        killer.start()
        results = in_threads([lambda worker=worker: work(worker) for worker in range(2)])
        killer.join(60)
    exact.assert_same_bits([*expected, *results])


def test_modes_without_clipping_are_refused_by_name() -> None:
    model = exact.Model(RULE)
    inner = RULE.dense(model.parameters(), **RULE.options)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"clip_norm": 1.0, "clip_value": 1.0}, "clip_norm or clip_value, found both"),
        ({"clip_norm": 0.0}, "expected clip_norm as a finite number > 0, found 0.0"),
        ({"clip_value": math.inf}, "expected clip_value as a finite number > 0, found inf"),
    ]
    with embedded() as cluster:
        for clip, message in wrong:
            with pytest.raises(BadRequest, match=message):
                tr.DistributedOptimizer(inner, model, cluster=cluster, **clip)
        scaled = tr.Table("scaled", dim=2, optimizer=tr.optim.FleetAdagrad())
        alone = nn.ModuleList([tr.nn.EmbeddingBag(scaled, features=["a"])])
        with pytest.raises(BadRequest, match="expected scale='loss' for table 'scaled'"):
            tr.DistributedOptimizer(None, alone, clip_norm=1.0, cluster=cluster)


def test_fleets_names_of_clipping() -> None:
    assert fleet.ClipGradByGlobalNorm(2.0).clip_norm == 2.0
    assert fleet.ClipGradByValue(0.5).clip_value == fleet.ClipGradByValue(0.5, -0.5).clip_value
    with pytest.raises(BadRequest, match=r"expected min -0.5, found 0"):
        fleet.ClipGradByValue(0.5, 0.0)
    with pytest.raises(BadRequest, match="expected one group for all, found 'heads'"):
        fleet.ClipGradByGlobalNorm(1.0, "heads")
    with pytest.raises(BadRequest, match=r"expected ClipGradByGlobalNorm\(1.0\)"):
        fleet.ClipGradByNorm(1.0)
