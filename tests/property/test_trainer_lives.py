"""Random operations of a trainer, bit for bit the same whatever holds the rows."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest

from tests.long import pick
from tests.property.trainer_life import HOLDERS, Life
from tests.seeds import SEED, named_in_failure


@pytest.mark.parametrize("number", range(pick(short=1, long=40)))
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_holds_the_rows_changes_nothing(holder, number, tmp_path):
    seed = [SEED, number, HOLDERS.index(holder)]
    life_of = partial(Life, seed, in_passes=holder in ("pass", "window"))
    with (
        closing(life_of("memory", tmp_path / "memory")) as expected,
        closing(life_of(holder, tmp_path / holder)) as life,
        named_in_failure(lambda: f"{life.declared}, {life.names}"),
    ):
        for _ in range(pick(short=12, long=25)):
            assert life.step() == expected.step()
