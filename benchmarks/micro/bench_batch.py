"""The batch work of one training step, in this process: ids per second on one thread.

Ids are those of a click model: 26 features, the vocabularies from 3 to 2 million ids, Zipf-like, so
that a batch of 4096 examples has about a third as many distinct keys as ids.

unique          distinct keys, inverse and occurrences      torch: unique with inverse
gather_dim*     rows to (B, F, D)                           torch: embedding; copy: memcpy of out
scatter_dim*    (B, F, D) gradients to rows                 torch: index_add
lookup_dim9     plan, forward, backward of EmbeddingBag     torch: sparse embedding_bag, coalesced
ragged_dim16    the same with bags of 0 to 5 weighted ids   torch: the same

Every contestant of a metric computes the same, up to the order of the rows.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import Claim, Contest, Run, Settings
from trireme import _core
from trireme.data import Bags, Batch
from trireme.nn import EmbeddingBag, Planner
from trireme.table import RowClassId, Table

NUM_FEATURES = 26
DIMS = (9, 16, 64)


def contests(settings: Settings) -> list[Contest]:
    batch = settings.pick(smoke=64, real=4096)
    seconds = settings.pick(smoke=0.0, real=0.5)
    one = Workload(one_id_per_bag(batch))
    ragged = Workload(ragged_bags(batch))

    def contest(
        metric: str, contestants: dict[str, Callable[[], object]], work: Workload
    ) -> Contest:
        runs = {name: _measured(call, work, seconds) for name, call in contestants.items()}
        rivals = tuple(name for name in contestants if name != metric)
        return Contest(runs, [Claim(metric, metric, rivals, "ids/s")], settings.rounds)

    return [
        contest("unique", {"unique": one.unique, "torch": one.torch_unique}, one),
        *(
            contest(
                name,
                {name: one.gather(dim), "torch": one.torch_gather(dim), "copy": one.copy(dim)},
                one,
            )
            for dim in DIMS
            for name in [f"gather_dim{dim}"]
        ),
        *(
            contest(name, {name: one.scatter(dim), "torch": one.torch_scatter(dim)}, one)
            for dim in DIMS
            for name in [f"scatter_dim{dim}"]
        ),
        contest("lookup_dim9", {"lookup_dim9": one.lookup(9), "torch": one.torch_lookup(9)}, one),
        contest(
            "ragged_dim16",
            {"ragged_dim16": ragged.lookup(16), "torch": ragged.torch_lookup(16)},
            ragged,
        ),
    ]


def one_id_per_bag(batch: int) -> Bags:
    """26 features of one id each."""
    return Bags(_NAMES, _ids(np.full(NUM_FEATURES, batch)), torch.arange(NUM_FEATURES * batch + 1))


def ragged_bags(batch: int) -> Bags:
    """26 features of 0 to 5 weighted ids."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(0, 6, (NUM_FEATURES, batch))
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    values = _ids(sizes.sum(1))
    return Bags(_NAMES, values, offsets, torch.from_numpy(rng.random(len(values), np.float32)))


_NAMES = tuple(f"C{i}" for i in range(1, NUM_FEATURES + 1))


def _ids(counts: np.ndarray) -> Tensor:
    """Zipf-like ids of each feature, the feature's number in their upper half."""
    rng = np.random.default_rng(0)
    vocabularies = np.geomspace(3, 2e6, NUM_FEATURES)
    ranks = [n ** rng.random(count) for n, count in zip(vocabularies, counts, strict=True)]
    keys = [(f << 32) | rank.astype(np.int64) * 2654435761 % 2**32 for f, rank in enumerate(ranks)]
    return torch.from_numpy(np.concatenate(keys))


