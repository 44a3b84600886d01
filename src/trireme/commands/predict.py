"""The command `trireme predict`."""

import argparse
from pathlib import Path

from trireme.commands.options import picked

SUMMARY = "apply an exported model to files"
EXAMPLES = """
examples:
  trireme predict -m export/1 --format parquet --input part-*.parquet --output scores.parquet
      write a row per example: each output of the model, after ins_id if --ins_id names a column
  trireme predict -m export/1 --format csv --ins_id id --input a.csv b.csv --output scores.tsv
      write a line of text per example: ins_id, then the outputs
  trireme predict -m export/1 --format multislot --fields ins_id,label:click,sparse:2,dense:3:13 \\
      --input day=0.txt --output scores.tsv
      read text without names: --fields lists the fields of a line in order

DIR is a folder that trireme.inference.export.export_model wrote; nothing else is needed. The
outputs are what the model returns: logits stay logits. --fields is a list of kind:name, separated
by commas. Kinds are label, weight, show, ins_id, content, sparse, hashed (strings), dense:name:dim,
and of csv dense:name:a+b+c, of the columns a, b and c. Keys without a row are counted and looked up
as in training. Exit code 2 means a wrong call or wrong data.
"""


def add_to(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("-m", "--model", type=Path, required=True, metavar="DIR", help="folder of the export")
    add("--input", nargs="+", required=True, metavar="FILE", help="files, patterns or locations")
    add("--output", required=True, metavar="FILE", help="new file: .parquet, otherwise text")
    add(
        "--format",
        required=True,
        choices=("criteo", "csv", "libsvm", "multislot", "parquet"),
        help="format of the input; parquet includes Arrow files, by their endings",
    )
    add("--fields", metavar="LIST", help="fields of the files; default: those that the model reads")
    add("--ins_id", metavar="NAME", help="column with the names of the examples; without --fields")
    add("--delimiter", default=",", metavar="C", help="delimiter of csv; default: a comma")
    add("--list_separator", metavar="C", help="delimiter within a cell of csv")
    add("--no_header", action="store_true", help="the csv files have no first line of names")
    add("--batch_size", type=int, default=4096, metavar="N", help="examples per batch")
    add("--threads", type=int, default=0, metavar="N", help="threads; default: one per core")
    add(
        "--use_onednn",
        action="store_true",
        help="products of linear layers by oneDNN: faster where `trireme doctor` says so",
    )
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
        use_onednn=arguments.use_onednn,
    )
    return 0
