"""What embedding modules return, from a planned batch and the rows of its keys."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from trireme import _core
from trireme.data.batch import Batch
from trireme.nn.lookup import LookupSpec, gather
from trireme.nn.planner import BatchPlan
from trireme.table import RowClassId


def gather_lookups(
    specs: Iterable[LookupSpec],
    batch: Batch,
    plan: BatchPlan,
    rows: Mapping[RowClassId, Tensor],
    pool: _core.Pool,
) -> dict[str, Tensor]:
    """The result of each module for a batch that was planned for these specs, from `rows`:
    `Table.class_id` -> (K, W) float32, row k for the plan's key k.

    Returns name of the lookup -> tensor: of an EmbeddingBag (B, F, W); of an Embedding (B, W) or
    (B, L, W) where the feature is a tensor, (N, W) where it is Ragged.
    """
    lookups = plan.lookups(plan.leaves(rows, train=False))
    gathered = {}
    for spec in specs:
        lookup = lookups[spec.name]
        if spec.mode == "none":
            rows_NW = gather(lookup, lookup.index.shape[0], 1, pool)
            column = batch[spec.features[0]]
            shape = column.shape if isinstance(column, Tensor) else (-1,)
            gathered[spec.name] = rows_NW.view(*shape, spec.table.width)
        else:
            gathered[spec.name] = gather(lookup, plan.num_examples, len(spec.features), pool)
    return gathered
