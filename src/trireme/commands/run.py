"""The command `trireme run`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from trireme.commands.options import add_config, add_infer

if TYPE_CHECKING:
    from trireme.config import Config
    from trireme.run.settings import Settings

SUMMARY = "train or evaluate a model that a YAML file describes"
EXAMPLES = """
examples:
  trireme run -m config.yaml
      train in this process; save every epoch in runner.model_save_path
  trireme run -m config.yaml -o runner.epochs=1 hyper_parameters.optimizer.learning_rate=5e-4
      override two values of the file
  trireme run --infer -m config.yaml -o runner.infer_start_epoch=2 runner.infer_end_epoch=3
      evaluate the saved epochs from 2 up to, but not including, 3 on runner.test_data_dir
  trireme launch --server_num 1 --worker_num 2 -m config.yaml
      train as a job of several processes

The model is that of `-o model=NAME`, otherwise of runner.model_path, otherwise model.py in the
folder of the YAML file. It is a name of trireme.models, or a Python file with a function
create(config) that returns a trireme.Recipe. Relative paths of data and models start at the folder
of the YAML file, those in runner.pipe_command at the working directory. A key that nothing reads
gets a warning. A feature that does not exist yet is an error.

The environment defines the role of this process, as for a script: alone, or worker or server of a
job. docs/paddlerec.md lists the keys.
"""


def add_to(command: argparse.ArgumentParser) -> None:
    add_config(command, required=True)
    add_infer(command)
    command.set_defaults(run=_run)


def checked_config(
    arguments: argparse.Namespace, *, is_online: bool = False
) -> tuple[Config, Settings]:
    """The configuration and its settings, checked before torch is loaded. is_online: also those of
    `trireme stream`. Raises BadRequest.
    """
    from trireme.config import Config
    from trireme.run.model_source import model_source
    from trireme.run.online_settings import OnlineSettings
    from trireme.run.settings import Settings

    config = Config.load(arguments.config_yaml, arguments.opt)
    settings = Settings.read(config)
    model_source(config, settings)
    if is_online:
        OnlineSettings.read(config)
    return config, settings


def _run(arguments: argparse.Namespace) -> int:
    config, settings = checked_config(arguments)
    from trireme.run.server_role import has_served  # loads torch

    if not has_served(settings):
        from trireme.run.runner import run  # and what trains

        run(config, infer=arguments.infer)
    return 0
