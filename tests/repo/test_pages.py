"""What a page or the help of a command names exists: names of the package, options, variables."""

import argparse
import importlib
import inspect
import re
from collections.abc import Iterator

import pytest

import trireme as tr
from tests.repo import tree
from trireme import fleet
from trireme.commands import cli
from trireme.inference import Predictor
from trireme.launch import environment
from trireme.train.modes.geo.mode import Geo

ROOTS = {
    "trainer.optimizer.mode": Geo,
    "trainer.optimizer": tr.DistributedOptimizer,
    "trainer": tr.Trainer,
    "Trainer": tr.Trainer,
    "predictor": Predictor,
    "Predictor": Predictor,
    "fleet": fleet,
    "trireme": tr,
    "tr": tr,
}
"""The beginning of a dotted name, and what it is on every page. A longer one precedes."""
NAME = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, ROOTS))})((?:\.[A-Za-z_]\w*)*)")
OPTION = re.compile(r"(?<![\w-])--[a-z]\w*")
VARIABLE = re.compile(r"\bTRIREME_[A-Z_]*[A-Z]")
OF_OTHERS = {
    "trireme.keys": "metadata of a Parquet file",
    "trireme.missing": "metadata of a Parquet file",
    **dict.fromkeys(
        ("--nproc_per_node", "--nnodes", "--max_restarts", "--rdzv_backend", "--rdzv_endpoint"),
        "torchrun",
    ),
    "--glob": "hadoop classpath",
    "TRIREME_DEVICE_NPU": "a label of the user's",
    "TRIREME_DEVICE_BIG": "a label of the user's",
    "--heter": "python -m tests.chaos",
    "--interval": "examples/planted/days.py",
    "--examples": "examples/planted/days.py",
    "--epochs": "a script of the user",
    "TRIREME_TEST_SEED": "the tests",
}
"""Names that are not the package's, and whose they are."""


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Each command by name."""
    (commands,) = (
        action
        for action in cli.build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return dict(commands.choices)


COMMANDS = [cli.build_parser(), *parsers().values()]
OPTIONS = {option for command in COMMANDS for option in command._option_string_actions}


def unknown(text: str) -> Iterator[str]:
    known = {*OPTIONS, *environment.VARIABLES, *OF_OTHERS}
    for word in (*OPTION.findall(text), *VARIABLE.findall(text)):
        if word not in known:
            yield word
    for match in NAME.finditer(text):
        if match[0] not in known and not exists(ROOTS[match[1]], match[2].split(".")[1:]):
            yield match[0]


def exists(root: object, path: list[str]) -> bool:
    value = root
    for part in path:
        if inspect.ismodule(value) and not hasattr(value, part):
            try:
                importlib.import_module(f"{value.__name__}.{part}")
            except ModuleNotFoundError:
                return False
        value = getattr(value, part, None)
    return value is not None


def texts() -> dict[str, str]:
    """Pages and YAML files, and the helps. Results of benchmarks name what there was then."""
    results = tree.ROOT / "benchmarks/results"
    pages = [page for page in tree.files(".md", ".yaml") if results not in page.parents]
    helps = {f"trireme {name} --help": command for name, command in parsers().items()}
    return {tree.name(page): page.read_text() for page in pages} | {
        name: command.format_help() for name, command in helps.items()
    }


def test_every_name_of_a_page_or_a_help_exists() -> None:
    wrong = [f"{place}: {name}" for place, text in texts().items() for name in unknown(text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "name",
    [
        "tr.Tabel",
        "tr.data.criteoo",
        "trireme.fleet.init_servers",
        "fleet.iniit",
        "trainer.fitt",
        "--server_nun",
        "TRIREME_TIMEOUT",
    ],
)
def test_a_name_that_does_not_exist_is_found(name: str) -> None:
    page = f"`{name}`, `Trainer.fit()`, `tr.data.criteo()`, `--server_num`, `TRIREME_TIMEOUT_S`."
    assert list(unknown(page)) == [name]


@pytest.mark.parametrize("name", parsers())
def test_the_help_of_every_command_has_an_example(name: str) -> None:
    assert f"  trireme {name}" in parsers()[name].format_help().partition("\nexample")[2]
