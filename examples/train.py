import torch
from torch import nn

import trireme as tr


class CTR(nn.Module):
    def __init__(self):
        super().__init__()
        rows = tr.Table("ctr", dim=9, optimizer=tr.optim.Adagrad(lr=0.05))
        self.emb = tr.nn.EmbeddingBag(rows, features=[f"C{i}" for i in range(1, 27)])
        self.mlp = nn.Sequential(nn.Linear(26 * 9 + 13, 400), nn.ReLU(), nn.Linear(400, 1))

    def forward(self, batch):
        return self.mlp(torch.cat([self.emb(batch).flatten(1), batch["dense"]], 1)).squeeze(1)


tr.init()  # a server process stays here until the job ends, then exits
train = tr.data.QueueDataset("train/*.tsv", schema=tr.data.criteo(), batch_size=4096)
test = tr.data.QueueDataset("test/*.tsv", schema=tr.data.criteo(), batch_size=4096)
torch.manual_seed(1)
model = CTR()
adam = torch.optim.Adam(model.parameters(), lr=1e-3)
loss = nn.functional.binary_cross_entropy_with_logits
trainer = tr.Trainer(
    model, adam, loss=loss, metrics=[tr.metrics.AUC()], strategy=tr.Strategy("async")
)
trainer.fit(train, epochs=1)
print(trainer.evaluate(test))
trainer.save("ckpt/1")
