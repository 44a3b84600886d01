"""A worker that loads its share of some files and takes part in a global shuffle.

It prints `loaded N`, then `held N SUM ORDER` (see `digests`), then for every batch
`batch POSITION REST`, where REST is the digest of the batches after it.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterable
from typing import Any

import trireme as tr
from trireme.data import global_shuffle as exchange

BATCH_SIZE = 150


def rows_of(batch: tr.data.Batch) -> list[bytes]:
    """Each example as bytes."""
    labels, dense, bags = batch["label"].numpy(), batch["dense"].numpy(), batch.bags
    assert bags is not None
    keys, offsets, num = bags.values.numpy(), bags.offsets.tolist(), batch.num_examples
    return [
        labels[b].tobytes()
        + dense[b].tobytes()
        + b"|".join(
            keys[offsets[f * num + b] : offsets[f * num + b + 1]].tobytes()
            for f in range(len(bags.names))
        )
        for b in range(num)
    ]


def digests(batches: Iterable[tr.data.Batch]) -> tuple[int, int, str]:
    """Examples, the sum of their hashes modulo 2^64, and a hash of them in their order."""
    rows = [hashlib.sha256(row).digest() for batch in batches for row in rows_of(batch)]
    total = sum(int.from_bytes(row[:8], "little") for row in rows) % (1 << 64)
    return len(rows), total, hashlib.sha256(b"".join(rows)).hexdigest()[:16]


def wait_before_round(number: int) -> None:
    """Print it, and wait for a line on standard input."""
    send = exchange._Outbox.send

    def held(self: Any, token: str, now: int, pieces: Any) -> None:
        if now == number:
            print(f"in round {number}", flush=True)
            sys.stdin.readline()
        send(self, token, now, pieces)

    exchange._Outbox.send = held  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wait-in-round", type=int)
    args = parser.parse_args()
    exchange.SLICE_BYTES_MIN = 1 << 12
    if args.wait_in_round is not None:
        wait_before_round(args.wait_in_round)
    with tr.init() as cluster:
        dataset = tr.data.InMemoryDataset(
            args.data, schema=tr.data.criteo(), batch_size=BATCH_SIZE, threads=args.threads, seed=5
        )
        dataset.load_into_memory()
        print(f"loaded {dataset.get_memory_data_size()}", flush=True)
        dataset.global_shuffle()
        print("held", *digests(dataset), flush=True)
        place = cluster.worker, cluster.num_workers
        for batch in list(dataset):
            rest = digests(dataset.stream(*place, start=batch.position))[2]
            print("batch", *batch.position, rest, flush=True)


if __name__ == "__main__":
    main()
