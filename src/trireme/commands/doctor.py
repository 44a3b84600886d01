"""The command `trireme doctor`."""

import argparse
import sys

SUMMARY = "report what this machine offers to a job, and what would prevent one"
EXAMPLES = """
examples:
  trireme doctor
      look at Python, torch, the core, processors, memory, GPUs, network, limits, disk and the
      environment
  docker run IMAGE trireme doctor
      see what a container leaves of the machine
  trireme doctor --json
      print the same for programs

A line begins with ok, note (a job runs, but slower or not in every mode) or problem (a job does
not run); an arrow points to what to do. Exit code 1 means that there is a problem. The command
changes nothing and measures no speed.
"""


def add_to(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    command.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from trireme.doctor import report  # imports whatever it examines

    sections = report.examine()
    sys.stdout.write(report.as_json(sections) if arguments.json else report.as_text(sections))
    return 1 if report.num_of(sections, "problem") else 0
