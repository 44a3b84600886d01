"""Products of the vectors of an example with each other.

Shapes: B examples, N vectors, D floats each.
"""

import torch
from torch import Tensor


def sum_of_products(vectors_BND: Tensor) -> Tensor:
    """(B,): the sum of the dot products of all pairs of vectors, in time linear in N.

    sum over i<j of <v_i, v_j> = sum over d of ((sum_i v_id)^2 - sum_i v_id^2) / 2
    (Rendle, "Factorization Machines", ICDM 2010).
    """
    total_BD = vectors_BND.sum(1)
    return (total_BD.square() - vectors_BND.square().sum(1)).sum(1) / 2


def pairwise_products(vectors_BND: Tensor) -> Tensor:
    """(B, N (N - 1) / 2): the dot product of each pair of vectors."""
    num = vectors_BND.shape[1]
    first, second = torch.tril_indices(num, num, offset=-1, device=vectors_BND.device)
    products_BNN = vectors_BND @ vectors_BND.transpose(1, 2)
    return products_BNN[:, first, second]
