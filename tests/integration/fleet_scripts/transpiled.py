"""A script of the oldest generation as its document has it, with its model in PyTorch."""

import sys

import torch
from torch import nn

import trireme as tr
import trireme.fleet as fleet
import trireme.fleet.paddle as paddle

fluid = paddle.fluid


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = fleet.sparse_embedding(
            "a", [0, 2], param_attr="emb", optimizer=tr.optim.SGD(lr=0.5)
        )
        self.fc = nn.Linear(2, 1)

    def forward(self, batch):
        return self.fc(self.emb(batch)).squeeze(1)


def train_loop(program):
    exe.run(fluid.default_startup_program())
    feed = {"a": torch.tensor([1, 7, 9]).numpy(), "label": torch.tensor([1.0, 0.0, 1.0]).numpy()}
    losses = [exe.run(program, feed=feed, fetch_list=[avg_cost])[0] for _ in range(4)]
    test_program = program.clone(for_test=True)
    outputs, labels = exe.run(test_program, feed=feed, fetch_list=["output", "label"])
    print("LOSSES", *(f"{float(loss):.6f}" for loss in losses), outputs.shape, labels.dtype)
    print(program.strategy.strategy(), program.strategy.blocks())


torch.manual_seed(0)
model = Model()
avg_cost = fleet.Loss(model, nn.functional.mse_loss)
fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1)).minimize(avg_cost)

role, current_endpoint = sys.argv[1:]
trainer_id, trainers, pserver_endpoints = 0, 1, current_endpoint
exe = fluid.Executor(fluid.CPUPlace())
if role == "TRAINER":
    fluid.memory_optimize(fluid.default_main_program(), skip_grads=True)
t = fluid.DistributeTranspiler()
t.transpile(trainer_id, pservers=pserver_endpoints, trainers=trainers, slice_var_up=False)
if role == "PSERVER":
    pserver_prog = t.get_pserver_program(current_endpoint)
    pserver_startup = t.get_startup_program(current_endpoint, pserver_prog)
    exe.run(pserver_startup)
    exe.run(pserver_prog)
elif role == "TRAINER":
    train_loop(t.get_trainer_program())
    fleet.stop_worker()
