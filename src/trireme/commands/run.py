"""The command `trireme run`."""

import argparse

from trireme.commands.options import add_config, add_infer

SUMMARY = "train or evaluate a model that a YAML file describes"
EXAMPLES = """
examples:
  trireme run -m config.yaml
      train in this process, save every epoch below runner.model_save_path
  trireme run -m config.yaml -o runner.epochs=1 hyper_parameters.optimizer.learning_rate=5e-4
      the same with other values
  trireme run --infer -m config.yaml -o runner.infer_start_epoch=2 runner.infer_end_epoch=3
      evaluate saved epochs 2 (included) to 3 (not included) on runner.test_data_dir
  trireme launch --server_num 1 --worker_num 2 -m config.yaml
      the same as a job of several processes

The model is `-o model=NAME`, else runner.model_path, else model.py beside the file: a Python file
with a function create(config) -> trireme.Recipe, or a name of trireme.models. Paths of data and
models start at the folder of the file, those in runner.pipe_command at the working directory.
A key that nothing reads is a warning; a feature that does not exist yet is an error.

The environment states the role of this process, as for a script: alone, worker or server of a job.
docs/paddlerec.md lists the keys.
"""


def add_to(command: argparse.ArgumentParser) -> None:
    add_config(command, required=True)
    add_infer(command)
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from trireme.config import Config
    from trireme.run.runner import run  # loads torch

    run(Config.load(arguments.config_yaml, arguments.opt), infer=arguments.infer)
    return 0
