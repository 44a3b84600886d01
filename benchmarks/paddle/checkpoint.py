"""A small model that Paddle trains, saves, loads and predicts with.

    python benchmarks/paddle/checkpoint.py --out FOLDER --accessor SparseAccessor --rule adagrad
    python benchmarks/paddle/checkpoint.py --out FOLDER --accessor SparseAccessor --load SAVED

The first writes FOLDER/saved (save_persistables, mode 0) and FOLDER/inference
(save_inference_model), then loads `saved`, whose text has rounded all numbers, and writes
FOLDER/predicted.json: keys and clicks of some examples, Paddle's predictions for them, and its
dense parameters in the order in which it concatenates them. The second does not train: it loads
SAVED and writes only the predictions. One server and one worker of Paddle 2.6.2, async, step by
step. tests/golden/fleet_checkpoint has the output of the first.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy as np

FEATURES, BATCH, BATCHES, KEYS, SHARDS = 4, 32, 24, 40, 2
# Floats of a row as lookups answer it: show and click come first in all but the first.
DIMS = {"SparseAccessor": 5, "CtrCommonAccessor": 7, "CtrDoubleAccessor": 7}
EMBEDX_THRESHOLD = 3
RULES = {
    "naive": ("SparseNaiveSGDRule", 0.05),
    "adagrad": ("SparseAdaGradSGDRule", 0.05),
    "std_adagrad": ("StdAdaGradSGDRule", 0.05),
    "adam": ("SparseAdamSGDRule", 1e-2),
    "shared_adam": ("SparseSharedAdamSGDRule", 1e-2),
}
INITIAL_RANGE = 1e-2
LAYERS = (8, 3, 1)


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys (BATCH, FEATURES) uint64 and clicks (BATCH, 1) int64. Few keys are common."""
    rng = np.random.default_rng(5)
    made = []
    for _ in range(BATCHES):
        drawn = np.minimum(rng.exponential(KEYS / 6, (BATCH, FEATURES)).astype(np.uint64), KEYS)
        of_feature = np.arange(FEATURES, dtype=np.uint64) * np.uint64(1000)
        keys = (drawn + of_feature + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        is_clicked = rng.random((BATCH, 1)) < 1 / (1 + drawn.mean(1, keepdims=True) / 4)
        made.append((keys, is_clicked.astype(np.int64)))
    return made


def examples() -> tuple[np.ndarray, np.ndarray]:
    """The examples of the predictions: two of the batches, and some whose keys have no rows."""
    (keys1, clicks1), (keys2, clicks2) = batches()[:2]
    unknown = keys1[:8] + np.uint64(7)
    return np.concatenate([keys1, keys2, unknown]), np.concatenate([clicks1, clicks2, clicks1[:8]])


def table_configs(accessor: str, rule: str) -> dict[str, object]:
    """PaddleRec's table_parameters of the one table, below its name."""
    dim, is_sparse = DIMS[accessor], accessor == "SparseAccessor"
    configs: dict[str, object] = {
        "table_class": "MemorySparseTable",
        "shard_num": SHARDS,
        "accessor.accessor_class": accessor,
        "accessor.fea_dim": dim + 2 if is_sparse else dim,
        "accessor.embedx_dim": dim - 1 if is_sparse else dim - 3,
        "accessor.embedx_threshold": EMBEDX_THRESHOLD,
        "accessor.ctr_accessor_param.nonclk_coeff": 0.1,
        "accessor.ctr_accessor_param.click_coeff": 1.0,
        "accessor.ctr_accessor_param.base_threshold": 0.5,
        "accessor.ctr_accessor_param.delta_threshold": 0.25,
        "accessor.ctr_accessor_param.delta_keep_days": 16,
        "accessor.ctr_accessor_param.show_click_decay_rate": 0.98,
        "accessor.ctr_accessor_param.delete_threshold": 0.05,
        "accessor.ctr_accessor_param.delete_after_unseen_days": 30,
        "accessor.ctr_accessor_param.ssd_unseenday_threshold": 1,
    }
    name, lr = RULES[rule]
    group = {"std_adagrad": "adagrad", "shared_adam": "adam"}.get(rule, rule)
    of_group = {
        "adagrad": {"initial_g2sum": 3.0},
        "adam": {"beta1_decay_rate": 0.9, "beta2_decay_rate": 0.999, "ada_epsilon": 1e-8},
    }
    rates = {"learning_rate": lr, "initial_range": INITIAL_RANGE, "weight_bounds": [-10.0, 10.0]}
    for part in ("embed_sgd_param", "embedx_sgd_param"):
        configs[f"accessor.{part}.name"] = name
        for key, value in {**rates, **of_group.get(group, {})}.items():
            configs[f"accessor.{part}.{group}.{key}"] = value
    return configs


def _net(paddle: Any, features: list[Any], click: Any, accessor: str) -> tuple[Any, Any]:
    """Prediction and loss: each feature's row, concatenated, and an MLP."""
    clicks = paddle.cast(click, "float32")
    shows = paddle.full_like(click, 1, dtype="float32")
    entry = paddle.distributed.ShowClickEntry(shows.name, clicks.name)
    attr = paddle.ParamAttr(name="embedding")
    rows = [
        paddle.static.nn.sparse_embedding(
            x, [1, DIMS[accessor]], padding_idx=0, param_attr=attr, entry=entry
        )
        for x in features
    ]
    pooled = [paddle.static.nn.sequence_lod.sequence_pool(x, "sum") for x in rows]
    if accessor != "SparseAccessor":
        both = paddle.concat([shows, clicks], axis=1)
        both.stop_gradient = True
        pooled = [paddle.static.nn.continuous_value_model(x, both, True) for x in pooled]
    x = paddle.concat(pooled, axis=1)
    for width in LAYERS:
        x = paddle.static.nn.fc(x, width, activation=None if width == 1 else "relu")
    prediction = paddle.nn.functional.sigmoid(x)
    return prediction, paddle.mean(paddle.nn.functional.log_loss(prediction, clicks))


def _node(args: argparse.Namespace) -> None:
    import paddle  # type: ignore[import-not-found]
    import paddle.distributed.fleet as fleet  # type: ignore[import-not-found]
    from paddle.distributed.ps.utils import public  # type: ignore[import-not-found]

    paddle.enable_static()
    paddle.seed(3)
    fleet.init(fleet.PaddleCloudRoleMaker())
    click = paddle.static.data("click", [None, 1], "int64")
    names = [f"C{i}" for i in range(FEATURES)]
    features = [paddle.static.data(name, [None, 1], "int64", 1) for name in names]
    prediction, loss = _net(paddle, features, click, args.accessor)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    strategy.adam_d2sum = args.dense == "d2sum"
    strategy.sparse_table_configs = {
        "embedding": {
            f"table_parameters.embedding.{key}": value
            for key, value in table_configs(args.accessor, args.rule).items()
        }
    }
    adam, sgd = paddle.optimizer.Adam(1e-2, lazy_mode=True), paddle.optimizer.SGD(1e-1)
    dense = sgd if args.dense == "sgd" else adam
    fleet.distributed_optimizer(dense, strategy).minimize(loss)
    main = paddle.static.default_main_program()
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    fleet.init_worker()
    handle = fleet.fleet._runtime_handle
    dense_map = public.get_the_one_recv_context(handle.context, split_dense_table=False)

    def step(keys_BF: np.ndarray, clicks_B1: np.ndarray) -> np.ndarray:
        """Predict, then update."""
        place, lod = paddle.CPUPlace(), [[1] * len(keys_BF)]
        columns = {
            name: paddle.base.create_lod_tensor(column[:, None].copy(), lod, place)
            for name, column in zip(names, keys_BF.view(np.int64).T, strict=True)
        }
        handle._pull_all_dense(handle.scopes, handle._send_ctx, dense_map)
        (predicted,) = exe.run(main, feed={"click": clicks_B1, **columns}, fetch_list=[prediction])
        handle._worker.client_flush()
        return predicted

    saved = args.load or os.path.join(args.out, "saved")
    if not args.load:
        for batch in batches():
            step(*batch)
        fleet.save_persistables(exe, saved, mode=0)
        inputs = names if args.accessor == "SparseAccessor" else ["click", *names]
        inference = os.path.join(args.out, "inference")
        fleet.save_inference_model(exe, inference, inputs, [prediction], mode=0)
    fleet.load_model(saved, mode=0)
    keys_BF, clicks_B1 = examples()
    predicted = step(keys_BF, clicks_B1)
    shapes = {parameter.name: list(parameter.shape) for parameter in main.all_parameters()}
    result = {
        "keys": keys_BF.tolist(),
        "clicks": clicks_B1[:, 0].tolist(),
        "predictions": predicted[:, 0].tolist(),
        "dense": [[name, shapes[name]] for names in dense_map.values() for name in names],
    }
    with open(os.path.join(args.out, "predicted.json"), "w") as out:
        json.dump(result, out)
    fleet.stop_worker()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, type=os.path.abspath)
    parser.add_argument("--accessor", choices=sorted(DIMS), required=True)
    parser.add_argument("--rule", choices=sorted(RULES), default="adagrad")
    parser.add_argument("--dense", choices=["adam", "sgd", "d2sum"], default="adam")
    parser.add_argument("--load", default="")
    args = parser.parse_args()
    if not job.is_launcher():
        _node(args)
        return
    os.makedirs(args.out, exist_ok=True)
    job.launch(vars(args))
    print(json.dumps({"out": args.out}))


if __name__ == "__main__":
    import job

    main()
