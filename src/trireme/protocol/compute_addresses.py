"""The compute workers of a job, as workers tell the coordinator, which tells those that join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trireme.errors import BadRequest
from trireme.label import is_label
from trireme.protocol.job_limits import COMPUTE_WORKERS_MAX
from trireme.protocol.wire import need_list

ComputeAddresses = tuple[tuple[str, str], ...]
"""(label, "host:port") of each, in the order of the job."""

_ADDRESS_CHARS_MAX = 300  # a name of DNS has 253 at most


def addresses_to_wire(heter: Sequence[tuple[str, str]]) -> list[list[str]]:
    return [[label, address] for label, address in heter]


def addresses_from_wire(body: Mapping[str, Any]) -> ComputeAddresses:
    """Those of the field `compute_workers`, which may be absent. Raises BadRequest."""
    pairs = need_list({"compute_workers": [], **body}, "compute_workers", list)
    if len(pairs) > COMPUTE_WORKERS_MAX or not all(map(_is_compute_worker, pairs)):
        raise BadRequest(
            f"message: expected compute_workers as at most {COMPUTE_WORKERS_MAX} pairs of a label"
            f" such as gpu and host:port, found {len(pairs)}: {pairs[:3]}"[:500]
        )
    return tuple((label, address) for label, address in pairs)


def _is_compute_worker(pair: list[Any]) -> bool:
    if len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        return False
    label, address = pair
    return is_label(label) and 0 < len(address) <= _ADDRESS_CHARS_MAX
