"""The command `trireme inspect`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trireme.commands.options import write_lines
from trireme.errors import BadRequest

if TYPE_CHECKING:
    from trireme.inspect.saved_model import SavedModel
    from trireme.inspect.wanted import Wanted

SUMMARY = "show what a checkpoint or an export contains"
EXAMPLES = """
examples:
  trireme inspect ckpt/7
      show tables, rows and bytes, statistics of weights and state, a histogram of scores
  trireme inspect s3://models/ckpt/7 --brief
      show only the manifest; this is fast for any size
  trireme inspect ckpt/7 --table ctr --key 42 --key -1
      show the rows of two keys; -1 is 18446744073709551615, as in int64 tensors
  trireme inspect ckpt/7 --key movie=50 --key movie=Heat --key "movie='50'"
      show the rows of values of a feature, as training took them: 50 is a number, '50' a string
  trireme inspect ckpt/7 --diff ckpt/6
      show the rows added, removed and changed since ckpt/6, and how far their weights moved

Files are read piece by piece, so memory stays bounded. Quantiles are approximate: up to 1/128
smaller in magnitude. Checksums are not compared; `trireme verify PATH` does that.
"""


def add_to(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "path",
        metavar="PATH",
        help="folder of a checkpoint or an export; a checkpoint may also be at s3://B/KEY",
    )
    add("--table", action="append", metavar="NAME", help="show only this table; may be repeated")
    add(
        "--key",
        action="append",
        type=_key,
        metavar="K",
        help="show this row: a key, or FEATURE=VALUE; may be repeated",
    )
    add("--diff", metavar="OTHER", help="compare with this older checkpoint")
    add("--brief", action="store_true", help="read only the manifest")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from trireme.inspect import report
    from trireme.inspect.open_saved import open_saved

    chosen = [bool(arguments.key), arguments.diff is not None, arguments.brief]
    if sum(chosen) > 1:
        raise BadRequest("inspect: expected one of --key, --diff and --brief, found several")
    source = open_saved(arguments.path)
    _choose(source, arguments.table)
    if arguments.key:
        _check_features(source, arguments.key)
        for table in source.tables.values():
            write_lines(report.rows_of_keys(table, arguments.key))
    elif arguments.diff is not None:
        old = open_saved(arguments.diff)
        _choose(old, arguments.table)
        write_lines(_difference(old, source))
    else:
        write_lines(report.overview(source))
        for table in () if arguments.brief else source.tables.values():
            with _progress(table.num_rows * (1 if table.policy is None else 2)) as watch:
                lines = list(report.table_values(table, watch))
            write_lines(["", *lines])
    return 0


def _difference(old: SavedModel, new: SavedModel) -> Iterator[str]:
    from trireme.inspect import report
    from trireme.inspect.difference import compare

    total = sum(table.num_rows for source in (old, new) for table in source.tables.values())
    with _progress(total) as watch:
        difference = compare(old, new, watch)
    return report.difference_lines(difference, old, new)


def _choose(source: SavedModel, names: list[str] | None) -> None:
    """Keep only these tables of a source."""
    for name in names or ():
        if name not in source.tables:
            raise BadRequest(
                f"inspect: expected --table to be one of {', '.join(source.tables)} of"
                f" {source.path}, found {name!r}"
            )
    if names:
        source.tables = {name: source.tables[name] for name in names}


def _check_features(source: SavedModel, wanted: list[Wanted]) -> None:
    """Raises BadRequest: no table has a feature, where they are all known."""
    tables = source.tables.values()
    features = {feature for table in tables for feature in table.features}
    if not all(table.has_all_features for table in tables):
        return
    for one in wanted:
        if not isinstance(one, int) and one[0] not in features:
            raise BadRequest(
                f"inspect: expected --key with one of the features {', '.join(sorted(features))},"
                f" found {one[0]!r}"
            )


def _key(text: str) -> Wanted:
    from trireme.inspect.wanted import wanted_row

    try:
        return wanted_row(text)
    except BadRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar of rows read, on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("reading rows", total=total)
        yield lambda num_rows: bar.advance(task, num_rows)
