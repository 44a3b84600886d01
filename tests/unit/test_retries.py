"""Calls that are made again until servers are ready: which error tells why they never were."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trireme.errors import DeadlineExceeded, NotReady, TriremeError, Unavailable
from trireme.worker.servers import Servers


def failing(*errors: TriremeError) -> Callable[[float], None]:
    """An attempt that ends with one error after the other, and then always with the last."""
    left = list(errors)

    def attempt(_: float) -> None:
        raise left.pop(0) if len(left) > 1 else left[0]

    return attempt


def servers() -> Servers:
    return Servers(["127.0.0.1:1"], lambda _: None, 60.0, {})


@pytest.mark.parametrize("late", [Unavailable("not reached"), DeadlineExceeded("no answer")])
def test_an_attempt_without_time_left_does_not_hide_what_kept_the_others(
    late: TriremeError,
) -> None:
    attempt = failing(NotReady("expected push 4 next"), late)
    with pytest.raises(DeadlineExceeded, match=r"push: not possible .*expected push 4 next"):
        servers().until_current("push", attempt, timeout_s=0.5)


def test_a_server_that_is_gone_is_the_reason_where_there_was_time_to_reach_it() -> None:
    attempt = failing(NotReady("expected push 4 next"), Unavailable("not reached"))
    with pytest.raises(Unavailable, match="not reached"):
        servers().until_current("push", attempt, timeout_s=30.0)
