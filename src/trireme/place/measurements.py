"""What was measured on a machine of one type, and the file that takes it elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trireme.checkpoint.format.json_object import JsonObject
from trireme.errors import BadRequest, Corruption, SchemaMismatch, writing
from trireme.place.choice import StageChain
from trireme.place.machine_types import CORES_MAX, NUMBER_MAX, MachineType
from trireme.storage.atomic_file import replace_file

FORMAT = "trireme place"
VERSION = 1
READ = "read"
"""The first stage: what a worker that reads does itself, whatever computes the model."""
READ_ACTIVITIES = ("read", "plan", "pull", "push")
MODEL_ACTIVITIES = ("forward", "backward")
_STAGES_MAX = 1024
_TOLERANCE = 0.1  # of bytes per example between machines, whose batches may differ


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """One stage on one machine, all per example.

    seconds: by activity: of READ those of READ_ACTIVITIES, of the others of MODEL_ACTIVITIES.
    bytes_before, bytes_sent_to: see StageChain.
    """

    name: str
    seconds: Mapping[str, float]
    bytes_before: float
    bytes_sent_to: float


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """type, cores, device: of the machine's type. script: as it was named. num_first: see
    StageChain. examples: of a batch, on average. batches: how many were measured.
    seconds_per_byte: of one end of a call.
    """

    type: str
    cores: int
    device: str
    script: str
    examples: float
    batches: int
    num_first: int
    seconds_per_byte: float
    stages: Sequence[StageTimes]

    def write(self, path: Path) -> None:
        """Raises BadRequest or ResourceExhausted: the file cannot be written."""
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        with writing(f"place: cannot write {path}"):
            replace_file(path, (json.dumps(document, indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Measurements:
        """Raises BadRequest: the file cannot be read. Corruption: it has another content."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BadRequest(f"place: cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise Corruption(f"{path}: expected what --measure writes, found {error}") from error
        return cls._from_json(JsonObject(document, str(path)))

    @classmethod
    def _from_json(cls, values: JsonObject) -> Measurements:
        if (found_format := values.any("format")) != FORMAT:
            raise values.wrong(repr(FORMAT), found_format, "format")
        values.whole("version", VERSION, VERSION)
        stages = [_stage(number, stage) for number, stage in enumerate(values.objects("stages"))]
        if not 2 <= len(stages) <= _STAGES_MAX:
            raise values.wrong(f"2 to {_STAGES_MAX} stages", len(stages), "stages")
        return cls(
            type=values.text("type"),
            cores=values.whole("cores", 1, CORES_MAX),
            device=values.text("device"),
            script=values.text("script"),
            examples=values.number("examples", 0.0, NUMBER_MAX),
            batches=values.whole("batches", 1, 1 << 40),
            num_first=values.whole("num_first", 1, len(stages)),
            seconds_per_byte=values.number("seconds_per_byte", 0.0, NUMBER_MAX),
            stages=stages,
        )

    @property
    def names(self) -> list[str]:
        """Of the stages."""
        return [stage.name for stage in self.stages]


def _stage(number: int, values: JsonObject) -> StageTimes:
    activities = READ_ACTIVITIES if number == 0 else MODEL_ACTIVITIES
    seconds = values.object("seconds")
    if set(seconds.values) != set(activities):
        raise seconds.wrong(f"seconds of {', '.join(activities)}", list(seconds.values))
    return StageTimes(
        name=values.text("name"),
        seconds={name: seconds.number(name, 0.0, NUMBER_MAX) for name in activities},
        bytes_before=values.number("bytes_before", 0.0, NUMBER_MAX),
        bytes_sent_to=values.number("bytes_sent_to", 0.0, NUMBER_MAX),
    )


def chain_of(types: Sequence[MachineType], measured: Sequence[Measurements]) -> StageChain:
    """What is to be placed, from the measurements of every type.

    Raises:
        BadRequest: a type was not measured, or twice; or with other cores or another device.
        SchemaMismatch: they are of different models or data.
    """
    by_type: dict[str, Measurements] = {}
    for one in measured:
        if one.type in by_type:
            raise BadRequest(f"place: expected type {one.type!r} measured once, found it twice")
        by_type[one.type] = one
    for kind in types:
        _check_type(kind, by_type)
    used = [by_type[kind.name] for kind in types]
    for one in used[1:]:
        _check_alike(used[0], one)
    columns = list(zip(*(one.stages for one in used), strict=True))
    return StageChain(
        stages=used[0].names,
        types=types,
        seconds={one.type: [sum(s.seconds.values()) for s in one.stages] for one in used},
        bytes_before=[max(stage.bytes_before for stage in column) for column in columns],
        bytes_sent_to=[max(stage.bytes_sent_to for stage in column) for column in columns],
        num_first=used[0].num_first,
        seconds_per_byte={one.type: one.seconds_per_byte for one in used},
    )


def _check_type(kind: MachineType, by_type: Mapping[str, Measurements]) -> None:
    if kind.name not in by_type:
        raise BadRequest(
            f"place: expected measurements of type {kind.name!r}, found those of"
            f" {', '.join(by_type) or 'none'}; on such a machine: trireme place SCRIPT --types FILE"
            f" --type {kind.name} --measure {kind.name}.json"
        )
    one = by_type[kind.name]
    if (one.cores, one.device) != (kind.cores, kind.device):
        raise BadRequest(
            f"place: expected type {kind.name!r} with {kind.cores} cores and device {kind.device},"
            f" found it measured with {one.cores} cores and device {one.device}"
        )


def _check_alike(first: Measurements, other: Measurements) -> None:
    for what, ours, other_value in _facts(first, other):
        is_number = isinstance(ours, float) and isinstance(other_value, float)
        is_near = is_number and abs(ours - other_value) <= _TOLERANCE * max(ours, other_value)
        if ours != other_value and not is_near:
            raise SchemaMismatch(
                f"place: expected measurements of one model on the same data, found {what} {ours!r}"
                f" on {first.type} and {other_value!r} on {other.type}"
            )


def _facts(first: Measurements, other: Measurements) -> list[tuple[str, Any, Any]]:
    facts: list[tuple[str, Any, Any]] = [
        ("stages", first.names, other.names),
        ("num_first", first.num_first, other.num_first),
        ("examples of a batch", first.examples, other.examples),
    ]
    for stage, same in zip(first.stages, other.stages, strict=False):
        for field in ("bytes_before", "bytes_sent_to"):
            facts.append((f"{field} of {stage.name}", getattr(stage, field), getattr(same, field)))
    return facts
