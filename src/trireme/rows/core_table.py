"""Makes a table of the core from its schema: for servers, caches and estimates."""

import math
from typing import Any

from trireme import _core
from trireme.errors import BadRequest
from trireme.protocol.job_limits import STREAMS_MAX
from trireme.table import TableSchema

# Values of a policy that the core does not need: exports and lookups use them.
_OTHER_VALUES = (
    *("name", "base_threshold", "delta_threshold"),
    *("delta_keep_days", "pulls_statistics"),
)


_NEW_TABLE_BYTES = 9 << 18  # of a new table with rows on SSD, beside its buffers


def buffer_bytes(memory: int) -> tuple[int, int]:
    """Bytes of one buffer of writes, and of all reads at a time, for tables with rows on SSD and
    `memory` bytes in all. Large writes delay the reads beside them less than many small ones.
    """
    return (min(max(memory >> 8, 64 << 10), 1 << 20), min(max(memory >> 6, 128 << 10), 16 << 20))


def own_bytes(memory: int, row_bytes: int) -> int:
    """Bytes that a new table with rows on SSD takes beside rows. memory: of all tables. row_bytes:
    of the table's largest row class.
    """
    return _NEW_TABLE_BYTES + _core.ssd_buffer_bytes(row_bytes, *buffer_bytes(memory))


def needed_bytes(own: float) -> int:
    """The least budget of a table that takes `own` bytes beside rows: without some room for rows
    the core refuses it.
    """
    return math.ceil(own) + math.ceil(own) // 8 + 1


def make_core_table(schema: TableSchema, **tier: Any) -> _core.Table:
    """The core's table for a schema. tier: where its rows lie if not in memory, see `_core.Table`.
    Raises BadRequest for unknown values.
    """
    # Gradients are scaled before they reach the core.
    rule = {name: v for name, v in schema.rule.items() if name not in ("scale", "per_show")}
    policy = {name: v for name, v in schema.policy.items() if name not in _OTHER_VALUES}
    kind, a, b = schema.initializer
    try:
        named: dict[str, Any] = {
            "rule": str(rule.pop("name")),
            "shared": bool(rule.pop("shared", False)),
            "bias_correction": str(rule.pop("bias_correction", "global")),
            "initial_accumulator": float(rule.pop("initial_accumulator", 0.0)),
            "nesterov": bool(rule.pop("nesterov", False)),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise BadRequest(
            f"table {schema.name!r}: expected a rule's name and options, found {schema.rule}"
        ) from error
    if rule:
        raise BadRequest(f"table {schema.name!r}: no rule has the options {rule}")
    return _core.Table(
        dims=list(schema.dims),
        dtype=schema.dtype,
        initializer=kind,
        init_a=a,
        init_b=b,
        seed=schema.seed,
        absent=schema.absent,
        num_streams_max=STREAMS_MAX,
        policy=_core.PolicyConfig(is_scored=schema.is_scored, **policy),
        admission=_core.AdmissionConfig(**(schema.admission or {})),
        **named,
        **tier,
    )
