"""Makes a table of the core from its schema: for servers, caches and estimates."""

from typing import Any

from trireme import _core
from trireme.errors import BadRequest
from trireme.protocol.wire import STREAMS_MAX
from trireme.table import TableSchema

# Values of a policy that the core does not need: exports and lookups use them.
_EXPORT_VALUES = ("base_threshold", "delta_threshold", "delta_keep_days", "pulls_statistics")


def make_core_table(schema: TableSchema) -> _core.Table:
    """The core's table for a schema. Raises BadRequest for unknown values."""
    rule = dict(schema.rule)
    for name in ("scale", "per_show"):  # gradients are scaled before they reach the core
        rule.pop(name, None)
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
        policy=_policy_config(schema),
        admission=_core.AdmissionConfig(**(schema.admission or {})),
        **named,
    )


def _policy_config(schema: TableSchema) -> _core.PolicyConfig:
    """The values of a policy that the core uses."""
    values = dict(schema.policy)
    for name in ("name", *_EXPORT_VALUES):
        values.pop(name, None)
    return _core.PolicyConfig(is_scored=schema.is_scored, **values)
