"""The command `trireme stream`."""

import argparse

from trireme.commands.options import add_config
from trireme.commands.run import checked_config

SUMMARY = "train on days of data as they arrive"
EXAMPLES = """
examples:
  trireme stream -m config_online.yaml
      train on the folders runner.train_data_dir/DAY/HHMM, pass by pass, from start_day to end_day
  trireme launch --server_num 1 --worker_num 2 --stream -m config_online.yaml
      train as a job of several processes
  trireme stream -m config_online.yaml -o runner.end_day=20190721
      stop after this day; the next call continues after the newest checkpoint

A day is divided into passes of split_interval * split_per_pass minutes. For each pass the command
waits until its data is complete (data_donefile), evaluates the model on it, then trains on it.
In runner.model_save_path it writes a checkpoint after every checkpoint_per_pass passes, a delta for
inference after every save_delta_frequency passes, and a base for inference at the end of a day.
Done-files list all of them. docs/online.md explains the keys.
"""


def add_to(command: argparse.ArgumentParser) -> None:
    add_config(command, required=True)
    command.set_defaults(run=_stream)


def _stream(arguments: argparse.Namespace) -> int:
    config, settings = checked_config(arguments, is_online=True)
    from trireme.run.server_role import has_served  # loads torch

    if not has_served(settings):
        from trireme.run.stream import stream  # and what trains

        stream(config)
    return 0
