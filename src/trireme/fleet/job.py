"""The calls of a Fleet script, in the order in which it makes them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trireme import interchange
from trireme.checkpoint.format.manifest import read_manifest
from trireme.checkpoint.format.modes import mode_of
from trireme.errors import BadRequest, NotReady
from trireme.fleet.clipping import ClipGradByGlobalNorm, ClipGradByValue
from trireme.fleet.layers import Tables
from trireme.fleet.roles import PaddleCloudRoleMaker, UserDefinedRoleMaker
from trireme.fleet.strategy import DistributedStrategy
from trireme.fleet.transpiler import DistributeTranspilerConfig
from trireme.inference import Predictor
from trireme.job.cluster import Cluster
from trireme.job.default import default, set_default
from trireme.launch.init import connect, log, log_to_stderr, serve_role
from trireme.launch.roles import Role
from trireme.protocol.adam_d2sum import AdamD2Sum
from trireme.storage.storage import open_storage
from trireme.train import DistributedOptimizer, Trainer
from trireme.train import row_life as life
from trireme.train.checkpointing import checkpoint

if TYPE_CHECKING:
    from trireme.inference.export.exporting import Export


class Job:
    """One process' part in a job, under Fleet's names."""

    def __init__(self) -> None:
        self._place: Role | None = None
        self._optimizer: DistributedOptimizer | None = None
        self.tables = Tables()

    def init(
        self,
        role_maker: PaddleCloudRoleMaker | UserDefinedRoleMaker | None = None,
        is_collective: bool = False,
    ) -> None:
        """Take the place in the job that the role maker names; default, the environment's."""
        maker = role_maker or PaddleCloudRoleMaker(is_collective)
        log_to_stderr()
        self._place = maker.place
        self._optimizer = None
        self.tables.clear()
        log.info("%s", self._place.describe())

    def _role(self) -> Role:
        if self._place is None:
            raise NotReady("fleet: expected fleet.init() first")
        return self._place

    def is_server(self) -> bool:
        return self._role().role == "server"

    def is_worker(self) -> bool:
        return not self.is_server()

    def is_first_worker(self) -> bool:
        return self.is_worker() and self.worker_index() == 0

    def worker_index(self) -> int:
        return self._cluster().worker if self._role().is_late else self._role().index

    def worker_num(self) -> int:
        """Workers that the job begins with."""
        return self._cluster().num_workers if self._role().is_late else self._role().num_workers

    def server_num(self) -> int:
        return len(self._role().servers)

    def init_server(self, dirname: str | None = None) -> None:
        """Nothing: a server gets its tables from the workers, a checkpoint through `load_model`."""
        if dirname is not None:
            raise BadRequest(
                f"fleet.init_server: expected no folder, found {dirname!r};"
                " call fleet.load_model on the workers, after distributed_optimizer"
            )

    def run_server(self) -> None:
        """Serve until all workers have said goodbye, then exit with 0; with 2 if the server's place
        or state is wrong.
        """
        if not self.is_server():
            raise BadRequest(f"fleet.run_server: expected a server, this is a {self._role().role}")
        sys.exit(serve_role(self._role()))

    def _cluster(self) -> Cluster:
        """Joined when first needed: a server process never does."""
        if self.is_server():
            raise BadRequest("fleet: expected a worker, this process is a server")
        try:
            return default()
        except NotReady:
            made = connect(self._role())
            set_default(made)
            return made

    def init_worker(self) -> None:
        """Wait for the servers and join them."""
        self._cluster()

    def barrier_worker(self) -> None:
        """Wait for all workers."""
        self._cluster().client.gather({}, [])

    def stop_worker(self) -> None:
        """Finish, and tell the servers that this worker has gone."""
        self._cluster().close()

    def distributed_optimizer(
        self,
        optimizer: torch.optim.Optimizer | None,
        strategy: DistributedStrategy | DistributeTranspilerConfig | None = None,
        *,
        model: nn.Module,
        grad_clip: ClipGradByGlobalNorm | ClipGradByValue | None = None,
    ) -> DistributedOptimizer | torch.optim.Optimizer | None:
        """The optimizer whose `step()` is the push; on a server the given one, as it is.

        A table's update rule is part of the table: `trireme.Table(..., optimizer=...)`. With
        `strategy.adam_d2sum` the dense optimizer is AdamD2Sum with the learning rates of the Adam
        given; attach schedulers to what is returned. grad_clip: what Paddle's optimizers take.
        """
        if self.is_server():
            return optimizer
        strategy = strategy or DistributedStrategy()
        if isinstance(strategy, DistributedStrategy) and strategy.adam_d2sum and optimizer:
            optimizer = _as_adam_d2sum(optimizer)
        self._optimizer = DistributedOptimizer(
            optimizer,
            model,
            strategy=strategy.mode(),
            blocks=None if optimizer is None else strategy.blocks(),
            clip_norm=None if grad_clip is None else grad_clip.clip_norm,
            clip_value=None if grad_clip is None else grad_clip.clip_value,
            cluster=self._cluster(),
        )
        return self._optimizer

    def train_from_dataset(
        self, trainer: Trainer, dataset: Iterable[Any], **options: Any
    ) -> dict[str, float]:
        """One pass over the data; every worker calls it. `save_persistables` then saves its
        model.

        Args:
            trainer: in the place of Fleet's program.
            dataset: of this package, or any other.
            options: as of Trainer.train_from_dataset: fetch_list, fetch_info, print_period, debug.
        """
        self._optimizer = trainer.optimizer
        return trainer.train_from_dataset(dataset, **options)

    def infer_from_dataset(
        self, trainer: Trainer, dataset: Iterable[Any], **options: Any
    ) -> dict[str, float]:
        """As `train_from_dataset`, without training."""
        self._optimizer = trainer.optimizer
        return trainer.infer_from_dataset(dataset, **options)

    def _trained(self) -> DistributedOptimizer:
        if self._optimizer is None:
            raise NotReady("fleet: expected fleet.distributed_optimizer() first")
        return self._optimizer

    def save_persistables(
        self,
        executor: Any = None,
        dirname: str = "",
        main_program: Any = None,
        mode: int = 0,
        *,
        format: str = "trireme",
        **options: Any,
    ) -> None:
        """Write a checkpoint into a new folder; every worker calls it.

        `executor` and `main_program` have no counterpart here: pass None.

        Args:
            mode: 0: full, 1: delta, 2: base, 3: batch, as of Trainer.save.
            format: "fleet": what Paddle's Fleet reads; `options` as of
                interchange.export_fleet.
        """
        _check_none("save_persistables", executor=executor, main_program=main_program)
        if not dirname:
            raise BadRequest("fleet.save_persistables: expected dirname=FOLDER, found none")
        if format == "fleet":
            _check_full(mode)
            interchange.export_fleet(self._trained(), dirname, **options)
        elif format != "trireme" or options:
            raise BadRequest(
                "fleet.save_persistables: expected format 'trireme' without options, or 'fleet',"
                f" found {format!r} with {sorted(options)}"
            )
        else:
            checkpoint.save(
                self._trained(), checkpoint.Location(dirname), what=checkpoint.What(mode)
            )

    def save_inference_model(
        self,
        executor: Any = None,
        dirname: str = "",
        feeded_var_names: Any = None,
        target_vars: Any = None,
        main_program: Any = None,
        mode: int = 0,
        *,
        batch: Any,
        follows: str | None = None,
        dtype: str | None = None,
    ) -> Export:
        """Write the model for inference into a new folder; every worker calls it. A model of
        PyTorch says by itself what it is fed and what it returns: pass None for Fleet's names.

        Args:
            mode: 0 or 2: everything. 1: a delta, what has changed since the export `follows`.
            batch: an example of what will be asked. dtype: of stored rows. See
                Trainer.save_inference_model.
        """
        from trireme.inference.export import exporting as inference  # loads torch.export's parts

        given = {
            "executor": executor,
            "feeded_var_names": feeded_var_names,
            "target_vars": target_vars,
            "main_program": main_program,
        }
        _check_none("save_inference_model", **given)
        if not dirname:
            raise BadRequest("fleet.save_inference_model: expected dirname=FOLDER, found none")
        if mode not in (0, 1, 2) or (mode == 1) != (follows is not None):
            raise BadRequest(
                "fleet.save_inference_model: expected mode 0 or 2, or 1 (delta) with"
                f" follows=FOLDER, found {mode} with {follows!r}"
            )
        optimizer = self._trained()
        wish = inference.Wish(
            optimizer.model,
            Path(dirname),
            batch,
            dtype,
            None if follows is None else Path(follows),
        )
        return inference.save(optimizer, wish)

    def load_inference_model(self, path: str, mode: int = 0) -> Predictor:
        """What a model answers that `save_inference_model` has written; it needs no servers.

        Fleet loads rows into servers; here apply() of what is returned takes the deltas of mode 1.
        """
        if mode not in (0, 2):
            raise BadRequest(
                f"fleet.load_inference_model: expected mode 0 or 2, found {mode}; deltas come to a"
                " model that is there, by apply()"
            )
        return Predictor(path)

    def shrink(self, threshold: Any = None) -> dict[str, dict[str, int]]:
        """Remove the rows whose time is over, as of the end of the day of the data; every worker
        calls it, once a day. Days are those of `set_date` of datasets, or Trainer.set_time.

        Args:
            threshold: None, as Fleet ignores it: tables' policies say what goes.

        Returns:
            As Trainer.shrink.
        """
        if threshold is not None:
            raise BadRequest(
                f"fleet.shrink: expected no threshold, found {threshold!r}: the delete_threshold of"
                " a table's policy says what goes"
            )
        return life.shrink(self._trained(), day_over=True)

    def load_model(self, path: str, mode: int = 0, **options: Any) -> None:
        """Load a checkpoint, or what Paddle's Fleet has saved; every worker calls it.

        mode: as it was saved; 0: whatever the checkpoint says.
        options: for Fleet's, those of interchange.import_fleet.
        """
        if interchange.is_fleet(path):
            _check_full(mode)
            interchange.import_fleet(self._trained(), path, **options)
        elif options:
            raise BadRequest(
                f"fleet.load_model: expected what Fleet has saved, for which {sorted(options)} are,"
                f" found none in {path}"
            )
        else:
            found, wanted = read_manifest(open_storage(path, None)).mode, mode_of(mode)
            if mode != 0 and found != wanted:
                raise BadRequest(
                    f"fleet.load_model: expected a checkpoint of mode {mode} ({wanted}),"
                    f" found {found} in {path}"
                )
            checkpoint.load(self._trained(), checkpoint.Location(path))


