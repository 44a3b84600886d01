"""The command `trireme convert`."""

import argparse

from trireme.commands.options import add_config, picked
from trireme.errors import BadRequest

SUMMARY = "convert between checkpoints, Fleet's folders and Parquet"
EXAMPLES = """
examples:
  trireme convert fleet_model/20260101 model/0 --to checkpoint -m config.yaml
      convert what Fleet's save_persistables wrote to a checkpoint of the model of config.yaml,
      including the dense part if it consists of linear layers
  trireme convert model/0 fleet_model/20260102 --to fleet -m config.yaml --shard_num 10
      convert it back to a folder for Fleet's load_model with shard_num 10
  trireme convert model/0 tables --to parquet
      write a checkpoint's tables as Parquet, for pyarrow, polars or DuckDB; no -m is needed
  trireme convert fleet_model/20260101 tables --to parquet \\
      --table embedding --dim 9 --rule SparseAdaGradSGDRule
      convert Fleet's rows without a model; dim counts the head and the tail of a row
  trireme convert vectors.parquet model/0 --to checkpoint -m config.yaml
      import rows of another system: columns key and weights; other columns are optional

SOURCE is a checkpoint if it contains a manifest, and a folder of Fleet if it contains 000/part-*.
TARGET must not exist. The tables must fit in the memory of this process. docs/interchange.md
describes the formats.
"""


def add_to(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("source", metavar="SOURCE", help="a checkpoint, a folder of Fleet, or Parquet files")
    add("target", metavar="TARGET", help="a new folder")
    add("--to", required=True, choices=("checkpoint", "fleet", "parquet"), help="TARGET's format")
    add_config(command, purpose="which describes the model: its tables and its dense part")
    add("--table", metavar="NAME", help="name of the table of the Parquet files or Fleet's rows")
    add("--dim", type=int, metavar="D", help="without -m: weights of a row, head and tail")
    add("--rule", metavar="RULE", help="without -m: Fleet's name of the update rule")
    add("--accessor", metavar="NAME", help="Fleet's order of fields; default: the policy's")
    add(
        "--tables",
        type=_table_numbers,
        metavar="NAME=N,...",
        help="Fleet's number of each table; default: 0, for a single table",
    )
    add("--time", type=int, default=0, metavar="S", help="data time of the save in seconds")
    add("--dense_steps", type=int, default=0, metavar="N", help="steps of Fleet's dense optimizer")
    add("--shard_num", type=int, default=1000, metavar="N", help="Fleet's shards; default: 1000")
    add("--gzip", action="store_true", help="compress the files for Fleet")
    add("--state", action="store_true", help="to Parquet: also write the state of the update rules")
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
    parts = [part.partition("=") for part in text.split(",")]
    numbers = {name: int(number) for name, _, number in parts if number.isdecimal()}
    if len(numbers) < len(parts):
        raise argparse.ArgumentTypeError(f"expected NAME=N,..., each name once, found {text!r}")
    return numbers
