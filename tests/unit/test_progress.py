"""How often progress is shown."""

from __future__ import annotations

import types

import pytest

from trireme import progress


def test_figures_that_take_long_are_shown_more_seldom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now))

    def times_shown(until: float, figures_s: float) -> list[float]:
        nonlocal now
        actual = []
        while now < until:
            now += 0.5
            if shown.is_due():
                now += figures_s
                shown.show(None, {"auc": 0.5})
                actual.append(now)
        return actual

    with progress.display("train") as shown:
        assert times_shown(16, 0.0) == [5.0, 10.0, 15.0]
        assert times_shown(107, 2.0) == [22.0, 64.0, 106.0]
    assert len(capsys.readouterr().out.splitlines()) == 6