def _as_adam_d2sum(optimizer: torch.optim.Optimizer) -> AdamD2Sum:
    """What Fleet makes of an Adam. Raises BadRequest for another one, or options that it lacks."""
    if type(optimizer) is not torch.optim.Adam:
        raise BadRequest(
            "DistributedStrategy.adam_d2sum: expected torch.optim.Adam as the dense optimizer,"
            f" found {type(optimizer).__name__}"
        )
    untouched = torch.optim.Adam([torch.zeros(1)]).defaults
    groups = []
    for group in optimizer.param_groups:
        own = {k: v for k, v in group.items() if k in untouched and v != untouched[k]}
        lr = own.pop("lr", untouched["lr"])
        if own:
            raise BadRequest(
                f"DistributedStrategy.adam_d2sum: it has a learning rate and no other option of"
                f" Adam, found {own}"
            )
        groups.append({"params": group["params"], "lr": lr})
    return AdamD2Sum(groups)


def _check_none(method: str, **values: Any) -> None:
    for name, value in values.items():
        if value is not None:
            raise BadRequest(f"fleet.{method}: expected {name}=None, found {type(value).__name__}")


def _check_full(mode: int) -> None:
    if mode != 0:
        raise BadRequest(f"fleet: expected mode 0 (full) of Fleet's own format, found {mode}")


# The one job of this process, as Fleet has it; its cluster is Trireme's default one.
_job = Job()

init = _job.init
is_server = _job.is_server
is_worker = _job.is_worker
is_first_worker = _job.is_first_worker
worker_index = _job.worker_index
worker_num = _job.worker_num
server_num = _job.server_num
init_server = _job.init_server
run_server = _job.run_server
init_worker = _job.init_worker
barrier_worker = _job.barrier_worker
stop_worker = _job.stop_worker
distributed_optimizer = _job.distributed_optimizer
train_from_dataset = _job.train_from_dataset
infer_from_dataset = _job.infer_from_dataset
save_persistables = _job.save_persistables
save_inference_model = _job.save_inference_model
load_inference_model = _job.load_inference_model
load_model = _job.load_model
shrink = _job.shrink
sparse_embedding = _job.tables.sparse_embedding
