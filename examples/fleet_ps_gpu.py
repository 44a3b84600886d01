"""Fleet's GPU parameter server: rows on servers, and those of a pass on the GPU of the worker.

trireme launch --server_num 1 --worker_num 1 examples/fleet_ps_gpu.py 'train/*.tsv' ckpt/fleet
"""

from __future__ import annotations

import glob
import sys

import torch
from torch import nn

import trireme as tr
from trireme import fleet
from trireme.models import CtrDnn

files, checkpoint = sys.argv[1:3]
fleet.init(fleet.PaddleCloudRoleMaker())
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()

fleet.init_worker()
torch.manual_seed(0)
strategy = fleet.DistributedStrategy()
strategy.a_sync = False
strategy.a_sync_configs = {"use_ps_gpu": True}
rows = tr.Table("embedding", dim=9, optimizer=tr.optim.Adam(lr=1e-3))
model = CtrDnn(rows, layers=(64, 32)).to(fleet.device("gpu"))
trainer = tr.Trainer(
    model,
    torch.optim.Adam(model.parameters(), lr=1e-3),
    strategy=strategy.strategy(),
    loss=nn.functional.binary_cross_entropy_with_logits,
    metrics=[tr.metrics.AUC()],
)
psgpu = fleet.PSGPU()
for name in sorted(glob.glob(files)):  # a pass for each file
    dataset = fleet.InMemoryDataset()
    dataset._set_use_ps_gpu(True)
    dataset.init(batch_size=256, thread_num=2, schema=tr.data.criteo())
    dataset.set_filelist([name])
    dataset.load_into_memory()
    psgpu.begin_pass(trainer)
    figures = fleet.train_from_dataset(trainer, dataset)
    psgpu.end_pass()
    dataset.release_memory()
    print(f"{name}: {figures['examples']:.0f} examples, training AUC {figures['auc']:.4f}")
fleet.save_persistables(dirname=checkpoint)
psgpu.finalize()
fleet.stop_worker()
