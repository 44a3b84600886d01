"""Passes and windows on a device whose end finds the disk of a server full."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

import trireme as tr
from tests.integration.durable_servers import DurableServers
from tests.integration.test_device_passes import (
    RULES,
    assert_equal,
    contents,
    saved,
    trainer,
)
from tests.integration.test_device_windows import memory_of, stream
from tests.integration.test_whole_imports import fill
from tests.programs import Template
from trireme.errors import BadRequest, ResourceExhausted
from trireme.job.default import set_default
from trireme.job.embedded import embedded

BEGIN: dict[str, Callable[[tr.Trainer], AbstractContextManager[None]]] = {
    "pass": lambda one: one.on_device(stream(1)),
    "window": lambda one: one.in_window(3, memory_of(one, 15)),
}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, np.ndarray]:
    with embedded() as cluster:
        set_default(cluster)
        one = trainer(RULES["adam"]())
        for number in range(3):
            one.fit(stream(number))
        return contents(cluster)


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("how", BEGIN)
def test_a_pass_whose_end_found_no_room_is_made_again_and_a_killed_server_recovers(
    programs: Template,
    tmp_path: Path,
    small_disk: Path,
    undisturbed: dict[str, np.ndarray],
    how: str,
    repeats: bool,
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "state-1").symlink_to(small_disk)
    with DurableServers(programs, 2, tmp_path, state=state, log_bytes=1 << 30) as servers:
        cluster = servers.join(0, 1)
        set_default(cluster)
        one = trainer(RULES["adam"]())
        one.fit(stream(0))

        def train() -> None:
            """The end is repeated, or all of it."""
            with BEGIN[how](one):
                one.fit(stream(1))
                other = fill(small_disk)
                with pytest.raises(ResourceExhausted, match="No space left"):
                    one.end_pass()
                other.unlink()
                if not repeats:
                    raise ResourceExhausted("give up")

        if repeats and how == "pass":
            train()
        else:
            reason = "give up" if not repeats else "expected a window whose end has not failed"
            with pytest.raises((ResourceExhausted, BadRequest), match=reason):
                train()
            if repeats:
                one.abandon_pass()
            with BEGIN[how](one):
                one.fit(stream(1))
        one.fit(stream(2))
        servers.kill(1)
        servers.start(1)
        actual = saved(one, tmp_path / "saved")
        cluster.close()
    assert_equal(actual, undisturbed)
