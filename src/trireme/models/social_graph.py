"""Who trusts whom, and who took what: the graph of MHCN, and the motifs in it.

Shapes: U users, V items, E pairs of a user and an item.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trireme.errors import DataError

_TESTED = 5  # one of so many ratings is for tests


@dataclass(frozen=True)
class SocialGraph:
    """users, items: numbers by name. taken: (2, E) users and items. trusts: (2, any) users."""

    users: dict[str, int]
    items: dict[str, int]
    taken: Tensor
    trusts: Tensor

    @classmethod
    def read(cls, ratings: Path, relations: Path) -> "SocialGraph":
        """Numbers and pairs as PaddleRec's lastfm_reader.py has them: of the ratings >= 1 all but
        each fifth; users and items are numbered as they come, and others are left out.

        Args:
            ratings: lines "user item rating", with tabs. relations: lines "user user".

        Raises DataError: no such file, another line, or no rating.
        """
        rated = [(user, item) for user, item, value in _lines(ratings, 3) if _number(value) >= 1]
        taken = dict.fromkeys(pair for i, pair in enumerate(rated) if i % _TESTED)
        if not taken:
            raise DataError(f"SocialGraph: expected at least two ratings >= 1 in {ratings}")
        users, items = (
            {name: number for number, name in enumerate(dict.fromkeys(names))}
            for names in zip(*taken, strict=True)
        )
        trusts = [
            (users[one], users[other])
            for one, other in dict.fromkeys(map(tuple, _lines(relations, 2)))
            if one in users and other in users
        ]
        pairs = [(users[user], items[item]) for user, item in taken]
        return cls(users, items, _columns(pairs), _columns(trusts))

    def motifs(self) -> list[Tensor]:
        """Three sparse (U, U) matrices: how much each user hears of others by trust, by trust
        between users with an item in common, and by several items in common. Rows add up to 1, or
        to 0.

        The ten motifs are those of fig. 2 of the paper: b are mutual trusts, u the others.

        Memory grows with the pairs of users that have an item in common, not with all pairs: an
        item that many users took has the square of so many.
        """
        with warnings.catch_warnings():  # of torch's products of sparse matrices
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
            return self._motifs()

    def _motifs(self) -> list[Tensor]:
        num_users = len(self.users)
        trusts = _matrix(self.trusts, num_users, num_users)
        taken = _matrix(self.taken, num_users, len(self.items))
        b = trusts * trusts.T
        u = _above(trusts - b, 0)
        halves = (
            (u @ u) * u.T,
            (b @ u) * u.T + (u @ b) * u.T + (u @ u) * b,
            (b @ b) * u + (b @ u) * b + (u @ b) * b,
            (u @ u) * u + (u @ u.T) * u + (u.T @ u) * u,
        )
        by_trust = sum((half + half.T for half in halves), (b @ b) * b)
        by_trust += (u @ b) * u + (b @ u.T) * u.T + (u.T @ u) * b
        by_trust += (u.T @ b) * u.T + (b @ u) * u + (u @ u.T) * b
        common = taken @ taken.T
        jointly = common * b + common * (u + u.T)
        alone = common - jointly
        hears = (_above(by_trust, 0), _above(jointly, 0), _above(alone, 1))
        return [_shares(matrix) for matrix in hears]

    def taken_weights(self) -> Tensor:
        """(E,): 1 / sqrt(items of the user * users of the item)."""
        sizes = [torch.bincount(numbers)[numbers] for numbers in self.taken]
        return (sizes[0] * sizes[1]).float().rsqrt()


def _lines(path: Path, size: int) -> Iterator[list[str]]:
    if not path.is_file():
        raise DataError(f"SocialGraph: expected a file, found none at {path}")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            values = line.split()
            if len(values) < size:
                raise DataError(
                    f"SocialGraph: {path} line {number}: expected {size} values, found {line!r}"
                )
            yield values[:size]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise DataError(f"SocialGraph: expected a number as a rating, found {text!r}") from None


def _columns(pairs: list[tuple[int, int]]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T


def _matrix(pairs: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Sparse: 1 for each of the pairs."""
    places: Tensor = torch.unique(pairs, dim=1)
    return sparse(places, torch.ones(places.shape[1]), (num_rows, num_columns))


def _above(matrix: Tensor, least: float) -> Tensor:
    """What is above this number, of a sparse matrix."""
    matrix = matrix.coalesce()
    is_kept = matrix.values() > least
    return sparse(matrix.indices()[:, is_kept], matrix.values()[is_kept], matrix.shape)


def _shares(matrix: Tensor) -> Tensor:
    """A sparse matrix without zeros, whose rows are divided by their sums."""
    places, values = matrix.indices(), matrix.values()
    sums = torch.zeros(len(matrix)).index_add(0, places[0], values)
    return sparse(places, values / sums[places[0]], matrix.shape)


def sparse(places: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """The matrix with these values at the places, (2, any), which are in order, each once."""
    # torch's products take the strides of places for granted. Checks would wait for the device.
    return torch.sparse_coo_tensor(
        places.contiguous(), values, tuple(shape), is_coalesced=True, check_invariants=False
    )
