"""Script for tests of dumps: dumps an untrained model's outputs for `count` examples to PATH."""

from __future__ import annotations

import argparse
import json
import resource
import sys
from pathlib import Path

import torch

import trireme as tr

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.integration.planted_model import Linear, Named, bce

FIELDS = ("output", "label", "a")


def untrained() -> Linear:
    """Rows that differ by key, the same in every process."""
    model = Linear(initializer=tr.initializer.Normal(std=1.0))
    torch.nn.init.constant_(model.bias, 0.1)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("count", type=int)
    parser.add_argument("--file_bytes_max", type=int, default=resource.RLIM_INFINITY)
    arguments = parser.parse_args()
    tr.init()
    resource.setrlimit(resource.RLIMIT_FSIZE, (arguments.file_bytes_max,) * 2)
    model = untrained()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = tr.Trainer(model, sgd, loss=bce, metrics=[tr.metrics.AUC()], progress=False)
    dump = tr.Dump(path=arguments.path, fields=FIELDS, params=["bias"])
    figures = trainer.evaluate(Named(arguments.count), dump=dump)
    print(f"figures {json.dumps(figures)}", flush=True)


if __name__ == "__main__":
    main()
