"""The command line of `trireme stream`."""

from __future__ import annotations

import argparse

from trireme.commands.options import add_config
from trireme.config import Config

SUMMARY = "train on days of data as they come"
EXAMPLES = """
examples:
  trireme stream -m config_online.yaml
      train on runner.train_data_dir/DAY/HHMM, pass by pass, from start_day to end_day
  trireme launch --server_num 1 --worker_num 2 --stream -m config_online.yaml
      the same as a job of several processes
  trireme stream -m config_online.yaml -o runner.end_day=20190721
      the same for fewer days; called again, it goes on behind the newest checkpoint

A day has passes of split_interval * split_per_pass minutes. Each is waited for (data_donefile),
evaluated, trained on; behind every checkpoint_per_pass of them a checkpoint is written below
runner.model_save_path, behind every save_delta_frequency a delta for inference, and at the end of
a day a base, all listed in done-files. docs/online.md explains the keys.
"""


def add_to(command: argparse.ArgumentParser) -> None:
    add_config(command, required=True)
    command.set_defaults(run=_stream)


def _stream(arguments: argparse.Namespace) -> int:
    from trireme.run.stream import stream  # brings torch, which a wrong command can do without

    stream(Config.load(arguments.config_yaml, arguments.opt))
    return 0
