"""A training script in Fleet's style: one file for servers and workers, roles from the environment.

trireme launch --server_num 1 --worker_num 2 examples/fleet_train.py 'train/*.tsv' ckpt/fleet
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import trireme as tr
from trireme import fleet
from trireme.models import CtrDnn

files, checkpoint = sys.argv[1:3]
fleet.init(fleet.PaddleCloudRoleMaker())
torch.manual_seed(0)
rows = tr.Table("embedding", dim=9, optimizer=tr.optim.Adam(lr=1e-3))
model = CtrDnn(rows, layers=(64, 32))
strategy = fleet.DistributedStrategy()
strategy.a_sync = True
optimizer = fleet.distributed_optimizer(
    torch.optim.Adam(model.parameters(), lr=1e-3), strategy, model=model
)

if fleet.is_server():
    fleet.init_server()
    fleet.run_server()

fleet.init_worker()
train = tr.data.QueueDataset(files, schema=tr.data.criteo(), batch_size=256)
auc = tr.metrics.AUC()
examples = 0
for batch in tr.prefetch(train, model):
    logits = model(batch)
    optimizer.zero_grad()
    nn.functional.binary_cross_entropy_with_logits(logits, batch["label"]).backward()
    optimizer.step()
    auc.update(logits, batch["label"])
    examples += batch.num_examples
total = int(fleet.util.all_reduce(examples))
fleet.barrier_worker()
fleet.save_persistables(dirname=checkpoint)
print(
    f"worker {fleet.worker_index()} of {fleet.worker_num()}: {examples} of {total} examples,"
    f" training AUC {auc.compute():.4f}"
)
fleet.stop_worker()
