"""The command `trireme predict`."""

import argparse
from pathlib import Path

from trireme.commands.options import picked

SUMMARY = "apply an exported model to files"
EXAMPLES = """
examples:
  trireme predict -m export/1 --format parquet --input part-*.parquet --output scores.parquet
      a row per example: ins_id if --ins_id names a column, and each output of the model
  trireme predict -m export/1 --format csv --ins_id id --input a.csv b.csv --output scores.tsv
      a line per example: ins_id, then the outputs
  trireme predict -m export/1 --format multislot --fields ins_id,label:click,sparse:2,dense:3:13 \\
      --input day=0.txt --output scores.tsv
      text without names: the fields of a line, in order

DIR was written by Trainer.save_inference_model; nothing else is needed. Outputs are what the model
returns: logits stay logits. --fields lists kind:name with commas; kinds are label, weight, show,
ins_id, content, sparse, hashed (strings) and dense:name:dim. Keys without a row are counted, and
answered as in training. Exit code 2: a wrong call or wrong data.
"""


def add_to(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("-m", "--model", type=Path, required=True, metavar="DIR", help="folder of the export")
    add("--input", nargs="+", required=True, metavar="FILE", help="files, patterns or locations")
    add(
        "--output",
        required=True,
        metavar="FILE",
        help="new file: .parquet, or else text",
    )
    add(
        "--format",
        required=True,
        choices=("criteo", "csv", "libsvm", "multislot", "parquet"),
        help="of the input; parquet includes Arrow IPC, by the files' endings",
    )
    add("--fields", metavar="LIST", help="fields of the files; default: those that the model reads")
    add("--ins_id", metavar="NAME", help="column with the names of examples, without --fields")
    add("--delimiter", default=",", metavar="C", help="between cells of csv; default: a comma")
    add("--list_separator", metavar="C", help="between the ids or numbers of a cell of csv")
    add("--no_header", action="store_true", help="csv without a first line of names")
    add("--batch_size", type=int, default=4096, metavar="N", help="examples at a time")
    add("--threads", type=int, default=0, metavar="N", help="default: one per core")
    command.set_defaults(run=_predict)


def _predict(arguments: argparse.Namespace) -> int:
    from trireme.run.file_schema import FileOptions  # loads torch
    from trireme.run.predict import predict

    options = FileOptions(has_header=not arguments.no_header, **picked(arguments, FileOptions))
    predict(
        arguments.model,
        arguments.input,
        arguments.output,
        options,
        batch_size=arguments.batch_size,
        threads=arguments.threads,
    )
    return 0
