"""How long a worker asks for a stream, and what it says meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trireme.errors import DeadlineExceeded, TriremeError, Unavailable
from trireme.worker import passes


class Asking:
    """A client whose coordinator has no stream for it, with a clock: each call takes 2 s."""

    def __init__(self, silent_from_s: float, timeout_s: float) -> None:
        self.script, self.coordinator = SimpleNamespace(number=1), self
        self.timeout_s, self.silent_from_s, self.now = timeout_s, silent_from_s, 0.0

    def call(self, method: str, body: dict[str, Any], *, timeout_s: float) -> Any:
        self.now += timeout_s
        raise self.error()

    def error(self) -> TriremeError:
        if self.now < self.silent_from_s:
            return DeadlineExceeded("others have the streams")
        return Unavailable("not reached")

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        pass


@pytest.mark.parametrize(
    ("silent_from_s", "kind", "others", "silence"),
    [
        (1e9, DeadlineExceeded, [4, 6, 12, 24, 48, 96, 156], []),
        (0.0, Unavailable, [], [4, 6, 12, 24, 48]),
        (100.0, Unavailable, [4, 6, 12, 24, 48, 96], [102, 104, 110, 122, 146]),
    ],
)
def test_messages_become_seldom_while_no_stream_comes(
    silent_from_s: float,
    kind: type[TriremeError],
    others: list[int],
    silence: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client: Any = Asking(silent_from_s, timeout_s=60.0)
    monkeypatch.setattr(passes, "time", client)
    monkeypatch.setattr(passes, "PATIENCE", 3)
    with pytest.raises(kind):
        passes.take(client, None, lambda: False)
    assert [record.getMessage() for record in caplog.records] == [
        f"still waiting after {seconds} s: {text}"
        for text, times in (("others have the streams", others), ("not reached", silence))
        for seconds in times
    ]
