"""A training script in Fleet's style for a collective job, whose workers hold the rows.

trireme launch --nproc_per_node 2 examples/fleet_collective.py 'train/*.tsv' ckpt/fleet
trireme launch --gpus 0,1 examples/fleet_collective.py 'train/*.tsv' ckpt/fleet gpu
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import trireme as tr
from trireme import fleet
from trireme.models import CtrDnn

files, checkpoint, device = sys.argv[1], sys.argv[2], sys.argv[3] if sys.argv[3:] else "cpu"
fleet.init(is_collective=True)
fleet.init_worker()
torch.manual_seed(0)
rows = tr.Table("embedding", dim=9, optimizer=tr.optim.Adam(lr=1e-3))
model = CtrDnn(rows, layers=(64, 32)).to(fleet.device(device))
optimizer = fleet.distributed_optimizer(
    torch.optim.Adam(model.parameters(), lr=1e-3), fleet.DistributedStrategy(), model=model
)
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
fleet.save_persistables(dirname=checkpoint)
print(
    f"worker {fleet.worker_index()} of {fleet.worker_num()}, {fleet.server_num()} servers,"
    f" {optimizer.strategy}: {examples} of {total} examples, training AUC {auc.compute():.4f}"
)
fleet.stop_worker()
