"""The calls of a Fleet script, in the order in which it makes them."""

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import nn

from trireme.dense.adam_d2sum import AdamD2Sum
from trireme.errors import BadRequest, NotReady, check_counts, check_flags, check_kind, check_known
from trireme.fleet.dataset import InMemoryDataset, QueueDataset
from trireme.fleet.distributed_strategy import DistributedStrategy
from trireme.fleet.embedding_layers import NamedTables
from trireme.fleet.fleet_optimizer import FleetOptimizer
from trireme.fleet.grad_clip import ClipGradByGlobalNorm, ClipGradByValue
from trireme.fleet.program import Loss, Program, names_of, programs
from trireme.fleet.ps_gpu import PSGPU
from trireme.fleet.role_makers import PaddleCloudRoleMaker, UserDefinedRoleMaker
from trireme.fleet.transpiler import DistributeTranspilerConfig
from trireme.job.cluster import Cluster
from trireme.job.default import default, set_default
from trireme.launch.init import connect, log, log_to_stderr, serve_role
from trireme.launch.process_role import ProcessRole
from trireme.train import DistributedOptimizer, Report, Trainer, row_life
from trireme.train.loop.reporting import check_names


class FleetJob:
    """The part of one process in a job, under Fleet's names."""

    def __init__(self) -> None:
        self._own_role: ProcessRole | None = None
        self._is_collective = False
        self._strategy: DistributedStrategy | None = None
        self._optimizer: DistributedOptimizer | None = None
        self._fleet_optimizer: FleetOptimizer | None = None
        self._model: nn.Module | None = None  # of distributed_model
        self.dataset: Iterable[Any] | None = None  # that was trained on
        self.worker_endpoints: tuple[str, ...] = ()
        self.tables = NamedTables()

    def init(
        self,
        role_maker: PaddleCloudRoleMaker | UserDefinedRoleMaker | None = None,
        is_collective: bool = False,
        strategy: DistributedStrategy | None = None,
        log_level: int | str = "INFO",
    ) -> None:
        """Take the role that the role maker names; by default the one in the environment.

        is_collective: the job has no servers, and its mode is collective. strategy: of a
        distributed_optimizer that is given none. log_level: of the logger "trireme".
        """
        check_flags("fleet.init", is_collective=is_collective)
        makers = (PaddleCloudRoleMaker, UserDefinedRoleMaker, type(None))
        check_kind("fleet.init", "role_maker", role_maker, makers, "a role maker")
        _check_strategy("fleet.init", strategy)
        maker = role_maker or PaddleCloudRoleMaker(bool(is_collective))
        if is_collective and not maker.is_collective:
            raise BadRequest("fleet.init: expected is_collective=True of the role maker too")
        log_to_stderr()
        set_log_level(log_level)
        self.take_role(maker, strategy)
        log.info("%s", self.role.describe())

    def take_role(
        self,
        maker: PaddleCloudRoleMaker | UserDefinedRoleMaker,
        strategy: DistributedStrategy | None = None,
    ) -> None:
        """As `init`, without a word."""
        self._own_role, self._is_collective = maker.role, maker.is_collective
        self.worker_endpoints = maker.worker_endpoints
        self._strategy, self.dataset = strategy, None
        self._forget_optimizers(trained_only=True)
        self.tables.clear()
        PSGPU().forget()

    def _forget_optimizers(self, *, trained_only: bool = False) -> None:
        """trained_only: keep what `minimize` has begun: transpilers take their place after it."""
        programs.forget(trained_only=trained_only)
        self._optimizer = self._model = None
        if programs.main is None:
            self._fleet_optimizer = None

    @property
    def role(self) -> ProcessRole:
        """Raises NotReady: fleet.init() was not called."""
        if self._own_role is None:
            raise NotReady("fleet: expected fleet.init() first")
        return self._own_role

    @property
    def has_role(self) -> bool:
        """Whether fleet.init() was called."""
        return self._own_role is not None

    def is_server(self) -> bool:
        """Whether this process is a server."""
        return self.role.role == "server"

    def is_worker(self) -> bool:
        """True of a compute worker, too: it makes the same model, up to the Trainer."""
        return not self.is_server()

    def is_heter_worker(self) -> bool:
        """Whether this process is a compute worker, whose Trainer computes batches of others."""
        return self.role.role == "heter"

    def is_first_worker(self) -> bool:
        """Whether this process is worker 0."""
        return self.is_worker() and self.worker_index() == 0

    def worker_index(self) -> int:
        """Compute workers are numbered after the workers."""
        is_assigned = self.role.is_late or self.is_heter_worker()
        return self.cluster().worker if is_assigned else self.role.index

    def worker_num(self) -> int:
        """Workers at the start of the job."""
        return self.cluster().num_workers if self.role.is_late else self.role.num_workers

    def server_num(self) -> int:
        """Servers of the job, not counting those that workers host."""
        return 0 if self.role.hosts else len(self.role.servers)

    def device(self, label: str) -> torch.device:
        """In the place of CUDAPlace and CPUPlace: that of this worker for "gpu" or "cpu". Raises
        BadRequest: there is none, and TRIREME_DEVICE_GPU names no other.
        """
        return self.cluster().device(label)

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
            raise BadRequest(f"fleet.run_server: expected a server, this is a {self.role.role}")
        sys.exit(serve_role(self.role))

    def cluster(self) -> Cluster:
        """The default cluster, joined at the first call; a server process never joins."""
        if self.is_server():
            raise BadRequest(
                "fleet: expected a worker, this process is a server, which serves until the end of"
                " the job: if fleet.is_server(), call fleet.run_server() before this"
            )
        try:
            return default()
        except NotReady:
            cluster = connect(self.role)
            set_default(cluster)
            return cluster

    def init_worker(self) -> None:
        """Wait for the servers and join them."""
        self.cluster()

    def barrier_worker(self) -> None:
        """Wait for all workers."""
        self.cluster().client.coordinator.gather({}, [])

    def stop_worker(self) -> None:
        """Finish all pushes and leave the job. Raises BadRequest: a pass of PSGPU has not ended."""
        PSGPU().check_between("fleet.stop_worker")
        self.cluster().close()
        self._forget_optimizers()

    @overload
    def distributed_optimizer(
        self,
        optimizer: torch.optim.Optimizer | None,
        strategy: DistributedStrategy | DistributeTranspilerConfig | None = None,
        *,
        model: None = None,
        grad_clip: ClipGradByGlobalNorm | ClipGradByValue | None = None,
    ) -> FleetOptimizer: ...
    @overload
    def distributed_optimizer(
        self,
        optimizer: torch.optim.Optimizer | None,
        strategy: DistributedStrategy | DistributeTranspilerConfig | None = None,
        *,
        model: nn.Module,
        grad_clip: ClipGradByGlobalNorm | ClipGradByValue | None = None,
    ) -> DistributedOptimizer | torch.optim.Optimizer | None: ...
    def distributed_optimizer(
        self,
        optimizer: torch.optim.Optimizer | None,
        strategy: DistributedStrategy | DistributeTranspilerConfig | None = None,
        *,
        model: nn.Module | None = None,
        grad_clip: ClipGradByGlobalNorm | ClipGradByValue | None = None,
    ) -> FleetOptimizer | DistributedOptimizer | torch.optim.Optimizer | None:
        """The optimizer whose `step()` is the push.

        With `model` it is a trireme.DistributedOptimizer, on a server `optimizer` itself. Without
        it is a FleetOptimizer, which learns the model from `minimize(loss)` or from
        `fleet.distributed_model(model)`.

        A table's update rule is part of the table: `trireme.Table(..., optimizer=...)`. With
        `strategy.adam_d2sum` the dense optimizer becomes AdamD2Sum with the learning rates of the
        Adam; attach schedulers to the returned optimizer. grad_clip: as Paddle's optimizers take.
        """
        _check_strategy("fleet.distributed_optimizer", strategy)
        clips = (ClipGradByGlobalNorm, ClipGradByValue, type(None))
        expected = "fleet.ClipGradByGlobalNorm(10.0) or fleet.ClipGradByValue(1.0)"
        check_kind("fleet.distributed_optimizer", "grad_clip", grad_clip, clips, expected)
        strategy = strategy or self._strategy or DistributedStrategy()

        def bind(model: nn.Module) -> DistributedOptimizer:
            options = self._training_options(optimizer, strategy, grad_clip)
            self._optimizer = DistributedOptimizer(options.pop("optimizer"), model, **options)
            return self._optimizer

        if model is not None:
            return optimizer if self.is_server() else bind(model)

        def begin(loss: Loss) -> None:
            programs.main = Program(
                loss, strategy, lambda program: self._trainer(program, optimizer, grad_clip)
            )

        made = FleetOptimizer(optimizer, begin, bind, self._program_optimizer)
        self._fleet_optimizer = made
        if self._model is not None:
            self.distributed_model(self._model)
        return made

    def _program_optimizer(self) -> DistributedOptimizer | None:
        has_trainer = programs.main is not None and programs.main.has_trainer
        return self._optimizer if has_trainer else None

    def _trainer(
        self,
        program: Program,
        optimizer: torch.optim.Optimizer | None,
        grad_clip: ClipGradByGlobalNorm | ClipGradByValue | None,
    ) -> Trainer:
        options = self._training_options(optimizer, program.strategy, grad_clip)
        loss = program.loss
        trainer = Trainer(
            loss.model,
            options.pop("optimizer"),
            loss=loss.function,
            label=loss.label,
            metrics=loss.metrics,
            **options,
        )
        self._optimizer = trainer.optimizer
        return trainer

    def _training_options(
        self,
        optimizer: torch.optim.Optimizer | None,
        strategy: DistributedStrategy | DistributeTranspilerConfig,
        grad_clip: ClipGradByGlobalNorm | ClipGradByValue | None,
    ) -> dict[str, Any]:
        """What Trainer and DistributedOptimizer take, from Fleet's words for it."""
        if isinstance(strategy, DistributedStrategy) and strategy.adam_d2sum and optimizer:
            optimizer = _as_adam_d2sum(optimizer)
        cluster = self.cluster()
        return {
            "optimizer": optimizer,
            "strategy": strategy.strategy(is_collective=self._is_collective),
            "blocks": None if optimizer is None else strategy.blocks(),
            "clip_norm": None if grad_clip is None else grad_clip.clip_norm,
            "clip_value": None if grad_clip is None else grad_clip.clip_value,
            "cluster": cluster,
        }

    def distributed_model(self, model: nn.Module) -> nn.Module:
        """The model itself, which the optimizer of `distributed_optimizer` trains, before this or
        after it. Parameters come from the servers, or in a collective job from all workers.
        """
        self._model = model
        if self._fleet_optimizer is not None and not self.is_server():
            self._fleet_optimizer.bind(model)
        return model

    @property
    def fleet_optimizer(self) -> FleetOptimizer:
        """That of the last distributed_optimizer. Raises NotReady: there is none."""
        if self._fleet_optimizer is None:
            raise NotReady("fleet: expected fleet.distributed_optimizer(optimizer) first")
        return self._fleet_optimizer

    def train_from_dataset(
        self, trainer: Trainer | Program, dataset: Iterable[Any], **options: Any
    ) -> dict[str, float]:
        """Train one pass over the data; every worker calls it. `save_persistables` then saves the
        model of `trainer`.

        Args:
            trainer: a Trainer, or the program of `minimize`.
            dataset: of this package, or any other.
            options: those of Trainer.fit, and Fleet's: fetch_list, which worker 0 prints every
                print_period batches (see trireme.Report), under the names of fetch_info; debug:
                also print where the time goes; stat_var_names: metrics whose figures are of all
                workers, default all.

        Raises NotReady: the dataset is one of PSGPU, and there is no pass. BadRequest: there is one
            over another dataset.
        """
        trainer = trainer.trainer if isinstance(trainer, Program) else trainer
        PSGPU().check_trained(trainer, dataset)
        if isinstance(dataset, InMemoryDataset | QueueDataset):
            dataset.compare_files(trainer.optimizer.cluster)
        self._optimizer, self.dataset = trainer.optimizer, dataset
        metrics = [metric.name for metric in trainer.metrics]
        report, others = _report_of(metrics, **options)
        return trainer.fit(dataset, report=report, **others)

    def infer_from_dataset(
        self, trainer: Trainer | Program, dataset: Iterable[Any], **options: Any
    ) -> dict[str, float]:
        """Evaluate one pass over the data. options: Fleet's, and those of Trainer.evaluate."""
        trainer = trainer.trainer if isinstance(trainer, Program) else trainer
        self._optimizer = trainer.optimizer
        has_metrics = options.get("labels", True) and options.get("model") is None
        metrics = [metric.name for metric in trainer.metrics] if has_metrics else []
        report, others = _report_of(metrics, **options)
        return trainer.evaluate(dataset, report=report, **others)

    def trained(self) -> DistributedOptimizer:
        """The optimizer that trains. Raises NotReady: there is none yet."""
        if self._optimizer is None and programs.main is not None:
            return programs.main.trainer.optimizer
        if self._optimizer is None:
            raise NotReady("fleet: expected fleet.distributed_optimizer() first")
        return self._optimizer

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
        return row_life.shrink(self.trained(), day_over=True)


