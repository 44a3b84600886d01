"""The text that `trireme place` prints."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from fractions import Fraction

from trireme.drawing import columns
from trireme.errors import BadRequest
from trireme.label import without_number
from trireme.place.choice import Choice, Group, StageChain
from trireme.place.machine_types import MachineType
from trireme.place.measurements import READ, Measurements, chain_of
from trireme.place.solver import Solver

WORKER_LABEL = "cpu"
"""Of the stages that the workers compute that read."""


def of_measurements(measured: Measurements) -> Iterator[str]:
    """Lines about what was measured on one type."""
    cores = "1 core" if measured.cores == 1 else f"{measured.cores} cores"
    device = "" if measured.device == "cpu" else f" and device {measured.device}"
    yield (
        f"{measured.script} on type {measured.type} with {cores}{device}:"
        f" {measured.batches} batches of {measured.examples:,.0f} examples, us per example"
    )
    lines = [["", "all", ""]]
    for stage in measured.stages:
        parts = (f"{activity} {_us(s)}" for activity, s in stage.seconds.items())
        lines.append([f"  {stage.name}", _us(sum(stage.seconds.values())), ", ".join(parts)])
    lines.append(["  a byte", _us(1e3 * measured.seconds_per_byte), "ns, to send or receive it"])
    for line in lines[1:]:
        yield "  ".join([line[0].ljust(_width(lines, 0)), line[1].rjust(_width(lines, 1)), line[2]])


def of_plan(
    types: Sequence[MachineType],
    measured: Sequence[Measurements],
    throughput: float,
    script: Sequence[str],
) -> Iterator[str]:
    """Lines about the placement that computes `throughput` examples per second, and the next ones.

    script: the training script with its arguments; empty: as it was measured.

    Raises BadRequest: the limits do not allow it; others as `chain_of` and `Solver.cheapest`.
    """
    chain, rate = chain_of(types, measured), Fraction(repr(throughput))
    solver = Solver(chain)
    choice = solver.cheapest(rate)
    if choice is None:
        raise _impossible(solver, rate)
    yield from _stages(chain, measured[0])
    yield ""
    yield f"{_rate(throughput)} examples/s take"
    yield from _groups(chain, choice)
    yield (
        f"cost {_money(choice.cost)} per hour, expected {_rate(choice.rate)} examples/s;"
        f" the slowest: group {1 + choice.groups.index(choice.slowest)}"
    )
    yield from _relayed(chain, choice)
    yield ""
    cheaper = solver.fastest(rate, below=choice.cost)
    yield f"next cheaper: {_next(chain, cheaper, 'none: no placement costs less')}"
    dearer = solver.cheapest(1 / choice.pace, exceeds=True) if choice.pace else None
    yield f"next dearer:  {_next(chain, dearer, 'none: no placement is faster')}"
    yield ""
    yield "Nothing was started or changed. This placement means:"
    yield from (f"  {line}" for line in _how_to(chain, choice, script or [measured[0].script]))


def _impossible(solver: Solver, rate: Fraction) -> BadRequest:
    fastest = solver.fastest(rate)
    most = "no placement at all" if fastest is None else f"at most {_rate(fastest.rate)}"
    return BadRequest(
        f"place: expected limits of types that allow {_rate(float(rate))} examples/s, found that"
        f" they allow {most}"
    )


def _stages(chain: StageChain, measured: Measurements) -> Iterator[str]:
    yield f"{measured.script}, measured in batches of {measured.examples:,.0f} examples"
    head = ["us per example", *(kind.name for kind in chain.types), "bytes before", "bytes to it"]
    lines = [head]
    for i, name in enumerate(chain.stages):
        seconds = [_us(chain.seconds[kind.name][i]) for kind in chain.types]
        lines.append(
            [f"  {name}", *seconds, _bytes(chain.bytes_before[i]), _bytes(chain.bytes_sent_to[i])]
        )
    each_byte = [_us(1e3 * chain.seconds_per_byte[kind.name]) for kind in chain.types]
    lines.append(["  ns per byte", *each_byte, "", ""])
    yield from columns(lines)


def _groups(chain: StageChain, choice: Choice) -> Iterator[str]:
    head = ["group", "type", "computes", "workers", "us per example", "examples/s", "per hour"]
    lines = [head]
    for number, group in enumerate(choice.groups, 1):
        lines.append(
            [
                f"  {number}",
                group.type.name,
                _computes(chain, group),
                f"{group.workers:,}",
                _us(float(group.seconds)),
                _rate(group.rate),
                _money(group.cost),
            ]
        )
    yield from columns(lines, left=3)


def _relayed(chain: StageChain, choice: Choice) -> Iterator[str]:
    """What the workers of the first group also do."""
    relayed = sum(chain.bytes_before[group.begin] for group in choice.groups[2:])
    if relayed:
        yield (
            f"group 1 passes on {_bytes(relayed)} bytes per example between the others, there and"
            " back"
        )


def _next(chain: StageChain, choice: Choice | None, none: str) -> str:
    if choice is None:
        return none
    groups = (f"{g.workers:,} {g.type.name} ({_computes(chain, g)})" for g in choice.groups)
    return f"{_money(choice.cost)} per hour, {_rate(choice.rate)} examples/s: {', '.join(groups)}"


def _computes(chain: StageChain, group: Group) -> str:
    return ", ".join(chain.stages[group.begin : group.end])


# ---- how to run it ----


def _how_to(chain: StageChain, choice: Choice, script: Sequence[str]) -> Iterator[str]:
    labels = labels_of(choice)
    if len(chain.stages) > 2:
        yield from _stages_to_write(chain, choice, labels)
    first, *others = choice.groups
    options = {"--server_num": "1", "--worker_num": str(first.workers)}
    if others:
        options["--heter_worker_num"] = ";".join(str(group.workers) for group in others)
        options["--heter_devices"] = ";".join(labels[1:])
    flags = (word for option in options.items() for word in option)
    variables = _device_variables(chain, choice, labels)
    yield " ".join([*variables, shlex.join(["trireme", "launch", *flags, *script])])
    yield f"with workers on machines of type {first.type.name}" + "".join(
        f", compute workers {label} on type {group.type.name}"
        for label, group in zip(labels[1:], others, strict=True)
    )
    yield "(servers are not part of it: `trireme size` tells how many the tables need)"


def _device_variables(chain: StageChain, choice: Choice, labels: Sequence[str]) -> list[str]:
    """What tells processes the device of a label, where the label alone does not."""
    first, *others = choice.groups
    devices = {
        without_number(label): group.type.device
        for label, group in zip(labels[1:], others, strict=True)
    }
    if not others and len(chain.stages) > 2:  # the stages as they are, in the workers
        stages = chain.stages[1:]
        devices = dict.fromkeys(map(without_number, stages), first.type.device)
        devices.pop(WORKER_LABEL, None)
    unlike = {label: device for label, device in devices.items() if device != label}
    if not unlike:
        return []
    from trireme.accelerator import torch_name  # loads torch

    return [f"TRIREME_DEVICE_{label.upper()}={torch_name(kind)}" for label, kind in unlike.items()]


def labels_of(choice: Choice) -> list[str]:
    """The label of each group: of the first that of workers, of others their type's, with a number
    if it has been used.
    """
    labels: list[str] = []
    for group in choice.groups:
        label = group.type.label if labels else WORKER_LABEL
        used = sum(other.partition("_")[0] == label for other in labels)
        labels.append(f"{label}_{used + 1}" if used else label)
    return labels


def _stages_to_write(chain: StageChain, choice: Choice, labels: Sequence[str]) -> Iterator[str]:
    """What the script's Stages become, from those that it has."""
    stages = {
        label: [name for name in chain.stages[group.begin : group.end] if name != READ]
        for label, group in zip(labels, choice.groups, strict=True)
    }
    if len(choice.groups) == 1:
        yield "the model as it is: its stages run in the workers"
        return
    if all(names == [label] for label, names in stages.items()):
        yield "the stages of the model as they are"
        return
    words = (f"{label}={_module(names)}" for label, names in stages.items() if names)
    yield f"model = tr.Stages({', '.join(words)})  # of the stages that it has"


def _module(names: Sequence[str]) -> str:
    parts = [f'model["{name}"]' for name in names]
    return parts[0] if len(parts) == 1 else f"nn.Sequential({', '.join(parts)})"


# ---- numbers ----


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.3f}"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _bytes(number: float) -> str:
    return f"{number:,.0f}"


def _money(cost: Fraction) -> str:
    return f"{float(cost):,.2f}"


def _width(lines: Sequence[Sequence[str]], column: int) -> int:
    return max(len(line[column]) for line in lines)
