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


@pytest.mark.parametrize(
    "reason", [Unavailable("not reached"), DeadlineExceeded("the disk does not answer")]
)
def test_an_attempt_that_had_time_tells_the_reason(reason: TriremeError) -> None:
    attempt = failing(NotReady("expected push 4 next"), reason)
    with pytest.raises(type(reason), match=f"^{reason}$"):
        servers().until_current("push", attempt, timeout_s=30.0)
