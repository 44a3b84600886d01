"""Paddle's parameter service alone on data of slot_dnn's shape: embeddings, summed; no MLP.

    python benchmarks/paddle/slot.py --files A,B,... --num_warm 2 --threads 1

Every feature is sum-pooled, and the pooled rows are summed, so that the job only pulls and pushes.
One server and one worker of Paddle 2.6.2, async; the first files are an untimed warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time


def _node(args: argparse.Namespace) -> None:
    import paddle  # type: ignore[import-not-found]
    import paddle.distributed.fleet as fleet  # type: ignore[import-not-found]

    paddle.enable_static()
    fleet.init(fleet.PaddleCloudRoleMaker())
    inputs = [paddle.static.data(name, [None, 1], "int64", 1) for name in args.names.split(",")]
    show, click, *features = inputs
    attr = paddle.ParamAttr(
        name="embedding", initializer=paddle.nn.initializer.Uniform(-1e-4, 1e-4)
    )
    floats = [paddle.cast(column, "float32") for column in (show, click)]
    entry = paddle.distributed.ShowClickEntry(*(column.name for column in floats))
    rows = [
        paddle.static.nn.sparse_embedding(
            x, [1, args.dim], padding_idx=0, param_attr=attr, entry=entry
        )
        for x in features
    ]
    pooled = [paddle.static.nn.sequence_lod.sequence_pool(x, "sum") for x in rows]
    one = paddle.nn.initializer.Constant(1.0)
    w = paddle.static.create_parameter([1], "float32", name="w", default_initializer=one)
    sums = paddle.sum(paddle.concat(pooled, axis=1), axis=1, keepdim=True)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    key = "table_parameters.embedding."
    configs: dict[str, object] = {
        "table_class": "MemorySparseTable",
        "shard_num": 10,
        "accessor.accessor_class": "SparseAccessor",
        "accessor.fea_dim": args.dim + 2,
        "accessor.embedx_dim": args.dim - 1,
        "accessor.embedx_threshold": 0,
        "accessor.embed_sgd_param.name": "SparseAdaGradSGDRule",
        "accessor.embedx_sgd_param.name": "SparseAdaGradSGDRule",
    }
    strategy.sparse_table_configs = {"embedding": {key + k: v for k, v in configs.items()}}
    optimizer = fleet.distributed_optimizer(paddle.optimizer.Adam(5e-6, lazy_mode=True), strategy)
    optimizer.minimize(paddle.mean(sums * w))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    fleet.init_worker()

    def train(files: list[str]) -> float:
        dataset = paddle.distributed.QueueDataset()
        dataset.init(
            use_var=inputs, pipe_command="cat", batch_size=args.batch, thread_num=args.threads
        )
        dataset.set_filelist(files)
        started = time.monotonic()
        main = paddle.static.default_main_program()
        exe.train_from_dataset(program=main, dataset=dataset, print_period=10**9)
        fleet.fleet._runtime_handle._worker.client_flush()
        return time.monotonic() - started

    files = args.files.split(",")
    train(files[: args.num_warm])
    wall_s = train(files[args.num_warm :])
    with open(args.out, "w") as out:
        json.dump({"wall_s": wall_s}, out)
    fleet.stop_worker()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", required=True)
    parser.add_argument("--names", required=True)
    parser.add_argument("--num_warm", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--dim", type=int, default=9)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    if not job.is_launcher():
        _node(args)
        return
    with tempfile.TemporaryDirectory(prefix="paddle_slot.") as folder:
        args.out = os.path.join(folder, "result.json")
        job.launch(vars(args), threads=args.threads)
        with open(args.out) as out:
            result = json.load(out)
    print(json.dumps({**result, "threads": args.threads}))


if __name__ == "__main__":
    import job

    main()
