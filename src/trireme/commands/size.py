"""The command `trireme size`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

from trireme import _core, optim, policy
from trireme.commands.options import add_config
from trireme.config import Config
from trireme.drawing import size
from trireme.errors import BadRequest
from trireme.table import Table

SUMMARY = "estimate memory and disk of tables"
EXAMPLES = """
examples:
  trireme size --keys 1e9 --dim 16 --optimizer adagrad
      memory and disk of a table with a thousand million rows, on one server
  trireme size --keys 1e9 --dim 9 --optimizer fleet_adam --policy CtrCommonAccessor --server_num 8
      with Fleet's rule and accessor, and what each of eight servers needs
  trireme size --keys 2e8 --dim 16 --count_filter 10 --pending_keys 1e9
      keys get a row at their tenth occurrence; a thousand million more are being counted
  trireme size --keys 1e9 --dims 32=5 8=95
      features of several dims: so many per cent of the rows have each
  trireme size -m config.yaml --keys 1e8 -o hyper_parameters.sparse_feature_dim=32
      the tables of a configuration's model, with so many rows each

Rows of this version live in memory. There is no tier on SSD and none in GPU memory yet.
"""

OPTIMIZERS: dict[str, Callable[[], optim.Rule]] = {
    "adagrad": lambda: optim.Adagrad(),
    "adagrad_shared": lambda: optim.Adagrad(shared=True),
    "adam": lambda: optim.Adam(),
    "adam_shared": lambda: optim.Adam(shared=True),
    "fleet_adagrad": lambda: optim.FleetAdagrad(),
    "fleet_adagrad_v2": lambda: optim.FleetAdagradV2(),
    "fleet_adam": lambda: optim.FleetAdam(),
    "fleet_sgd": lambda: optim.FleetSGD(),
    "fleet_shared_adam": lambda: optim.FleetSharedAdam(),
    "fleet_std_adagrad": lambda: optim.FleetAdagrad(shared=False),
    "ftrl": lambda: optim.FTRL(),
    "momentum": lambda: optim.SGD(lr=0.1, momentum=0.9),
    "sgd": lambda: optim.SGD(lr=0.1),
}
POLICIES: dict[str, Callable[[], policy.Policy]] = {
    "CtrCommonAccessor": policy.CtrCommonAccessor,
    "CtrDoubleAccessor": policy.CtrDoubleAccessor,
    "SparseAccessor": policy.SparseAccessor,
    "plain": policy.Policy,
    "score": policy.ScorePolicy,
}


def add_to(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--keys", type=count, required=True, metavar="N", help="rows of the table; 1e9 is fine")
    add("--dim", type=int, metavar="D", help="weights of a row")
    add(
        "--dims",
        nargs="+",
        type=dim_and_share,
        metavar="D=P",
        help="in its place, where features have dims of their own: how many per cent of the rows"
        " have D weights",
    )
    add(
        "--optimizer",
        choices=sorted(OPTIMIZERS),
        metavar="RULE",
        help=f"update rule; default: adagrad; one of {', '.join(sorted(OPTIMIZERS))}",
    )
    add(
        "--policy",
        choices=sorted(POLICIES),
        metavar="NAME",
        help=f"what rows remember; default: plain; one of {', '.join(sorted(POLICIES))}",
    )
    add("--dtype", metavar="TYPE", help="of weights: float32 (default), bfloat16 or float16")
    add("--heads", type=percent, metavar="P", help="per cent of the rows with a head alone")
    add("--count_filter", type=count, metavar="N", help="admission at N occurrences")
    add("--sketch_bytes", type=count, metavar="B", help="count them in so many bytes")
    add("--pending_keys", type=count, default=0, metavar="N", help="keys that wait to be admitted")
    add("--server_num", type=int, default=1, metavar="N", help="number of servers; default: 1")
    add("--worker_num", type=int, default=1, metavar="N", help="number of workers; default: 1")
    add("--delta", type=percent, default=0.01, metavar="P", help="changed rows in per cent")
    add_config(command, purpose="for the tables of its model")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from trireme.size.estimate import ServerEstimate  # imports torch, slow for a wrong command
    from trireme.size.report import table_lines

    if arguments.server_num < 1 or arguments.worker_num < 1:
        raise BadRequest(
            "size: expected --server_num and --worker_num >= 1,"
            f" found {arguments.server_num} and {arguments.worker_num}"
        )
    tables = _tables(arguments)
    if arguments.heads and all(table.schema.head_class is None for table in tables):
        raise BadRequest(
            "size: expected --heads with a policy whose rows begin as a head alone, such as"
            f" SparseAccessor, found policy {tables[0].schema.policy['name']}"
        )
    needs = [
        ServerEstimate.on_one_of(
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
        for line in table_lines(need, arguments.keys, arguments.server_num, arguments.delta):
            sys.stdout.write(line + "\n")
        sys.stdout.write("\n")
    if len(needs) > 1:
        memory = size(sum(need.memory for need in needs))
        disk = size(sum(need.checkpoint for need in needs) * arguments.server_num)
        sys.stdout.write(
            f"{len(needs)} tables: {memory} of memory on each server,"
            f" {disk} of disk for a full checkpoint\n"
        )
    return 0


def _tables(arguments: argparse.Namespace) -> list[Table]:
    """Those of the configuration's model, or the one that the options describe."""
    described = ("dim", "dims", "optimizer", "policy", "dtype", "count_filter", "sketch_bytes")
    given = [f"--{name}" for name in described if getattr(arguments, name) is not None]
    if arguments.config_yaml is not None:
        if given:
            raise BadRequest(
                f"size: expected -m or a table's options, found -m {arguments.config_yaml} and"
                f" {', '.join(given)}"
            )
        return _tables_of_model(arguments.config_yaml, arguments.opt)
    if arguments.dim is None and arguments.dims is None:
        raise BadRequest("size: expected --dim D or -m config.yaml, found neither")
    if not math.isclose(sum(share for _, share in arguments.dims or [(0, 1.0)]), 1.0):
        shares = {dim: f"{100 * share:g} %" for dim, share in arguments.dims}
        raise BadRequest(f"size: expected --dims with 100 per cent in all, found {shares}")
    if len({dim for dim, _ in arguments.dims or ()}) < len(arguments.dims or ()):
        raise BadRequest(f"size: expected each dim once, found {arguments.dims}")
    if arguments.opt:
        raise BadRequest("size: expected -o with -m config.yaml, found it without")
    admit = None
    if arguments.count_filter is not None:
        admit = policy.CountFilter(arguments.count_filter, sketch_bytes=arguments.sketch_bytes)
    elif arguments.sketch_bytes is not None or arguments.pending_keys:
        raise BadRequest(
            "size: expected --sketch_bytes and --pending_keys with --count_filter N, found none"
        )
    table = Table(
        "table",
        dim=arguments.dim,
        dims=None if arguments.dims is None else {str(dim): dim for dim, _ in arguments.dims},
        salt=arguments.dims is not None,
        optimizer=OPTIMIZERS[arguments.optimizer or "adagrad"](),
        policy=POLICIES[arguments.policy or "plain"](),
        admit=admit,
        dtype=arguments.dtype or "float32",
    )
    return [table]


def _tables_of_model(path: Path, overrides: list[str]) -> list[Table]:
    from trireme.nn import Planner
    from trireme.run.model import create_recipe
    from trireme.run.settings import Settings

    config = Config.load(path, overrides)
    model = create_recipe(config, Settings.read(config)).model
    return list(Planner(model, pool=_core.Pool(1)).tables)


def count(text: str) -> int:
    """A whole number, in any form: 1000000, 1e6, 1_000_000."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 <= value < 2**63 and value == int(value)):
        raise argparse.ArgumentTypeError(f"expected a whole number >= 0, found {text!r}")
    return int(value)


def dim_and_share(text: str) -> tuple[int, float]:
    """D=P: weights of a row, and a share of the rows in per cent."""
    dim, mark, share = text.partition("=")
    if not mark or not dim.isdecimal():
        raise argparse.ArgumentTypeError(f"expected D=P, as in 16=90, found {text!r}")
    return int(dim), percent(share)


def percent(text: str) -> float:
    """A share of 1, given in per cent."""
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"expected 0 to 100 per cent, found {text!r}")
    return value / 100
