"""What steps consist of besides gradients is the same in passes and windows on a device: clipping,
skipped steps, schedules, shows and time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme as tr
from tests.integration.test_device_passes import Net, assert_equal, contents
from trireme.job.default import set_default
from trireme.job.embedded import embedded
from trireme.train.modes.device_pass.key_slots import KeySlots

SHOWS = tr.policy.ShowClick("show", "label")
DAY_S = 86_400


def data() -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(7)
    batches = []
    for _ in range(6):
        ids = torch.randint(0, 60, (16, 2), generator=drawn)
        batch = {"a": ids[:, 0], "b": ids[:, 1], "label": (ids.sum(1) % 2).float()}
        batches.append({**batch, "show": torch.ones(16)})
    return batches


def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """Infinite for the batches whose first label is not 1."""
    value = nn.functional.binary_cross_entropy_with_logits(outputs, batch["label"])
    return value * torch.where(batch["label"][0] > 0, 1.0, torch.inf)


def plain(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs, batch["label"])


CASES: dict[str, dict[str, Any]] = {
    "norm": {"clip_norm": 0.05},
    "value": {"clip_value": 0.002},
    "skipped": {"skip_not_finite": True, "loss": loss},
    "schedule": {"schedule": True},
    "fleet": {
        "rule": lambda: tr.optim.FleetAdagrad(lr=0.05),
        "policy": tr.policy.ScorePolicy(show_click=SHOWS),
    },
    "fleet adam": {
        "rule": lambda: tr.optim.FleetAdam(lr=0.05),
        "policy": tr.policy.ScorePolicy(show_click=SHOWS),
    },
    "zeros": {"absent": "zeros"},
    "fleet zeros": {
        "rule": lambda: tr.optim.FleetAdagrad(lr=0.05),
        "policy": tr.policy.ScorePolicy(show_click=SHOWS),
        "absent": "zeros",
    },
}


def trained(
    within: Callable[[tr.Trainer], AbstractContextManager[Any]],
    *,
    rule: Callable[[], Any] = lambda: tr.optim.Adam(lr=0.01),
    policy: Any = None,
    absent: str = "initial",
    schedule: bool = False,
    **options: Any,
) -> dict[str, np.ndarray]:
    with embedded() as opened:
        set_default(opened)
        torch.manual_seed(3)
        table = tr.Table("keys", dim=4, optimizer=rule(), policy=policy, absent=absent)
        model = Net(table)
        one = tr.Trainer(
            model,
            torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1),
            strategy=tr.Strategy("sync"),
            progress=False,
            **{"loss": plain, **options},
            label=None,
        )
        if schedule:
            scheduler = torch.optim.lr_scheduler.StepLR(one.optimizer, 2, 0.5)
            one.optimizer.register_step_post_hook(lambda *_: scheduler.step())
        for day in (1, 3):
            one.set_time(day * DAY_S)
            with within(one):
                one.fit(data(), check_nan=False)
        return contents(opened)


def test_slots_of_a_pass_are_found_beside_training(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    find = KeySlots.find

    def noting(slots: KeySlots, keys: Any) -> Any:
        threads.append(threading.current_thread().name)
        return find(slots, keys)

    monkeypatch.setattr(KeySlots, "find", noting)
    trained(lambda one: one.on_device(data()))
    assert threads == ["trireme-plan"] * 2 * len(data())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "within",
    [lambda one: one.on_device(data()), lambda one: one.in_window(2, 40 * 90)],
    ids=["pass", "window"],
)
def test_a_step_on_a_device_is_that_of_servers(
    name: str, within: Callable[[tr.Trainer], AbstractContextManager[Any]]
) -> None:
    expected = trained(lambda _: nullcontext(), **CASES[name])
    assert_equal(trained(within, **CASES[name]), expected)
    if name != "fleet" and name != "fleet adam":  # it does something
        usual = trained(lambda _: nullcontext())
        assert any(not np.array_equal(usual[key], expected[key]) for key in expected)
