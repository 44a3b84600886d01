"""The command `trireme place`."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from trireme.commands.options import number, seconds, write_lines
from trireme.errors import BadRequest

if TYPE_CHECKING:
    from trireme.place.machine_types import MachineType
    from trireme.place.measurements import Measurements

SUMMARY = "choose which kind of machine computes which part of a model, and how many of each"
TIMEOUT_S = 900.0
RATE_MAX = 1e15
EXAMPLES = """
examples:
  trireme place train.py --throughput 1e6 --types types.yaml
      measure the script as each type of machine would run it, here, and print the cheapest
      placement that trains a million examples per second
  trireme place train.py --types types.yaml --type gpu --measure gpu.json
      measure one type, on a machine of that type, for another one to choose
  trireme place --throughput 1e6 --types types.yaml --from cpu.json,gpu.json
      choose with what was measured elsewhere; this needs neither the script nor its data
  trireme place train.py --throughput 1e6 --types types.yaml --args="part-0 8"
      give the script arguments

types.yaml:
  types:
    cpu:
      cores: 16        # of one worker: torch and Trireme use this many threads
      price: 0.8       # of one worker per hour, in any currency
      network: 1.25e9  # bytes per second of one worker
      reads: true      # can read the data; default: false
      limit: 40        # workers available; default: any number
    gpu:
      cores: 8
      device: gpu      # where it computes the model: cpu (default) or gpu
      price: 3.2
      network: 3e9
      label: gpu       # of its compute workers; default: the name of the type

The script runs in a process of its own, with the tables in it, until it calls Trainer.fit or
Trainer.evaluate: batches of the dataset are then read and trained on to measure, and the script
ends. A model has the stages "read" (read, plan, pull and push: what the workers do themselves) and
"model", or those of its tr.Stages. Nothing is started: the command prints how to.
"""


def add_to(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("script", nargs="?", type=Path, metavar="SCRIPT", help="Python file that trains the model")
    add("--throughput", type=rate, metavar="N", help="examples per second to reach, such as 1e6")
    add("--types", type=Path, required=True, metavar="FILE", help="YAML file of machine types")
    add("--measure", type=Path, metavar="FILE", help="only measure --type here, and write FILE")
    add("--type", metavar="NAME", help="the type of this machine, with --measure")
    add("--from", dest="files", metavar="FILE,...", help="files that --measure wrote, one per type")
    add("--args", default="", metavar="TEXT", help="arguments of the script, as in a shell")
    add(
        "--timeout_s",
        type=seconds,
        metavar="S",
        help=f"seconds that measuring the script on one type may take; default: {TIMEOUT_S:g}",
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    _check_options(arguments)
    from trireme.place.machine_types import read_types, type_named  # loads yaml

    types = read_types(arguments.types)
    if arguments.measure is not None:
        from trireme.place.report import of_measurements

        measured = _measure(arguments, type_named(types, arguments.type, arguments.types))
        measured.write(arguments.measure)
        write_lines(of_measurements(measured))
        return 0
    from trireme.place.measurements import Measurements
    from trireme.place.report import of_plan

    if arguments.files is None:
        all_measured = [_measure(arguments, kind) for kind in types]
    else:
        all_measured = [Measurements.load(Path(file)) for file in arguments.files.split(",")]
    script = [] if arguments.script is None else [str(arguments.script), *_words(arguments)]
    lines = list(of_plan(types, all_measured, arguments.throughput, script))
    write_lines(lines)
    return 0


def _check_options(arguments: argparse.Namespace) -> None:
    """Raises BadRequest: an option is missing, or would have no effect."""
    measures = arguments.measure is not None
    needed = {
        "--type": (measures, "with --measure", arguments.type),
        "--throughput": (not measures, "without --measure", arguments.throughput),
        "SCRIPT": (arguments.files is None, "to measure", arguments.script),
    }
    for name, (is_needed, when, value) in needed.items():
        if is_needed and value is None:
            raise BadRequest(f"place: expected {name} {when}, found none")
    useless = {
        "--type": (not measures, "without --measure", arguments.type),
        "--throughput": (measures, "with --measure", arguments.throughput),
        "--from": (measures, "with --measure", arguments.files),
        "--timeout_s": (arguments.files is not None, "with --from", arguments.timeout_s),
        "--args": (arguments.script is None, "without SCRIPT", arguments.args or None),
    }
    for name, (is_useless, when, value) in useless.items():
        if is_useless and value is not None:
            raise BadRequest(f"place: expected no {name} {when}, found {value}")


def _measure(arguments: argparse.Namespace, kind: MachineType) -> Measurements:
    from trireme.place.script_measuring import measure_script

    timeout_s = arguments.timeout_s or TIMEOUT_S
    return measure_script(arguments.script, _words(arguments), kind, timeout_s=timeout_s)


def _words(arguments: argparse.Namespace) -> list[str]:
    try:
        return shlex.split(arguments.args)
    except ValueError as error:
        raise BadRequest(
            f"place: expected --args as in a shell, found {arguments.args!r}: {error}"
        ) from error


def rate(text: str) -> float:
    """A number > 0, of examples per second."""
    value = number(text)
    if not 0 < value <= RATE_MAX:
        raise argparse.ArgumentTypeError(
            f"expected examples per second in (0, {RATE_MAX:g}], found {text!r}"
        )
    return value
