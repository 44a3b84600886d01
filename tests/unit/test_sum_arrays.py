"""Arrays of all workers are summed over the same workers, whoever goes in between."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trireme.train import gather_arrays
from trireme.train.gather_arrays import sum_arrays


class Meetings:
    """The meetings of some workers that all bring the same arrays. gone_at: the first meeting that
    one of them does not come to.
    """

    def __init__(self, num_workers: int, gone_at: int) -> None:
        self.num_workers, self.gone_at, self.num_held = num_workers, gone_at, 0

    def gather(self, body: Any, arrays: Any, **_: Any) -> list[tuple[dict[str, int], list[Any]]]:
        number, self.num_held = self.num_held, self.num_held + 1
        num_there = self.num_workers - (number >= self.gone_at)
        return [({"workers": num_there}, [num_there * array for array in arrays])]


@pytest.mark.parametrize("gone_at", range(6))
@pytest.mark.parametrize("worker", [0, 1])
def test_a_sum_begins_anew_when_a_worker_goes_in_the_middle(
    monkeypatch: pytest.MonkeyPatch, worker: int, gone_at: int
) -> None:
    monkeypatch.setattr(gather_arrays, "_WORKER_BYTES_MAX", 100)
    meetings = Meetings(3, gone_at)
    client = SimpleNamespace(coordinator=meetings, script=SimpleNamespace(section=nullcontext))
    cluster: Any = SimpleNamespace(client=client, worker=worker, num_workers=3, num_streams=0)
    arrays = [np.arange(20.0).reshape(4, 5), np.arange(30)]
    sums = sum_arrays(cluster, arrays, "test", {})
    num_meetings = 4
    assert meetings.num_held == num_meetings + (gone_at + 1 if 0 < gone_at < num_meetings else 0)
    if worker == 0:
        assert sums is not None
        num_there = 3 if gone_at >= num_meetings else 2
        for actual, array in zip(sums, arrays, strict=True):
            np.testing.assert_array_equal(actual, num_there * array)
    else:
        assert sums is None
