"""Tables in a LightningModule: Lightning's Trainer runs the loop, Trireme trains the rows."""

import sys

import lightning
import torch
from torch import nn

import trireme as tr


class Click(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        table = tr.Table("ids", dim=8, optimizer=tr.optim.Adagrad(lr=0.1), salt=True)
        self.ids = tr.nn.EmbeddingBag(table, features=["user", "item"])
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch):
        return self.head(self.ids(batch).flatten(1)).squeeze(1)

    def training_step(self, batch):
        loss = nn.functional.binary_cross_entropy_with_logits(self(batch), batch["label"])
        self.log("loss", loss, batch_size=len(batch["label"]))
        return loss

    def configure_optimizers(self):
        return tr.DistributedOptimizer(torch.optim.Adam(self.parameters(), lr=0.01), self)

    def on_train_epoch_end(self):
        self.optimizers(use_pl_optimizer=False).end_pass()  # other workers may have more batches
        figures = scorer().evaluate(valid)  # of all workers, rows included
        self.log_dict({f"valid_{name}": figures[name] for name in ("loss", "auc")})


class Batches:
    """This worker's batches, whose rows are fetched ahead. Lightning reads them anew each epoch."""

    def __init__(self, dataset):
        self.dataset, self.epoch = dataset, 0

    def __len__(self):  # without it Lightning takes each batch before the step of the last one
        return -(-len(self.dataset) // cluster.num_workers)

    def __iter__(self):
        epoch, self.epoch = self.epoch, self.epoch + 1
        return iter(tr.prefetch(self.dataset, module, epoch=epoch))


def scorer():
    """Evaluates and saves with the optimizer that Lightning steps."""
    optimizer = module.optimizers(use_pl_optimizer=False)
    loss = nn.functional.binary_cross_entropy_with_logits
    return tr.Trainer(module, optimizer, loss=loss, metrics=["auc"], progress=False)


user, item = torch.randint(0, 30, (2, 4000), generator=torch.Generator().manual_seed(0))
columns = {"user": user, "item": item, "label": ((user % 5 + item % 5) % 3 == 0).float()}
train = tr.data.ArrayDataset({n: v[:3200] for n, v in columns.items()}, batch_size=64, shuffle=True)
valid = tr.data.ArrayDataset({n: v[3200:] for n, v in columns.items()})

cluster = tr.init()
torch.manual_seed(0)
module = Click()
loop = lightning.Trainer(
    max_epochs=4,
    accelerator="cpu",
    devices=1,  # Trireme's workers are the other devices
    logger=False,
    enable_checkpointing=False,  # Lightning's files lack the rows: save as below
    enable_progress_bar=False,
    enable_model_summary=False,
)
loop.fit(module, Batches(train))
print(cluster.worker, {name: round(float(v), 4) for name, v in loop.callback_metrics.items()})
scorer().save(sys.argv[1])
