"""The calls of a Fleet script, in the order in which it makes them."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from trireme import interchange
from trireme.checkpoint.format.manifest import read_manifest
from trireme.checkpoint.format.save_modes import save_mode
from trireme.dense.adam_d2sum import AdamD2Sum
from trireme.errors import BadRequest, NotReady
from trireme.fleet.distributed_strategy import DistributedStrategy
from trireme.fleet.embedding_layers import NamedTables
from trireme.fleet.grad_clip import ClipGradByGlobalNorm, ClipGradByValue
from trireme.fleet.ps_gpu import PSGPU
from trireme.fleet.role_makers import PaddleCloudRoleMaker, UserDefinedRoleMaker
from trireme.fleet.transpiler import DistributeTranspilerConfig
from trireme.inference import Predictor
from trireme.inference.export import Export, export_model
from trireme.job.cluster import Cluster
from trireme.job.default import default, set_default
from trireme.launch.init import connect, log, log_to_stderr, serve_role
from trireme.launch.process_role import ProcessRole
from trireme.storage.storage import open_storage
from trireme.train import DistributedOptimizer, Report, Trainer, row_life
from trireme.train.checkpointing.checkpoint_location import Location
from trireme.train.checkpointing.load import load
from trireme.train.checkpointing.save import SaveOptions, save
from trireme.train.loop.reporting import check_names


class FleetJob:
    """The part of one process in a job, under Fleet's names."""

    def __init__(self) -> None:
        self._own_role: ProcessRole | None = None
        self._is_collective = False
        self._optimizer: DistributedOptimizer | None = None
        self.tables = NamedTables()

    def init(
        self,
        role_maker: PaddleCloudRoleMaker | UserDefinedRoleMaker | None = None,
        is_collective: bool = False,
    ) -> None:
        """Take the role that the role maker names; by default the one in the environment.

        is_collective: the job has no servers, and its mode is collective.
        """
        maker = role_maker or PaddleCloudRoleMaker(is_collective)
        if is_collective and not maker.is_collective:
            raise BadRequest("fleet.init: expected is_collective=True of the role maker too")
        log_to_stderr()
        self._own_role, self._is_collective = maker.role, maker.is_collective
        self._optimizer = None
        self.tables.clear()
        PSGPU().forget()
        log.info("%s", self._own_role.describe())

    def _role(self) -> ProcessRole:
        if self._own_role is None:
            raise NotReady("fleet: expected fleet.init() first")
        return self._own_role

    def is_server(self) -> bool:
        return self._role().role == "server"

    def is_worker(self) -> bool:
        """True of a compute worker, too: it makes the same model, up to the Trainer."""
        return not self.is_server()

    def is_heter_worker(self) -> bool:
        """Whether this process is a compute worker, whose Trainer computes batches of others."""
        return self._role().role == "heter"

    def is_first_worker(self) -> bool:
        return self.is_worker() and self.worker_index() == 0

    def worker_index(self) -> int:
        """Compute workers are numbered after the workers."""
        is_assigned = self._role().is_late or self.is_heter_worker()
        return self._cluster().worker if is_assigned else self._role().index

    def worker_num(self) -> int:
        """Workers at the start of the job."""
        return self._cluster().num_workers if self._role().is_late else self._role().num_workers

    def server_num(self) -> int:
        """Servers of the job, not counting those that workers host."""
        return 0 if self._role().hosts else len(self._role().servers)

    def device(self, label: str) -> torch.device:
        """In the place of CUDAPlace and CPUPlace: that of this worker for "gpu" or "cpu". Raises
        BadRequest: there is none, and TRIREME_DEVICE_GPU names no other.
        """
        return self._cluster().device(label)

    def init_server(self, dirname: str | None = None) -> None:
        """Does nothing: workers create the tables, and `load_model` loads a checkpoint."""
        if dirname is not None:
            raise BadRequest(
                f"fleet.init_server: expected no folder, found {dirname!r};"
                " call fleet.load_model on the workers, after distributed_optimizer"
            )

    def run_server(self) -> None:
        """Serve until all workers have left, then exit with 0; with 2 if the server's address or
        state is wrong.
        """
        if not self.is_server():
            raise BadRequest(f"fleet.run_server: expected a server, this is a {self._role().role}")
        sys.exit(serve_role(self._role()))

    def _cluster(self) -> Cluster:
        """The default cluster, joined at the first call; a server process never joins."""
        if self.is_server():
            raise BadRequest("fleet: expected a worker, this process is a server")
        try:
            return default()
        except NotReady:
            cluster = connect(self._role())
            set_default(cluster)
            return cluster

    def init_worker(self) -> None:
        """Wait for the servers and join them."""
        self._cluster()

    def barrier_worker(self) -> None:
        """Wait for all workers."""
        self._cluster().client.coordinator.gather({}, [])

    def stop_worker(self) -> None:
        """Finish all pushes and leave the job. Raises BadRequest: a pass of PSGPU has not ended."""
        PSGPU().check_between("fleet.stop_worker")
        self._cluster().close()

    def distributed_optimizer(
        self,
        optimizer: torch.optim.Optimizer | None,
        strategy: DistributedStrategy | DistributeTranspilerConfig | None = None,
        *,
        model: nn.Module,
        grad_clip: ClipGradByGlobalNorm | ClipGradByValue | None = None,
    ) -> DistributedOptimizer | torch.optim.Optimizer | None:
        """The optimizer whose `step()` is the push; on a server `optimizer` itself.

        A table's update rule is part of the table: `trireme.Table(..., optimizer=...)`. With
        `strategy.adam_d2sum` the dense optimizer becomes AdamD2Sum with the learning rates of the
        Adam; attach schedulers to the returned optimizer. grad_clip: as Paddle's optimizers take.
        """
        if self.is_server():
            return optimizer
        strategy = strategy or DistributedStrategy()
        if isinstance(strategy, DistributedStrategy) and strategy.adam_d2sum and optimizer:
            optimizer = _as_adam_d2sum(optimizer)
        self._optimizer = DistributedOptimizer(
            optimizer,
            model,
            strategy=strategy.strategy(is_collective=self._is_collective),
            blocks=None if optimizer is None else strategy.blocks(),
            clip_norm=None if grad_clip is None else grad_clip.clip_norm,
            clip_value=None if grad_clip is None else grad_clip.clip_value,
            cluster=self._cluster(),
        )
        return self._optimizer

    def train_from_dataset(
        self, trainer: Trainer, dataset: Iterable[Any], **options: Any
    ) -> dict[str, float]:
        """Train one pass over the data; every worker calls it. `save_persistables` then saves the
        model of `trainer`.

        Args:
            trainer: in the place of Fleet's program.
            dataset: of this package, or any other.
            options: those of Trainer.fit, and Fleet's: fetch_list, which worker 0 prints every
                print_period batches (see trireme.Report), under the names of fetch_info; debug:
                also print where the time goes; stat_var_names: metrics whose figures are of all
                workers, default all.

        Raises NotReady: the dataset is one of PSGPU, and there is no pass. BadRequest: there is one
            over another dataset.
        """
        PSGPU().check_trained(trainer, dataset)
        self._optimizer = trainer.optimizer
        metrics = [metric.name for metric in trainer.metrics]
        report, others = _report_of(metrics, **options)
        return trainer.fit(dataset, report=report, **others)

    def infer_from_dataset(
        self, trainer: Trainer, dataset: Iterable[Any], **options: Any
    ) -> dict[str, float]:
        """Evaluate one pass over the data. options: Fleet's, and those of Trainer.evaluate."""
        self._optimizer = trainer.optimizer
        has_metrics = options.get("labels", True) and options.get("model") is None
        metrics = [metric.name for metric in trainer.metrics] if has_metrics else []
        report, others = _report_of(metrics, **options)
        return trainer.evaluate(dataset, report=report, **others)

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
            mode: 0: full, 1: delta, 2: base, 3: batch, see Trainer.save.
            format: "fleet": what Paddle's Fleet reads; with the options of
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
            save(self._trained(), Location(dirname), options=SaveOptions(mode))

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
        """Write the model for inference into a new folder; every worker calls it. Inputs and
        outputs are those of the torch module: pass None for Fleet's names.

        Args:
            mode: 0 or 2: everything. 1: a delta, what has changed since the export `follows`.
            batch, dtype: see trireme.inference.export.export_model.
        """
        _check_none(
            "save_inference_model",
            executor=executor,
            feeded_var_names=feeded_var_names,
            target_vars=target_vars,
            main_program=main_program,
        )
        if not dirname:
            raise BadRequest("fleet.save_inference_model: expected dirname=FOLDER, found none")
        if mode not in (0, 1, 2) or (mode == 1) != (follows is not None):
            raise BadRequest(
                "fleet.save_inference_model: expected mode 0 or 2, or 1 (delta) with"
                f" follows=FOLDER, found {mode} with {follows!r}"
            )
        return export_model(self._trained(), dirname, batch=batch, follows=follows, dtype=dtype)

    def load_inference_model(self, path: str, mode: int = 0) -> Predictor:
        """A predictor of what `save_inference_model` wrote; it needs no servers.

        Fleet loads rows into servers; here the predictor's apply() takes the deltas of mode 1.
        """
        if mode not in (0, 2):
            raise BadRequest(
                f"fleet.load_inference_model: expected mode 0 or 2, found {mode}; deltas come to a"
                " model that is there, by apply()"
            )
        return Predictor(path)

    def shrink(self, threshold: Any = None) -> dict[str, dict[str, int]]:
        """Remove expired rows as of the end of the day of the data; every worker calls it, once a
        day. Returns what Trainer.shrink returns. Days are set by a dataset's `set_date`, or by
        Trainer.set_time.

        Args:
            threshold: None, as Fleet ignores it: tables' policies decide.
        """
        if threshold is not None:
            raise BadRequest(
                f"fleet.shrink: expected no threshold, found {threshold!r}: the delete_threshold of"
                " a table's policy says what goes"
            )
        return row_life.shrink(self._trained(), day_over=True)

    def load_model(self, path: str, mode: int = 0, **options: Any) -> None:
        """Load a checkpoint, or what Paddle's Fleet has saved; every worker calls it.

        mode: as it was saved; 0: any.
        options: for Fleet's files, those of interchange.import_fleet.
        """
        if interchange.is_fleet(path):
            _check_full(mode)
            interchange.import_fleet(self._trained(), path, **options)
        elif options:
            raise BadRequest(
                f"fleet.load_model: expected a model saved by Fleet, because of the options"
                f" {sorted(options)}, found none in {path}"
            )
        else:
            saved, wanted = read_manifest(open_storage(path, None)).mode, save_mode(mode)
            if mode != 0 and saved != wanted:
                raise BadRequest(
                    f"fleet.load_model: expected a checkpoint of mode {mode} ({wanted}),"
                    f" found {saved} in {path}"
                )
            load(self._trained(), Location(path))


