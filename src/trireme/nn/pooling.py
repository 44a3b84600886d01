"""The rows of each bag after a lookup of single rows: their sum, or as sequences of one length.

`EmbeddingBag` looks up and adds in one operation. `sequence_pool` is for models that compute on
single rows in between, for example attention weights.
"""

import torch
from torch import Tensor

from trireme.errors import BadRequest, check_choice, check_counts
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
    check_choice("sequence_pool", POOLINGS, mode=mode)
    sizes, bag_N = _bags("sequence_pool", rows, offsets)
    wide_ND = rows.to(torch.promote_types(rows.dtype, torch.float32))
    sums = wide_ND.new_zeros(sizes.shape[0], rows.shape[1]).index_add(0, bag_N, wide_ND)
    if mode != "sum":
        counts = sizes.clamp(min=1).to(sums.dtype)[:, None]
        sums = sums / (counts if mode == "mean" else counts.sqrt())
    return sums.to(rows.dtype)


def sequence_pad(
    rows: Tensor, offsets: Tensor, length: int, *, padding_side: str = "right"
) -> tuple[Tensor, Tensor]:
    """The rows of each bag as a sequence of L rows, as an RNN or a transformer takes them. Of a bag
    that has more, the last L. Models with it can be exported.

    Args:
        rows, offsets: as of `sequence_pool`.
        length: L.
        padding_side: "right": zeros follow the rows; "left": they precede them.

    Returns:
        (B, L, D), and (B, L) bool, True where there is a row.

    Raises:
        BadRequest: an argument out of range, or shapes that do not fit.
    """
    check_counts("sequence_pad", length=length)
    check_choice("sequence_pad", ("right", "left"), padding_side=padding_side)
    sizes, bag_N = _bags("sequence_pad", rows, offsets)
    kept_B = sizes.clamp(max=length)
    end_B = kept_B if padding_side == "right" else torch.full_like(sizes, length)
    age_N = (offsets[1:] - offsets[0])[bag_N] - 1 - torch.arange(rows.shape[0], device=rows.device)
    place_N = (end_B - 1)[bag_N] - age_N
    # A bag's rows before its last L lie in one more column, which is cut off.
    place_N = torch.where(place_N < 0, length, place_N)
    padded = rows.new_zeros(sizes.shape[0], length + 1, rows.shape[1])
    padded = padded.index_put((bag_N, place_N), rows)[:, :length]
    places = torch.arange(length, device=rows.device)
    return padded, (places >= (end_B - kept_B)[:, None]) & (places < end_B[:, None])


def _bags(caller: str, rows: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """(B,) the size of each bag, and (N,) the bag of each row. Raises BadRequest."""
    if (
        rows.dim() != 2
        or offsets.dim() != 1
        or offsets.shape[0] == 0
        or offsets.dtype != torch.int64
    ):
        raise BadRequest(
            f"{caller}: expected rows of shape (N, D) and int64 offsets of shape (B + 1,),"
            f" found {tuple(rows.shape)} and {offsets.dtype} {tuple(offsets.shape)}"
        )
    sizes = offsets.diff()
    if not torch.compiler.is_compiling():  # a graph cannot depend on values
        num_bounded = int(offsets[-1] - offsets[0])
        if num_bounded != rows.shape[0] or bool((sizes < 0).any()):
            raise BadRequest(
                f"{caller}: expected offsets over {rows.shape[0]} rows that do not decrease, found"
                f" {num_bounded} rows and a smallest step of"
                f" {int(sizes.min()) if sizes.shape[0] else 0}"
            )
    numbers = torch.arange(sizes.shape[0], device=rows.device)
    return sizes, torch.repeat_interleave(numbers, sizes, output_size=rows.shape[0])