def _check_strategy(what: str, strategy: Any) -> None:
    """Before the trainer is made, and on servers, which make none."""
    kinds = (DistributedStrategy, DistributeTranspilerConfig, type(None))
    check_kind(what, "strategy", strategy, kinds, "a fleet.DistributedStrategy")


def _report_of(
    metrics: Sequence[str],
    *,
    fetch_list: Sequence[Any] | None = (),
    fetch_info: Sequence[str] | None = (),
    print_period: int = 100,
    debug: bool = False,
    stat_var_names: Sequence[str] | None = None,
    **others: Any,
) -> tuple[Report, dict[str, Any]]:
    """The report that Fleet's options ask for, and the other options. metrics: names."""
    fetch_list, fetch_info = names_of("fetch_list", fetch_list), list(fetch_info or ())
    check_names("fleet", fetch_list=fetch_list, fetch_info=fetch_info)
    if fetch_info and len(fetch_info) != len(fetch_list):
        raise BadRequest(
            f"fleet: expected one text in fetch_info for each of the {len(fetch_list)} names in"
            f" fetch_list, found {len(fetch_info)}"
        )
    check_counts("fleet", print_period=print_period)
    check_flags("fleet", debug=debug)
    check_known("fleet", "stat_var_names of the metrics", metrics, stat_var_names or ())
    report = Report(
        values=fetch_list,
        labels=fetch_info,
        period=print_period,
        timing=bool(debug),
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


def get_log_level_code() -> int:
    """The level of the logger "trireme", as a number."""
    return logging.getLogger("trireme").getEffectiveLevel()


def get_log_level_name() -> str:
    """The level of the logger "trireme", by its name."""
    return logging.getLevelName(get_log_level_code())


def set_log_level(level: int | str) -> None:
    """Set how much the logger "trireme" says. Raises BadRequest: no such level."""
    try:
        logging.getLogger("trireme").setLevel(level.upper() if isinstance(level, str) else level)
    except (TypeError, ValueError) as error:
        raise BadRequest(
            f"fleet.set_log_level: expected a level such as 'INFO' or 20, found {level!r}"
        ) from error


# As in Fleet, a process has one job; its cluster is Trireme's default one.
job = FleetJob()

init = job.init
is_server = job.is_server
is_worker = job.is_worker
is_first_worker = job.is_first_worker
is_heter_worker = job.is_heter_worker
worker_index = job.worker_index
worker_num = job.worker_num
server_num = job.server_num
device = job.device
init_server = job.init_server
run_server = job.run_server
init_worker = job.init_worker
barrier_worker = job.barrier_worker
stop_worker = job.stop_worker
distributed_optimizer = job.distributed_optimizer
train_from_dataset = job.train_from_dataset
infer_from_dataset = job.infer_from_dataset
shrink = job.shrink
sparse_embedding = job.tables.sparse_embedding
distributed_model = job.distributed_model


def minimize(
    loss: Any, startup_program: None = None, parameter_list: None = None, no_grad_set: None = None
) -> None:
    """As FleetOptimizer.minimize."""
    job.fleet_optimizer.minimize(loss, startup_program, parameter_list, no_grad_set)


def step() -> None:
    """As FleetOptimizer.step."""
    job.fleet_optimizer.step()


def clear_grad() -> None:
    """As FleetOptimizer.clear_grad."""
    job.fleet_optimizer.clear_grad()


def set_lr(value: float) -> None:
    """As FleetOptimizer.set_lr."""
    job.fleet_optimizer.set_lr(value)


def get_lr() -> float:
    """As FleetOptimizer.get_lr."""
    return job.fleet_optimizer.get_lr()


def state_dict() -> dict[str, Any]:
    """As FleetOptimizer.state_dict."""
    return job.fleet_optimizer.state_dict()


def set_state_dict(state_dict: Mapping[str, Any]) -> None:
    """As FleetOptimizer.set_state_dict."""
    job.fleet_optimizer.set_state_dict(state_dict)
