"""What `trireme place` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest

from tests.unit.test_placement_files import CPU, GPU, measured
from trireme.commands.place import RATE_MAX
from trireme.errors import BadRequest
from trireme.place.choice import Choice, Group
from trireme.place.machine_types import NUMBER_MAX, MachineType
from trireme.place.measurements import Measurements, StageTimes
from trireme.place.report import labels_of, of_measurements, of_plan


def test_measurements_are_shown_by_stage_and_activity() -> None:
    assert list(of_measurements(measured())) == [
        "train.py on type cpu with 2 cores: 64 batches of 512 examples, us per example",
        "  read    10.000  read 1.000, plan 2.000, pull 3.000, push 4.000",
        "  model   11.000  forward 5.000, backward 6.000",
        "  a byte   1.000  ns, to send or receive it",
    ]


def staged(name: str, *microseconds: float) -> Measurements:
    """A model of the stages cpu, gpu and cpu_2, the first with tables."""
    names = ("cpu", "gpu", "cpu_2")
    model = (
        StageTimes(
            name=stage,
            seconds={"forward": us * 1e-6, "backward": 0.0},
            bytes_before=100.0,
            bytes_sent_to=10.0,
        )
        for stage, us in zip(names, microseconds, strict=True)
    )
    return measured(name, stages=(measured().stages[0], *model), num_first=2)


def plan(
    types: Sequence[MachineType], *measurements: Measurements, throughput: float, script: str = ""
) -> list[str]:
    return list(of_plan(types, measurements, throughput, script.split()))


def test_a_plan_says_who_computes_what_and_how_to_start_it() -> None:
    gpu = replace(GPU, price=3.0, reads=False)
    fast = measured("gpu", stages=(measured().stages[0], measured().stages[1]))
    fast = replace(fast, stages=(fast.stages[0], replace(fast.stages[1], seconds=_SOON)))
    lines = plan([CPU, gpu], measured(), fast, throughput=1e6, script="fit.py --rate 2")
    assert lines == [
        "train.py, measured in batches of 512 examples",
        "us per example     cpu     gpu  bytes before  bytes to it",
        "  read          10.000  10.000           100            0",
        "  model         11.000   1.000           200           30",
        "  ns per byte    1.000   1.000",
        "",
        "1,000,000 examples/s take",
        "group  type  computes  workers  us per example  examples/s  per hour",
        "  1    cpu   read           11          10.560   1,041,667     11.00",
        "  2    gpu   model           2           1.460   1,369,863      6.00",
        "cost 17.00 per hour, expected 1,041,667 examples/s; the slowest: group 1",
        "",
        "next cheaper: 16.00 per hour, 946,970 examples/s: 10 cpu (read), 2 gpu (model)",
        "next dearer:  18.00 per hour, 1,136,364 examples/s: 12 cpu (read), 2 gpu (model)",
        "",
        "Nothing was started or changed. This placement means:",
        "  TRIREME_DEVICE_GPU=cpu trireme launch --server_num 1 --worker_num 11"
        " --heter_worker_num 2 --heter_devices gpu fit.py --rate 2",
        "  with workers on machines of type cpu, compute workers gpu on type gpu",
        "  (servers are not part of it: `trireme size` tells how many the tables need)",
    ]


_SOON = {"forward": 4e-7, "backward": 6e-7}


def test_a_plan_of_one_group_is_a_job_without_compute_workers() -> None:
    lines = plan([CPU], measured(), throughput=50_000)
    assert "  trireme launch --server_num 1 --worker_num 2 train.py" in lines
    assert "next cheaper: 1.00 per hour, 47,393 examples/s: 1 cpu (read, model)" in lines


def test_a_plan_says_when_there_is_nothing_cheaper_or_dearer() -> None:
    lines = plan([replace(CPU, limit=1)], measured(), throughput=1_000)
    assert "next cheaper: none: no placement costs less" in lines
    assert "next dearer:  none: no placement is faster" in lines


@pytest.mark.parametrize(
    ("cpu", "gpu", "words"),
    [
        ((1, 9, 1), (9, 1, 9), "the stages of the model as they are"),
        (
            (1, 1, 9),
            (9, 9, 1),
            'model = tr.Stages(cpu=nn.Sequential(model["cpu"], model["gpu"]), gpu=model["cpu_2"])'
            "  # of the stages that it has",
        ),
        ((1, 1, 1), (9, 9, 9), "the model as it is: its stages run in the workers"),
    ],
)
def test_a_plan_says_what_the_stages_of_the_script_become(
    cpu: tuple[float, ...], gpu: tuple[float, ...], words: str
) -> None:
    types = [CPU, replace(GPU, reads=False)]
    measurements = [
        staged("cpu", *(50 * us for us in cpu)),
        staged("gpu", *(50 * us for us in gpu)),
    ]
    assert f"  {words}" in plan(types, *measurements, throughput=1e6)


def test_the_command_says_the_device_of_labels_that_do_not_say_it_themselves() -> None:
    """Without that, processes would look for a GPU, or not know the label."""
    in_workers = plan([CPU], staged("cpu", 1, 1, 1), throughput=1)
    start = "trireme launch --server_num 1 --worker_num 1 train.py"
    assert f"  TRIREME_DEVICE_GPU=cpu {start}" in in_workers
    big = replace(CPU, name="big", label="big", reads=False)
    slow = [staged("cpu", 1, 1, 900), staged("big", 900, 900, 1)]
    apart = plan([CPU, big], *slow, throughput=1e6)
    assert any(line.startswith("  TRIREME_DEVICE_BIG=cpu trireme launch ") for line in apart)


def test_a_plan_says_what_workers_pass_on_between_other_groups() -> None:
    types = [CPU, replace(GPU, reads=False)]
    slow = [staged("cpu", 50, 450, 50), staged("gpu", 450, 50, 450)]
    # 60.74 us: stages, 100 bytes at 1 ns, 100 + 2 * 10 bytes at 2 ns; 200 to pass on at 2 ns.
    lines = plan(types, *slow, throughput=1e6)
    assert "group 1 passes on 100 bytes per example between the others, there and back" in lines
    assert any(
        line.startswith("  1    cpu   read, cpu       61          60.740 ") for line in lines
    )
    one_group = plan([CPU], measured(), throughput=1e6)
    assert not any("passes on" in line for line in one_group)


def test_limits_that_are_too_low_are_named_with_what_they_allow() -> None:
    with pytest.raises(BadRequest, match=r"allow 1,000,000 examples/s, found .* at most 94,787"):
        plan([replace(CPU, limit=2)], measured(), throughput=1e6)
    # A second group, for which there is no worker left.
    limited = [replace(CPU, limit=1), replace(GPU, reads=False, limit=1)]
    slow = [replace(CPU, name="slow", limit=1, reads=False)]
    with pytest.raises(BadRequest, match="allow 1,000,000 examples/s, found that they allow at"):
        plan(limited + slow, *(measured(t.name) for t in limited + slow), throughput=1e6)


def test_labels_are_numbered_when_they_are_used_again() -> None:
    big = replace(CPU, name="big", label="cpu")
    kinds = (GPU, big, GPU, big, GPU)
    groups = tuple(Group(i, i + 1, kind, 1, Fraction(1)) for i, kind in enumerate(kinds))
    assert labels_of(Choice(groups)) == ["cpu", "cpu_2", "gpu", "cpu_3", "gpu_2"]


@pytest.mark.parametrize("number", [0.0, 5e-324, NUMBER_MAX])
def test_the_least_and_the_most_that_files_may_say_can_be_printed(number: float) -> None:
    read, model = measured().stages
    read = replace(read, seconds=dict.fromkeys(read.seconds, number), bytes_before=number)
    model = replace(model, seconds=dict.fromkeys(model.seconds, number), bytes_before=number)
    slow = replace(CPU, price=number, network=1.0, limit=None)
    one = measured(stages=(read, model), seconds_per_byte=number)
    for throughput in (5e-324, RATE_MAX):
        assert any("examples/s take" in line for line in plan([slow], one, throughput=throughput))
