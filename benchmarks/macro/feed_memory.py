"""Batches from memory: an InMemoryDataset of Criteo's rows, shuffled, and read repeatedly.

inmemory_batches    examples per second of CPU time, one thread, batches of 4096
"""

from __future__ import annotations

import hashlib
import time

import trireme as tr
from benchmarks.criteo import tsv_files
from benchmarks.harness import Claim, Contest, Run, Settings


def contest(settings: Settings) -> Contest:
    metric = "inmemory_batches"
    return Contest(
        {metric: lambda _: _batches(settings)},
        [Claim(metric, metric, unit="examples/s per core")],
        settings.rounds,
    )


def _batches(settings: Settings) -> Run:
    dataset = tr.data.InMemoryDataset(
        tsv_files(settings).train,
        schema=tr.data.criteo(),
        batch_size=settings.pick(smoke=64, real=4096),
    )
    dataset.load_into_memory()
    dataset.local_shuffle()
    digest, num_examples = hashlib.sha256(), dataset.get_memory_data_size()
    for batch in dataset:  # warm up
        assert batch.bags is not None
        digest.update(batch.bags.values.numpy().tobytes())
    num_examples, started = 0, time.process_time()
    seconds = settings.pick(smoke=0.0, real=2.0)
    while num_examples == 0 or time.process_time() - started < seconds:
        num_examples += sum(batch.num_examples for batch in dataset)
    elapsed_s = time.process_time() - started
    detail = {
        "examples": num_examples,
        "bytes": dataset.num_bytes,
        "bytes_per_byte_of_values": dataset.num_bytes / dataset.num_value_bytes,
    }
    dataset.release_memory()
    return Run(num_examples / elapsed_s, hash=digest.hexdigest()[:16], detail=detail)
