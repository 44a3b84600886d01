"""CTR-DNN on torchrec over gloo, on CPU: one process per rank. Prints one line of JSON.

Run by a Python that has torch, torchrec and fbgemm-gpu-cpu. --data is the folder of gen_criteo.py;
its examples are in memory before the clock starts, with ids that are row numbers already. Each
feature has a table, and its rank is the planner's choice: on CPU torchrec divides no rows. Rows
have row-wise Adagrad, fused into the backward pass; the MLP is in DistributedDataParallel.
"""

import argparse
import itertools
import json
import math
import os
import socket
import time

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import multiprocessing, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig

FEATURES = [f"C{i}" for i in range(1, 27)]
HIDDEN = (512, 256, 128, 32)


class CTR(nn.Module):
    def __init__(self, num_rows, dim):
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=feature,
                embedding_dim=dim,
                num_embeddings=num,
                feature_names=[feature],
                weight_init_min=-0.05,
                weight_init_max=0.05,
            )
            for feature, num in zip(FEATURES, num_rows, strict=True)
        ]
        self.emb = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        sizes = (len(FEATURES) * dim + 13, *HIDDEN, 2)
        layers = []
        for size, next_size in itertools.pairwise(sizes):
            linear = nn.Linear(size, next_size)
            nn.init.normal_(linear.weight, std=1 / math.sqrt(size))
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.ReLU()]
        self.mlp = nn.Sequential(*layers[:-1])

    def forward(self, ids, dense):
        return self.mlp(torch.cat([self.emb(ids).values(), dense], 1))


def load(folder, num_files):
    """(rows by feature, ids as row numbers, dense values, labels) of the first files."""
    parts = [np.load(f"{folder}/npz/part-{k}.npz") for k in range(num_files)]
    ids = np.concatenate([part["ids"] for part in parts])
    by_feature = [np.unique(ids[:, i], return_inverse=True) for i in range(len(FEATURES))]
    numbers = torch.from_numpy(np.stack([numbers for _, numbers in by_feature], 1))
    dense = torch.from_numpy(np.concatenate([part["dense"] for part in parts]))
    labels = torch.from_numpy(np.concatenate([part["label"] for part in parts]).astype(np.int64))
    return [len(distinct) for distinct, _ in by_feature], numbers, dense, labels


def sharded(model, num_ranks):
    """The model with its rows divided among the ranks."""
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    kinds = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    topology = Topology(world_size=num_ranks, local_world_size=num_ranks, compute_device="cpu")
    planner = EmbeddingShardingPlanner(
        topology=topology, constraints=dict.fromkeys(FEATURES, kinds)
    )
    plan = planner.collective_plan(model, [sharder], dist.GroupMember.WORLD)
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.GroupMember.WORLD),
        device=torch.device("cpu"),
        plan=plan,
        sharders=[sharder],
    )


def run(rank, args, results):
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(args.port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(args.ranks)}
    os.environ["LOCAL_WORLD_SIZE"] = str(args.ranks)
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    num_rows, numbers, dense, labels = load(args.data, args.warm + args.timed)
    model = sharded(CTR(num_rows, args.dim), args.ranks)
    optimizer = torch.optim.Adam([p for n, p in model.named_parameters() if "emb" not in n], 1e-3)
    lengths = torch.ones(len(FEATURES) * args.batch, dtype=torch.int32)
    step, num_examples = args.batch * args.ranks, len(labels)
    first_timed = num_examples * args.warm // (args.warm + args.timed) // step
    num_steps = num_examples // step
    for number in range(num_steps):
        if number == first_timed:
            dist.barrier()
            started = time.perf_counter()
        begin = number * step + rank * args.batch
        part = slice(begin, begin + args.batch)
        ids = KeyedJaggedTensor(
            keys=FEATURES, values=numbers[part].t().reshape(-1), lengths=lengths
        )
        loss = nn.functional.cross_entropy(model(ids, dense[part]), labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    if rank == 0:
        wall_s = time.perf_counter() - started
        examples = (num_steps - first_timed) * step
        results.put({"ex_s": examples / wall_s, "loss": loss.item(), "rows": sum(num_rows)})
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, required=True, help="of a rank")
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--warm", type=int, required=True, help="files before the clock starts")
    parser.add_argument("--timed", type=int, required=True, help="files")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in a rank")
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        args.port = free.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(run, (args, results), nprocs=args.ranks)
    print(json.dumps(results.get()), flush=True)


if __name__ == "__main__":
    main()