@dataclass
class Workload:
    """The calls of one step over the ids of some bags; each returns its result."""

    bags: Bags

    @cached_property
    def pool(self) -> _core.Pool:
        return _core.Pool(1)

    @cached_property
    def distinct(self) -> tuple[np.ndarray, ...]:
        return _core.unique(self.bags.values.numpy().view(np.uint64), self.pool)

    @property
    def num_rows(self) -> int:
        return len(self.distinct[0])

    @property
    def shape(self) -> tuple[int, int]:
        return self.bags.num_examples, NUM_FEATURES

    def rows(self, dim: int) -> Tensor:
        return torch.randn(self.num_rows, dim, generator=torch.Generator().manual_seed(0))

    def grad(self, dim: int) -> Tensor:
        return torch.randn(*self.shape, dim, generator=torch.Generator().manual_seed(1))

    def unique(self) -> object:
        return _core.unique(self.bags.values.numpy().view(np.uint64), self.pool)[1]

    def torch_unique(self) -> object:
        return torch.unique(self.bags.values, return_inverse=True)[1]

    def gather(self, dim: int) -> Callable[[], object]:
        rows, out = self.rows(dim).numpy(), np.empty((*self.shape, dim), np.float32)
        index = self.distinct[1]

        def call() -> object:
            _core.gather(rows, index, None, None, NUM_FEATURES, out, self.pool)
            return out

        return call

    def torch_gather(self, dim: int) -> Callable[[], object]:
        rows, index = self.rows(dim), self._torch_index()
        return lambda: nn.functional.embedding(index, rows)

    def copy(self, dim: int) -> Callable[[], object]:
        source, out = self.grad(dim), torch.empty(*self.shape, dim)
        return lambda: out.copy_(source)

    def scatter(self, dim: int) -> Callable[[], object]:
        grad, out = self.grad(dim).numpy(), np.empty((self.num_rows, dim), np.float32)
        order, starts = self.distinct[2:]

        def call() -> object:
            _core.scatter(grad, order, starts, None, None, out, self.pool)
            return out

        return call

    def torch_scatter(self, dim: int) -> Callable[[], object]:
        grad, index = self.grad(dim).flatten(0, 1), self._torch_index().flatten()
        return lambda: torch.zeros(self.num_rows, dim).index_add_(0, index, grad)

    def lookup(self, dim: int) -> Callable[[], object]:
        module = EmbeddingBag(Table("t", dim=dim), features=_NAMES)
        planner = Planner(module, pool=self.pool)
        rows, grad = self.rows(dim), self.grad(dim)

        def call() -> object:
            batch = Batch({}, self.bags)
            leaves = planner.plan(batch).attach(batch, {RowClassId("t"): rows}, train=True)
            module(batch).backward(grad)
            return leaves[RowClassId("t")].grad

        return call

    def torch_lookup(self, dim: int) -> Callable[[], object]:
        """The same lookup in torch. Ids are row numbers, in another order than our rows."""
        weight, grad = self.rows(dim).requires_grad_(), self.grad(dim).transpose(0, 1).flatten(0, 1)
        index = torch.from_numpy(self.distinct[1].astype(np.int64))
        bags = self.bags

        def call() -> object:
            weight.grad = None
            nn.functional.embedding_bag(
                index,
                weight,
                bags.offsets,
                mode="sum",
                sparse=True,
                per_sample_weights=bags.weights,
                include_last_offset=True,
            ).backward(grad)
            assert weight.grad is not None
            return weight.grad.coalesce().values()

        return call

    def _torch_index(self) -> Tensor:
        """(B, F) row numbers."""
        index = torch.from_numpy(self.distinct[1].astype(np.int64))
        return index.view(NUM_FEATURES, self.bags.num_examples).T.contiguous()


def _measured(call: Callable[[], object], work: Workload, seconds: float) -> Callable[[int], Run]:
    """Ids per second of repeated calls on one thread."""

    def measure(_: int) -> Run:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            result = np.asarray(call())  # warm up
            num_calls, start = 0, time.perf_counter()
            while num_calls == 0 or time.perf_counter() - start < seconds:
                call()
                num_calls += 1
            elapsed_s = time.perf_counter() - start
        finally:
            torch.set_num_threads(threads)
        digest = hashlib.sha256(np.ascontiguousarray(result)).hexdigest()[:16]
        return Run(num_calls * len(work.bags.values) / elapsed_s, hash=digest)

    return measure


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["batch", *sys.argv[1:]]))