def _report_of(
    metrics: Sequence[str],
    *,
    fetch_list: Sequence[str] = (),
    fetch_info: Sequence[str] = (),
    print_period: int = 100,
    debug: bool = False,
    stat_var_names: Sequence[str] | None = None,
    **others: Any,
) -> tuple[Report, dict[str, Any]]:
    """The report that Fleet's options ask for, and the other options. metrics: names."""
    check_names("fleet", fetch_list=fetch_list, fetch_info=fetch_info)
    if fetch_info and len(fetch_info) != len(fetch_list):
        raise BadRequest(
            f"fleet: expected one text in fetch_info for each of the {len(fetch_list)} names in"
            f" fetch_list, found {len(fetch_info)}"
        )
    if print_period < 1:
        raise BadRequest(f"fleet: expected print_period >= 1, found {print_period}")
    if unknown := [name for name in stat_var_names or () if name not in metrics]:
        raise BadRequest(
            f"fleet: expected stat_var_names of the metrics {', '.join(metrics) or '(none)'},"
            f" found {', '.join(unknown)}"
        )
    report = Report(
        values=fetch_list,
        labels=fetch_info,
        period=print_period,
        timing=debug,
        merged=stat_var_names,
    )
    return report, others


def _as_adam_d2sum(optimizer: torch.optim.Optimizer) -> AdamD2Sum:
    """Fleet's replacement of an Adam. Raises BadRequest: another optimizer, or other options."""
    if type(optimizer) is not torch.optim.Adam:
        raise BadRequest(
            "DistributedStrategy.adam_d2sum: expected torch.optim.Adam as the dense optimizer,"
            f" found {type(optimizer).__name__}"
        )
    defaults = torch.optim.Adam([torch.zeros(1)]).defaults
    groups = []
    for group in optimizer.param_groups:
        changed = {k: v for k, v in group.items() if k in defaults and v != defaults[k]}
        lr = changed.pop("lr", defaults["lr"])
        if changed:
            raise BadRequest(
                f"DistributedStrategy.adam_d2sum: it has a learning rate and no other option of"
                f" Adam, found {changed}"
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


# As in Fleet, a process has one job; its cluster is Trireme's default one.
_job = FleetJob()

init = _job.init
is_server = _job.is_server
is_worker = _job.is_worker
is_first_worker = _job.is_first_worker
is_heter_worker = _job.is_heter_worker
worker_index = _job.worker_index
worker_num = _job.worker_num
server_num = _job.server_num
device = _job.device
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
