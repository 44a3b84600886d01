"""CTR-DNN on Criteo's TSV: train, evaluate and save, or load a checkpoint and evaluate.

trireme launch --server_num 2 --worker_num 2 examples/ctr_dnn.py
    --train 'train/*.tsv' --test 'test/*.tsv'
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn

import trireme as tr
from trireme.models import CtrDnn


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", help="files to train on (a glob); default: only evaluate")
    parser.add_argument("--test", required=True, help="held-out files (a glob)")
    parser.add_argument("--load", help="checkpoint to start from")
    parser.add_argument("--save", help="where to write the checkpoint")
    parser.add_argument("--result", type=Path, help="where worker 0 writes its figures as JSON")
    parser.add_argument("--mode", default="async", choices=("sync", "async"))
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3, help="rate of the dense layers (Adam)")
    parser.add_argument("--rows_lr", type=float, default=0.1, help="rate of the rows (Adagrad)")
    return parser.parse_args()


def dataset(files: str, batch_size: int) -> tr.data.QueueDataset:
    return tr.data.QueueDataset(files, schema=tr.data.criteo(), batch_size=batch_size)


def main() -> None:
    arguments = parse_arguments()
    cluster = tr.init()
    torch.manual_seed(1)
    rule = tr.optim.Adagrad(lr=arguments.rows_lr, initial_accumulator_value=0.01)
    model = CtrDnn(tr.Table("embedding", dim=9, optimizer=rule))
    trainer = tr.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=arguments.lr),
        strategy=tr.Strategy(arguments.mode),
        loss=nn.functional.binary_cross_entropy_with_logits,
        metrics=[tr.metrics.AUC()],
    )
    figures: dict[str, object] = {"workers": cluster.num_workers, "mode": arguments.mode}
    if arguments.load:
        trainer.load(arguments.load)
    if arguments.train:
        train = dataset(arguments.train, arguments.batch_size)
        figures["train"] = trainer.fit(train, epochs=arguments.epochs)
    figures["test"] = trainer.evaluate(dataset(arguments.test, arguments.batch_size))
    if arguments.save:
        trainer.save(arguments.save)
    if arguments.result and cluster.worker == 0:
        arguments.result.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
