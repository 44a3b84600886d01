"""The command `trireme verify`."""

import argparse
import sys

SUMMARY = "check that checkpoints are complete and undamaged"
EXAMPLES = """
examples:
  trireme verify ckpt/7
      read every file of a checkpoint, compare checksums, lengths and the places of keys
  trireme verify ckpt s3://models/ctr
      all checkpoints and exports in these folders, and in folders of days
  trireme verify export/1 && cp -r export/1 /srv/model
      an export for inference, before it is used

Prints a line for each: its contents, or what differs and in which file. Needs no server and loads
no rows. Exit code 1: something is damaged; 2: nothing to verify at a path.
"""


def add_to(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a checkpoint, an export, or a folder of them; of checkpoints also s3://B/KEY",
    )
    add("--quiet", action="store_true", help="print only problems, and no progress")
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
