"""The sum of the rows of each bag, after a lookup of single rows.

`EmbeddingBag` does both in one operation. This function is for models that compute on single rows
in between, for example attention weights.
"""

import torch
from torch import Tensor

from trireme.errors import BadRequest
from trireme.nn.modules import POOLINGS


def sequence_pool(rows: Tensor, offsets: Tensor, mode: str = "sum") -> Tensor:
    """Sum the rows of each bag, as Paddle's sequence_pool.

    Args:
        rows: (N, D) floating point, for example what `Embedding` returns for a Ragged feature.
        offsets: (B + 1,) int64, not decreasing, on the rows' device; bag b is rows
            offsets[b] - offsets[0] up to offsets[b + 1] - offsets[0], as in
            `batch[feature].offsets`.
        mode: "sum"; for a bag of n rows "mean" (Paddle's "average"): sum / n, or "sqrt":
            sum / sqrt(n). Every row counts, also rows of padding (zeros).

    Returns:
        (B, D), zeros for an empty bag. Rows of 16 bits, as of an autocast, are summed in float32.

    Raises:
        BadRequest: an unknown mode, or shapes that do not fit.
    """
    if not isinstance(mode, str) or mode not in POOLINGS:
        raise BadRequest(f"sequence_pool: expected mode to be one of {POOLINGS}, found {mode!r}")
    if rows.dim() != 2 or offsets.dim() != 1 or len(offsets) == 0 or offsets.dtype != torch.int64:
        raise BadRequest(
            "sequence_pool: expected rows of shape (N, D) and int64 offsets of shape (B + 1,),"
            f" found {tuple(rows.shape)} and {offsets.dtype} {tuple(offsets.shape)}"
        )
    sizes = offsets.diff()
    if not torch.compiler.is_compiling():  # a graph cannot depend on values
        num_bounded = int(offsets[-1] - offsets[0])
        if num_bounded != len(rows) or bool((sizes < 0).any()):
            raise BadRequest(
                f"sequence_pool: expected offsets over {len(rows)} rows that do not decrease, found"
                f" {num_bounded} rows and a smallest step of"
                f" {int(sizes.min()) if len(sizes) else 0}"
            )
    bag_N = torch.repeat_interleave(
        torch.arange(len(sizes), device=rows.device), sizes, output_size=len(rows)
    )
    wide_ND = rows.to(torch.promote_types(rows.dtype, torch.float32))
    sums = wide_ND.new_zeros(len(sizes), rows.shape[1]).index_add(0, bag_N, wide_ND)
    if mode != "sum":
        counts = sizes.clamp(min=1).to(sums.dtype)[:, None]
        sums = sums / (counts if mode == "mean" else counts.sqrt())
    return sums.to(rows.dtype)
