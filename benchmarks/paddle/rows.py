"""The rows that Paddle's worker pulls, batch by batch, while its server trains them.

    python benchmarks/paddle/rows.py --data FILE --out ROWS.npz --rule adagrad

One server and one worker of Paddle 2.6.2, async, over the first batches of a MultiSlot file: a
label, then features of one id. Writes `rows`, what each batch pulled: (batches, batch, features,
dim). The dense part of the model is constant, so that only rows learn. Pushes are not merged, and
every batch waits until earlier pushes have been applied; otherwise their number would depend on
timing. Rows start at zero, because Paddle draws initial weights without a seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HIDDEN = 16
# Rule: Paddle's name, the group of its parameters, and a learning rate.
RULES = {
    "sgd": ("SparseNaiveSGDRule", "naive", 5e-4),
    "adagrad": ("SparseAdaGradSGDRule", "adagrad", 0.05),
    "std_adagrad": ("StdAdaGradSGDRule", "adagrad", 0.05),
    "adagrad_v2": ("SparseAdaGradV2SGDRule", "adagrad", 0.05),
    "adam": ("SparseAdamSGDRule", "adam", 1e-3),
    "shared_adam": ("SparseSharedAdamSGDRule", "adam", 1e-3),
}


@dataclass(frozen=True)
class Shape:
    """The part of the file to read: `batches` of `batch` examples with `features` ids; `dim` of
    rows.
    """

    batches: int = 100
    batch: int = 128
    features: int = 26
    dim: int = 9


def read(path: str | Path, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Labels (batches, batch, 1) and ids (batches, batch, features), both int64."""
    labels, ids = [], []
    with open(path) as lines:
        for line in itertools.islice(lines, shape.batches * shape.batch):
            words = line.split()
            labels.append(int(words[1]))
            ids.append([int(word) for word in words[3 : 3 + 2 * shape.features : 2]])
    size = (shape.batches, shape.batch, -1)
    return np.array(labels).reshape(size), np.array(ids, np.uint64).view(np.int64).reshape(size)


def constants(shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The dense part: logit = tanh(rows @ first + bias) @ last."""
    rng = np.random.default_rng(7)
    first = rng.standard_normal((shape.features * shape.dim, HIDDEN)) / 4
    bias = rng.standard_normal(HIDDEN) / 4
    last = rng.standard_normal((HIDDEN, 1))
    return first.astype(np.float32), bias.astype(np.float32), last.astype(np.float32)


def _table_configs(rule: str, dim: int) -> dict[str, object]:
    name, group, lr = RULES[rule]
    configs: dict[str, object] = {
        "table_class": "MemorySparseTable",
        "shard_num": 10,
        "accessor.accessor_class": "SparseAccessor",
        "accessor.fea_dim": dim + 2,
        "accessor.embedx_dim": dim - 1,
        "accessor.embedx_threshold": 0,
    }
    of_group = {
        "adagrad": {"initial_g2sum": 3.0},
        "adam": {"beta1_decay_rate": 0.9, "beta2_decay_rate": 0.999, "ada_epsilon": 1e-8},
    }
    rates = {"learning_rate": lr, "initial_range": 0.0, "weight_bounds": [-10.0, 10.0]}
    for part in ("embed_sgd_param", "embedx_sgd_param"):
        configs[f"accessor.{part}.name"] = name
        for key, value in {**rates, **of_group.get(group, {})}.items():
            configs[f"accessor.{part}.{group}.{key}"] = value
    return {f"table_parameters.embedding.{key}": value for key, value in configs.items()}


def _node(args: argparse.Namespace, shape: Shape) -> None:
    import paddle  # type: ignore[import-not-found]
    import paddle.distributed.fleet as fleet  # type: ignore[import-not-found]
    import paddle.nn.functional as functional  # type: ignore[import-not-found]

    paddle.enable_static()
    fleet.init(fleet.PaddleCloudRoleMaker())
    label = paddle.static.data("label", [None, 1], "int64")
    names = [f"C{i}" for i in range(shape.features)]
    features = [paddle.static.data(name, [None, 1], "int64") for name in names]
    attr = paddle.ParamAttr(name="embedding", initializer=paddle.nn.initializer.Uniform(0.0, 0.0))
    rows = [paddle.static.nn.sparse_embedding(x, [1, shape.dim], param_attr=attr) for x in features]
    pulled = paddle.concat([paddle.reshape(x, [-1, shape.dim]) for x in rows], axis=1)
    first, bias, last = (paddle.assign(array) for array in constants(shape))
    logit = paddle.matmul(paddle.tanh(paddle.matmul(pulled, first) + bias), last)
    loss = functional.binary_cross_entropy_with_logits(logit, paddle.cast(label, "float32"))
    unused = paddle.static.create_parameter([1], "float32", name="unused")  # Paddle needs one
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    strategy.sparse_table_configs = {"embedding": _table_configs(args.rule, shape.dim)}
    optimizer = fleet.distributed_optimizer(paddle.optimizer.Adam(1e-3, lazy_mode=True), strategy)
    optimizer.minimize(paddle.mean(loss) + paddle.sum(unused * 0.0))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    fleet.init_worker()
    client = fleet.fleet._runtime_handle._worker
    pulled_rows = []
    for labels_B1, ids_BF in zip(*read(args.data, shape), strict=True):
        feed = {name: ids_BF[:, i : i + 1] for i, name in enumerate(names)}
        main = paddle.static.default_main_program()
        (value,) = exe.run(main, feed={"label": labels_B1, **feed}, fetch_list=[pulled])
        pulled_rows.append(value.reshape(shape.batch, shape.features, shape.dim))
        client.client_flush()
    np.savez_compressed(args.out, rows=np.stack(pulled_rows))
    fleet.stop_worker()
    os._exit(0)


def main() -> None:
    default = Shape()
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, type=os.path.abspath)
    parser.add_argument("--out", required=True, type=os.path.abspath)
    parser.add_argument("--rule", choices=sorted(RULES), required=True)
    for name, value in vars(default).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if not job.is_launcher():
        _node(args, Shape(args.batches, args.batch, args.features, args.dim))
        return
    job.launch(vars(args))
    print(json.dumps({"out": args.out}))


if __name__ == "__main__":
    import job

    main()
