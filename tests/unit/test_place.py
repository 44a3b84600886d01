"""Placement of dense blocks on servers: the user's choice, checked."""

from __future__ import annotations

from typing import Any

import pytest

from trireme.blocks import Blocks
from trireme.errors import BadRequest

NAMES = ["w", "w", "w", "b"]


def test_round_robin_is_left_to_the_coordinator() -> None:
    assert Blocks().owners(NAMES, 3) is None


def test_the_hash_places_by_name_and_number_alone() -> None:
    names = [f"layer{number // 4}" for number in range(400)]
    owners = Blocks(place="hash").owners(names, 3)
    assert owners is not None
    assert owners[200:204] == Blocks(place="hash").owners(["layer50"] * 4, 3)
    assert Blocks(place="hash").owners(["top.weight", "top.bias"], 1000) == [408, 326]
    assert min(owners.count(server) for server in range(3)) > 80


def test_a_function_gets_name_number_and_servers() -> None:
    seen: list[tuple[str, int, int]] = []

    def last(name: str, number: int, num_servers: int) -> int:
        seen.append((name, number, num_servers))
        return num_servers - 1

    assert Blocks(8192, place=last).owners(NAMES, 2) == [1, 1, 1, 1]
    assert seen == [("w", 0, 2), ("w", 1, 2), ("w", 2, 2), ("b", 0, 2)]


@pytest.mark.parametrize("answer", [2, -1, 0.5, True, None])
def test_an_answer_that_is_no_server_is_refused_with_the_block(answer: Any) -> None:
    blocks = Blocks(place=lambda name, number, num_servers: answer if number else 0)
    with pytest.raises(BadRequest, match="expected a server below 2 for block 1 of w, found"):
        blocks.owners(NAMES, 2)


def test_sizes_and_places_that_cannot_be_are_refused() -> None:
    wrong: list[Any] = [0, -64, True, 64.0, 63, 100]
    for size in wrong:
        with pytest.raises(BadRequest, match="expected size as a multiple of 64 up to"):
            Blocks(size)
    with pytest.raises(BadRequest, match="expected place 'round_robin', 'hash' or a function"):
        Blocks(place="random")
