"""The script of Fleet's GPU parameter server as its document has it, with its model in PyTorch."""

import os

import torch
from torch import nn

import trireme as tr
import trireme.fleet as fleet
import trireme.fleet.paddle as paddle

batch_size, thread_num, train_data_path = 20, 2, "multislot"


class WideDeepModel(nn.Module):
    def __init__(self):
        super().__init__()
        table = tr.Table("embedding", dim=4, optimizer=tr.optim.SGD(lr=0.5))
        self.embedding = tr.nn.EmbeddingBag(table, features=["C1", "C2"])
        self.deep = nn.Linear(8, 1)

    def forward(self, batch):
        return self.deep(self.embedding(batch).flatten(1)).squeeze(1)

    def net(self, is_train=True):
        data = tr.data
        self.inputs = [data.Label("click"), data.Sparse("C1"), data.Sparse("C2")]
        self.loss = fleet.Loss(self, nn.functional.binary_cross_entropy_with_logits, label="click")


paddle.enable_static()
fleet.init()
psgpu = paddle.fluid.core.PSGPU()

torch.manual_seed(0)
model = WideDeepModel()
model.net(is_train=True)

dataset = paddle.distributed.InMemoryDataset()
dataset._set_use_ps_gpu(True)
dataset.init(use_var=model.inputs, pipe_command="cat", batch_size=batch_size, thread_num=thread_num)
train_files_list = [os.path.join(train_data_path, x) for x in os.listdir(train_data_path)]
dataset.set_filelist(train_files_list)

strategy = fleet.DistributedStrategy()
strategy.a_sync = False
strategy.a_sync_configs = {"use_ps_gpu": True}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = fleet.distributed_optimizer(optimizer, strategy)
optimizer.minimize(model.loss)

if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())

    fleet.init_worker()
    psgpu = paddle.fluid.core.PSGPU()

    dataset.load_into_memory()

    psgpu.begin_pass()
    for _epoch_id in range(1):
        figures = exe.train_from_dataset(
            paddle.static.default_main_program(),
            dataset,
            paddle.static.global_scope(),
            debug=False,
            fetch_list=[model.loss],
            fetch_info=["loss"],
            print_period=1,
        )
    psgpu.end_pass()

    dataset.release_memory()
    psgpu.finalize()
    print("TRAINED", int(figures["examples"]), f"{figures['loss']:.6f}")
    fleet.stop_worker()
