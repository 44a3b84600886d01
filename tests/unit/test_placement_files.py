"""The files of `trireme place`: types of machines, and measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trireme.errors import BadRequest, Corruption, SchemaMismatch
from trireme.place.machine_types import MachineType, read_types
from trireme.place.measurements import Measurements, StageTimes, chain_of

TYPES = """
types:
  cpu:
    cores: 16
    price: 0.8
    network: 1.25e9
    reads: true
    limit: 40
  fast:
    cores: 8
    device: gpu
    price: 3
    network: 3e9
    label: gpu
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "types.yaml"
    path.write_text(text)
    return path


def test_types_are_read_with_their_defaults(tmp_path: Path) -> None:
    assert read_types(written(tmp_path, TYPES)) == (
        MachineType(
            name="cpu", cores=16, price=0.8, network=1.25e9, reads=True, limit=40, label="cpu"
        ),
        MachineType(name="fast", cores=8, device="gpu", price=3, network=3e9, label="gpu"),
    )


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "cores: 16",
            "cores: 1.5",
            "types.cpu.cores: expected an integer in [1, 1048576], found 1.5",
        ),
        (
            "cores: 16",
            "cores: true",
            "types.cpu.cores: expected an integer in [1, 1048576], found True",
        ),
        (
            "    price: 3\n",
            "",
            "types.fast.price: expected a number in [0, 1e+15], per hour, found none",
        ),
        (
            "price: 3",
            "price: -1",
            "types.fast.price: expected a number in [0, 1e+15], per hour, found -1",
        ),
        ("price: 3", "price: .nan", "types.fast.price: expected a number in [0, 1e+15], per hour"),
        ("network: 3e9", "network: 0", "types.fast.network: expected a number in [1, 1e+18]"),
        ("network: 3e9", "network: .inf", "types.fast.network: expected a number in [1, 1e+18]"),
        ("price: 3", "price: 1e16", "types.fast.price: expected a number in [0, 1e+15], per hour"),
        ("network: 3e9", "network: 5e-324", "types.fast.network: expected a number in [1, 1e+18]"),
        ("network: 3e9", "network: &own {own: *own}", "Config: expected at most 10,000 keys in"),
        ("device: gpu", "device: tpu", "types.fast.device: expected one of cpu, gpu, found 'tpu'"),
        ("reads: true", "reads: 1", "types.cpu.reads: expected true or false, found 1"),
        ("reads: true", "reads: false", "expected a type with reads: true, found cpu, fast"),
        ("limit: 40", "limit: 0", "types.cpu.limit: expected an integer >= 1, found 0"),
        ("limit: 40", "limits: 40", "expected keys out of cores, price, network, device, reads"),
        ("label: gpu", "label: gpu_2", "types.fast.label: expected small letters and digits"),
        ("label: gpu", "label: cpu", "expected a label of its own, found 'cpu', as of cpu"),
        ("    label: gpu\n", "  Big: 3\n", "expected types.NAME.KEY, found types.Big: 3"),
        ("types:", "machines:", "expected types.NAME.KEY, found machines.cpu.cores: 16"),
        ("  fast:", "  cpu:", "types.yaml:9: expected 'cpu' once, found it again"),
        ("    label: gpu\n", "    cores: 8\n", ":14: expected 'cores' once, found it again"),
        ("types:", "types: [", "expected YAML in"),
    ],
)
def test_types_with_a_mistake_are_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in TYPES
    with pytest.raises(BadRequest) as refused:
        read_types(written(tmp_path, TYPES.replace(old, new)))
    assert words in str(refused.value)
    assert "types.yaml" in str(refused.value)


def measured(name: str = "cpu", **values: Any) -> Measurements:
    read = StageTimes(
        name="read",
        seconds={"read": 1e-6, "plan": 2e-6, "pull": 3e-6, "push": 4e-6},
        bytes_before=100.0,
        bytes_sent_to=0.0,
    )
    model = StageTimes(
        name="model",
        seconds={"forward": 5e-6, "backward": 6e-6},
        bytes_before=200.0,
        bytes_sent_to=30.0,
    )
    plain = Measurements(
        type=name,
        cores=2,
        device="cpu",
        script="train.py",
        examples=512.0,
        batches=64,
        num_first=1,
        seconds_per_byte=1e-9,
        stages=(read, model),
    )
    return replace(plain, **values)


