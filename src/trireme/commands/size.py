"""The command `trireme size`."""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING

from trireme.commands.options import add_config, number, picked
from trireme.errors import BadRequest, check_counts

if TYPE_CHECKING:
    from trireme.table import Table

SUMMARY = "estimate memory and disk of tables"
EXAMPLES = """
examples:
  trireme size --keys 1e9 --dim 16 --optimizer adagrad
      estimate a table with a billion rows on one server
  trireme size --keys 1e9 --dim 9 --optimizer fleet_adam --policy CtrCommonAccessor --server_num 8
      estimate one with Fleet's rule and accessor on eight servers
  trireme size --keys 2e8 --dim 16 --count_filter 10 --pending_keys 1e9
      count a billion more keys, which get a row at their tenth occurrence
  trireme size --keys 1e9 --dims 32=5 8=95
      estimate a table with features of dims 32 and 8, with 5 % and 95 % of the rows
  trireme size -m config.yaml --keys 1e8 -o hyper_parameters.sparse_feature_dim=32
      estimate the tables of a configuration's model, with this number of rows each
  trireme size --keys 1e10 --dim 16 --server_num 8 --memory 20GiB --evicted_rows 2e4
      estimate a table ten times its memory, with rows on SSD, and how long the disks last
"""


# The keys of OPTIMIZERS and POLICIES in trireme.size.tables, which loads torch.
OPTIMIZERS = (
    "adagrad",
    "adagrad_shared",
    "adam",
    "adam_shared",
    "fleet_adagrad",
    "fleet_adagrad_v2",
    "fleet_adam",
    "fleet_sgd",
    "fleet_shared_adam",
    "fleet_std_adagrad",
    "ftrl",
    "momentum",
    "sgd",
)
POLICIES = ["CtrCommonAccessor", "CtrDoubleAccessor", "SparseAccessor", "plain", "score"]


def add_to(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--keys", type=count, required=True, metavar="N", help="rows of the table, such as 1e9")
    add("--dim", type=int, metavar="D", help="weights of a row")
    add(
        "--dims",
        nargs="+",
        type=dim_and_share,
        metavar="D=P",
        help="instead of --dim, for several dims: P per cent of the rows have D weights",
    )
    rules, policies = ", ".join(OPTIMIZERS), ", ".join(POLICIES)
    add("--optimizer", metavar="RULE", help=f"update rule; default: adagrad; one of {rules}")
    add("--policy", metavar="NAME", help=f"policy of the rows; default: plain; one of {policies}")
    add("--dtype", metavar="TYPE", help="of weights: float32 (default), bfloat16 or float16")
    add("--heads", type=percent, metavar="P", help="per cent of the rows that have a head only")
    add("--count_filter", type=count, metavar="N", help="a key gets a row at its N-th occurrence")
    add("--sketch_bytes", type=count, metavar="B", help="count occurrences in a sketch of B bytes")
    add("--pending_keys", type=count, default=0, metavar="N", help="counted keys without a row")
    add("--server_num", type=int, default=1, metavar="N", help="number of servers; default: 1")
    add("--worker_num", type=int, default=1, metavar="N", help="number of workers; default: 1")
    add(
        "--delta",
        type=percent,
        default=0.01,
        metavar="P",
        help="per cent of the rows that a delta contains; default: 1",
    )
    add("--memory", metavar="B", help="of each server, such as 20GiB: the other rows are on SSD")
    add("--evicted_rows", type=positive, metavar="N", help="rows per second that a server writes")
    add(
        "--endurance",
        type=positive,
        metavar="TB",
        help="terabytes that a server's disks may be written (TBW); default: 1000",
    )
    add_config(command, purpose="whose model has the tables")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from trireme.byte_size import parse_bytes
    from trireme.drawing import size
    from trireme.size.estimate import Need
    from trireme.size.report import of_table
    from trireme.size.tier import IN_MEMORY, TierNeed, of_tier

    nums = {f"--{name}": getattr(arguments, name) for name in ("server_num", "worker_num")}
    check_counts("size", **nums)
    if arguments.evicted_rows and arguments.memory is None:
        raise BadRequest("size: expected --memory with --evicted_rows, found none")
    if arguments.endurance is not None and not arguments.evicted_rows:
        raise BadRequest("size: expected --evicted_rows with --endurance, found none")
    endurance_bytes = 1e12 * (1000 if arguments.endurance is None else arguments.endurance)
    memory = None if arguments.memory is None else parse_bytes("--memory", arguments.memory)
    tables = _tables(arguments)
    if arguments.pending_keys and all(table.schema.admission is None for table in tables):
        raise BadRequest(
            "size: expected --pending_keys with tables that count keys before they get a row, found"
            f" none in the model of {arguments.config_yaml}"
        )
    if arguments.heads and all(table.schema.head_class is None for table in tables):
        raise BadRequest(
            "size: expected --heads with a policy whose rows begin as a head only, such as"
            f" SparseAccessor, found policy {tables[0].schema.policy['name']}"
        )
    needs = [
        Need.on_one_of(
            arguments.server_num,
            table.schema,
            arguments.keys,
            num_pending=arguments.pending_keys,
            num_streams=arguments.worker_num,
            head_share=0.0 if table.schema.head_class is None else arguments.heads or 0.0,
            shares=tuple(share for _, share in arguments.dims or ()),
        )
        for table in tables
    ]
    for need in needs:
        lines = [*of_table(need, arguments.keys, arguments.server_num, arguments.delta)]
        if memory is None:
            lines.append(IN_MEMORY)
        else:
            tier = TierNeed(need, memory / len(needs))
            lines += of_tier(tier, arguments.evicted_rows, endurance_bytes)
        sys.stdout.write("\n".join([*lines, "", ""]))
    if len(needs) > 1:
        all_memory = size(sum(need.memory for need in needs))
        disk = size(sum(need.checkpoint for need in needs) * arguments.server_num)
        sys.stdout.write(
            f"{len(needs)} tables: {all_memory} of memory on each server,"
            f" {disk} of disk for a full checkpoint\n"
        )
    return 0


def _tables(arguments: argparse.Namespace) -> list[Table]:
    """The tables of the configuration's model, or the one that the options describe."""
    from trireme.size.tables import TableOptions, described_table, tables_of_model

    options = TableOptions(**picked(arguments, TableOptions))
    if arguments.config_yaml is None:
        if arguments.opt:
            raise BadRequest("size: expected -o with -m config.yaml, found it without")
        return [described_table(options, num_pending=arguments.pending_keys)]
    if flags := options.flags():
        raise BadRequest(
            f"size: expected -m or a table's options, found -m {arguments.config_yaml} and"
            f" {', '.join(flags)}"
        )
    return tables_of_model(arguments.config_yaml, arguments.opt)


def count(text: str) -> int:
    """A whole number as text: 1000000, 1e6, 1_000_000."""
    value = number(text)
    if not (0 <= value < 2**63 and value == int(value)):
        expected = "a whole number >= 0, such as 1e8"
        raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")
    return int(value)


def positive(text: str) -> float:
    if not 0 < number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number > 0, found {text!r}")
    return number(text)


def dim_and_share(text: str) -> tuple[int, float]:
    """D=P: weights of a row, and the per cent of the rows that have them."""
    dim, mark, share = text.partition("=")
    if not mark or not dim.isdecimal():
        raise argparse.ArgumentTypeError(f"expected D=P, as in 16=90, found {text!r}")
    return int(dim), percent(share)


def percent(text: str) -> float:
    """A share of 1, from text in per cent."""
    value = number(text.removesuffix("%"))
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"expected 0 to 100 per cent, found {text!r}")
    return value / 100
