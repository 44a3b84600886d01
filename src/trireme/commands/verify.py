"""The command `trireme verify`."""

import argparse
import sys

SUMMARY = "check that checkpoints are complete and undamaged"
EXAMPLES = """
examples:
  trireme verify ckpt/7
      read every file of a checkpoint; compare checksums, lengths and the places of keys
  trireme verify ckpt s3://models/ctr
      verify all checkpoints and exports in these folders, and in their folders of days
  trireme verify export/1 && cp -r export/1 /srv/model
      verify an export for inference before it is used

The command prints a line for each checkpoint or export: its contents, or what differs and in which
file. It needs no server and loads no rows. Exit code 1 means that something is damaged, 2 that a
path has nothing to verify.
"""


def add_to(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a checkpoint, an export, or a folder of them; checkpoints may also be at s3://B/KEY",
    )
    add("--quiet", action="store_true", help="print only problems, without progress")
    command.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    from trireme.run.verify import verify_all  # loads torch

    is_damaged = False
    for verdict in verify_all(arguments.paths, shows=not arguments.quiet):
        is_damaged |= bool(verdict.problems)
        lines = verdict.problems or (() if arguments.quiet else (verdict.summary,))
        for line in lines:
            sys.stdout.write(f"{verdict.name}: {line}\n")
        sys.stdout.flush()
    return 1 if is_damaged else 0
