"""A script of Fleet's documents as it is written, with its model in PyTorch. The imports are ours;
the calls are in the order, and with the arguments, that Fleet's users know.
"""

import os
import sys

import torch
from torch import nn

import trireme as tr
import trireme.fleet as fleet
import trireme.fleet.paddle as paddle

SLOTS = ["C1", "C2"]


class WideDeepModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.label = paddle.static.data("click", [None, 1], "int64")
        self.sparse = [paddle.static.data(name, [None, 1], "int64", lod_level=1) for name in SLOTS]
        self.dense = paddle.static.data("dense", [None, 2], "float32")
        self.inputs = [self.label, *self.sparse, self.dense]
        table = tr.Table("embedding", dim=4, optimizer=tr.optim.Adagrad(lr=0.5))
        self.embedding = tr.nn.EmbeddingBag(table, features=SLOTS)
        self.deep = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 1))
        self.wide = nn.Linear(2, 1)

    def forward(self, batch):
        x = torch.cat([self.embedding(batch).flatten(1), batch["dense"]], 1)
        return (self.deep(x) + self.wide(batch["dense"])).squeeze(1)

    def net(self, is_train=True):
        self.auc = tr.metrics.AUC()
        loss = nn.functional.binary_cross_entropy_with_logits
        self.cost = fleet.Loss(self, loss, label="click", metrics=[self.auc])


paddle.enable_static()
role = fleet.role_maker.PaddleCloudRoleMaker()
fleet.init(role)

torch.manual_seed(0)
model = WideDeepModel()
model.net(is_train=True)

strategy = fleet.StrategyFactory.create_sync_strategy()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
optimizer = fleet.distributed_optimizer(optimizer, strategy)
optimizer.minimize(model.cost)

if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
if fleet.is_worker():
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    fleet.init_worker()

    dataset = paddle.distributed.QueueDataset()
    dataset.set_batch_size(20)
    dataset.set_thread(2)
    dataset.set_use_var(model.inputs)
    files = sorted(os.path.join("data", name) for name in os.listdir("data"))
    dataset.set_filelist(fleet.util.get_file_shard(files))
    dataset.set_pipe_command(f"{sys.executable} reader.py")

    for epoch in range(2):
        figures = exe.train_from_dataset(
            paddle.static.default_main_program(),
            dataset,
            paddle.static.global_scope(),
            debug=False,
            fetch_list=[model.cost, model.auc],
            fetch_info=["loss", "auc"],
            print_period=2,
        )
        fleet.save_persistables(exe, f"ckpt/{epoch}", mode=0)
    test_program = paddle.static.default_main_program().clone(for_test=True)
    test = exe.infer_from_dataset(test_program, dataset, fetch_list=[model.auc])
    fleet.save_inference_model(exe, "inference", ["C1", "C2", "dense"], ["output"])
    print("TRAINED", int(figures["examples"]), f"{test['auc']:.6f}", fleet.worker_num())
    fleet.stop_worker()
