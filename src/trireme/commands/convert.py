"""The command `trireme convert`."""

import argparse

from trireme.commands.options import add_config, picked
from trireme.errors import BadRequest

SUMMARY = "turn checkpoints, Fleet's folders and Parquet into one another"
EXAMPLES = """
examples:
  trireme convert fleet_model/20260101 model/0 --to checkpoint -m config.yaml
      the output of Fleet's save_persistables as a checkpoint of the model of config.yaml; the
      dense part, too, if it consists of linear layers
  trireme convert model/0 fleet_model/20260102 --to fleet -m config.yaml --shard_num 10
      and back: a folder for Fleet's load_model with shard_num 10
  trireme convert model/0 tables --to parquet
      a checkpoint's tables as Parquet, for pyarrow, polars, DuckDB; it describes them itself
  trireme convert fleet_model/20260101 tables --to parquet \\
      --table embedding --dim 9 --rule SparseAdaGradSGDRule
      rows of Fleet without a model; dim counts the head and the tail of a row
  trireme convert vectors.parquet model/0 --to checkpoint -m config.yaml
      rows of another system: columns key and weights, others optional

The kind of SOURCE is detected: a checkpoint has a manifest, a folder of Fleet 000/part-*. TARGET
must not exist. This process holds the tables in its memory. docs/interchange.md has the formats.
"""


def add_to(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("source", metavar="SOURCE", help="a checkpoint, a folder of Fleet, or Parquet files")
    add("target", metavar="TARGET", help="a new folder")
    add("--to", required=True, choices=("checkpoint", "fleet", "parquet"), help="TARGET's format")
    add_config(command, purpose="the model: its tables and its dense part")
    add("--table", metavar="NAME", help="the table of Parquet files or of Fleet's rows")
    add("--dim", type=int, metavar="D", help="without -m: floats of a row, head and tail")
    add("--rule", metavar="RULE", help="without -m: Fleet's name of the rows' rule")
    add("--accessor", metavar="NAME", help="Fleet's order of fields; default: that of the policy")
    add(
        "--tables",
        type=_table_numbers,
        metavar="NAME=N,...",
        help="Fleet's number of each table; default: the only one is 0",
    )
    add("--time", type=int, default=0, metavar="S", help="data time of the save in seconds")
    add("--dense_steps", type=int, default=0, metavar="N", help="steps of Fleet's dense optimizer")
    add(
        "--shard_num",
        type=int,
        default=1000,
        metavar="N",
        help="that of Fleet's table; default: 1000",
    )
    add("--gzip", action="store_true", help="compress files for Fleet")
    add("--state", action="store_true", help="to Parquet: also the state of the update rules")
    command.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    from trireme.config import Config
    from trireme.run.convert import Conversion, convert  # loads torch

    yaml = arguments.config_yaml
    if yaml is None and arguments.opt:
        raise BadRequest("convert: expected -o with -m config.yaml, found it alone")
    config = None if yaml is None else Config.load(yaml, arguments.opt)
    convert(Conversion(config=config, **picked(arguments, Conversion)))
    return 0


def _table_numbers(text: str) -> dict[str, int]:
    try:
        return {name: int(number) for name, number in (p.split("=") for p in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected NAME=N,..., found {text!r}") from None
