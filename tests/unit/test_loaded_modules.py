"""A Predictor loads neither servers nor training code; a worker loads no server, nor does that
which workers are forked from; a model loads no other one.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from trireme import models
from trireme.models import zoo

PREDICTOR = (
    *("train", "models", "server", "worker", "coordinator", "job"),
    *("checkpoint", "launch", "rpc", "run", "fleet"),
)
WORKER = ("server", "coordinator", "checkpoint.server_side", "interchange.server_side")


def loaded(program: str, packages: tuple[str, ...]) -> list[str]:
    """Modules of these packages of trireme that a program loads."""
    code = f"import sys\n{program}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    prefixes = tuple(f"trireme.{package}." for package in packages)
    return [name for name in done.stdout.split() if f"{name}.".startswith(prefixes)]


def test_a_predictor_loads_no_training_code_and_no_servers() -> None:
    assert loaded("import trireme.inference", PREDICTOR) == []


def test_packages_are_found_by_their_names_alone() -> None:
    assert loaded("import trireme as tr; tr.inference.Predictor", ("inference",)) != []
    assert loaded("import trireme as tr; tr.fleet.MultiSlotDataGenerator", ("fleet",)) != []


def test_a_worker_loads_no_server() -> None:
    program = "import trireme.launch.init, trireme.job.connecting, trireme.train.trainer"
    assert loaded(program, WORKER) == []
    assert loaded("import trireme.job.embedded", WORKER) != []


def test_a_fork_server_loads_only_what_all_roles_do() -> None:
    program = "from trireme.launch import fork_server_program; fork_server_program.load()"
    assert loaded(program, (*WORKER, "worker", "job", "nn", "data", "train")) == []


def test_a_model_loads_no_other_model() -> None:
    assert loaded("from trireme.models import zoo", ("models",)) == [
        "trireme.models",
        "trireme.models.zoo",
    ]
    one = loaded("from trireme.models import zoo; zoo.load('deepfm')", ("models",))
    by_name = loaded("from trireme.models import DeepFM", ("models",))
    assert set(by_name) == set(one) - {"trireme.models.zoo"}
    assert {name.rpartition(".")[2] for name in one} & set(zoo.NAMES) == {"deepfm"}


def test_the_package_of_models_has_all_names() -> None:
    assert set(models.__all__) <= set(dir(models))
    assert all(getattr(models, name) is not None for name in models.__all__)
    with pytest.raises(AttributeError, match=r"'trireme.models' has no attribute 'GPT'"):
        _ = models.GPT