def test_measurements_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    measured().write(path)
    loaded = Measurements.load(path)
    assert replace(loaded, stages=tuple(loaded.stages)) == measured()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("format", "something", ".format: expected 'trireme place', found 'something'"),
        ("version", 2, ".version: expected a whole number in [1, 1], found 2"),
        ("cores", 0, ".cores: expected a whole number in [1,"),
        ("type", None, ".type: expected a text"),
        ("examples", -1, ".examples: expected a number in [0, 1e+15], found -1"),
        ("seconds_per_byte", -1, ".seconds_per_byte: expected a number in [0, 1e+15], found -1"),
        ("num_first", 3, ".num_first: expected a whole number in [1, 2], found 3"),
        ("stages", [], ".stages: expected 2 to 1024 stages, found 0"),
        ("stages.0.seconds.read", float("nan"), "seconds.read: expected a number in [0, 1e+15]"),
        ("stages.1.seconds.read", 1.0, "seconds: expected seconds of forward, backward, found"),
        ("stages.1.bytes_before", "many", "bytes_before: expected a number in [0, 1e+15]"),
        ("stages.1.name", 7, "stages[1].name: expected a text"),
    ],
)
def test_measurements_with_a_mistake_are_refused(
    tmp_path: Path, field: str, value: object, words: str
) -> None:
    path = tmp_path / "cpu.json"
    measured().write(path)
    document = json.loads(path.read_text())
    part: Any = document
    *outer, last = field.split(".")
    for key in outer:
        part = part[int(key) if isinstance(part, list) else key]
    part[last] = value
    path.write_text(json.dumps(document))
    with pytest.raises(Corruption) as refused:
        Measurements.load(path)
    assert words in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_file_that_is_no_measurement_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    with pytest.raises(BadRequest, match="cannot read"):
        Measurements.load(path)
    path.write_text("{\n  nothing\n")
    with pytest.raises(Corruption, match=r"expected what --measure writes, found .* line 2"):
        Measurements.load(path)


CPU = MachineType(name="cpu", cores=2, price=1.0, network=1e9, reads=True, label="cpu")
GPU = replace(CPU, name="gpu", label="gpu")


def test_a_chain_has_the_sums_of_each_type_and_the_most_bytes() -> None:
    other = replace(measured().stages[1], bytes_before=201.0)
    both = [measured(), measured("gpu", stages=(measured().stages[0], other))]
    chain = chain_of([CPU, GPU], both)
    assert chain.stages == ["read", "model"]
    assert chain.seconds["gpu"] == pytest.approx([10e-6, 11e-6])
    assert chain.bytes_before == [100.0, 201.0]
    assert chain.bytes_sent_to == [0.0, 30.0]
    assert chain.num_first == 1
    assert chain.seconds_per_byte == {"cpu": 1e-9, "gpu": 1e-9}


def test_measurements_that_do_not_fit_the_types_are_refused() -> None:
    with pytest.raises(BadRequest, match="expected measurements of type 'gpu', found those of cpu"):
        chain_of([CPU, GPU], [measured()])
    with pytest.raises(BadRequest, match="expected type 'cpu' measured once, found it twice"):
        chain_of([CPU], [measured(), measured()])
    with pytest.raises(BadRequest, match="with 2 cores and device cpu, found it measured with 4"):
        chain_of([CPU], [measured(cores=4)])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"num_first": 2}, "found num_first 1 on cpu and 2 on gpu"),
        ({"examples": 1024.0}, "found examples of a batch 512.0 on cpu and 1024.0 on gpu"),
        (
            {"stages": (measured().stages[0], replace(measured().stages[1], name="tower"))},
            r"found stages \['read', 'model'\] on cpu and \['read', 'tower'\] on gpu",
        ),
        (
            {"stages": (measured().stages[0], replace(measured().stages[1], bytes_sent_to=60.0))},
            "found bytes_sent_to of model 30.0 on cpu and 60.0 on gpu",
        ),
    ],
)
def test_measurements_of_different_models_are_refused(other: dict[str, Any], words: str) -> None:
    with pytest.raises(SchemaMismatch, match=words):
        chain_of([CPU, GPU], [measured(), measured("gpu", **other)])


def test_a_file_of_brackets_alone_is_no_measurement(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    path.write_text("[" * 100_000)
    with pytest.raises(Corruption, match="expected what --measure writes, found maximum recursion"):
        Measurements.load(path)
