"""static.Executor: runs what stands for Fleet's programs.

exe = static.Executor(fleet.CPUPlace())
exe.run(static.default_startup_program())               # joins the job
exe.train_from_dataset(static.default_main_program(), dataset, fetch_list=[loss])
exe.run(static.default_main_program(), feed={"a": ids, "click": labels}, fetch_list=[loss])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme.accelerator import HOST
from trireme.data.batch import Batch
from trireme.data.foreign import as_batch
from trireme.errors import BadRequest, check_kind
from trireme.fleet import calls
from trireme.fleet.program import Program, ServerProgram, StartupProgram, names_of, programs
from trireme.nn.on_device import device_of
from trireme.train import Trainer
from trireme.train.loop.reporting import value_of
from trireme.train.loop.scoring import Scored
from trireme.train.loop.tally import Tally


@dataclass(frozen=True)
class CPUPlace:
    """The model of an executor is on the CPU."""

    is_host = True


@dataclass(frozen=True)
class CUDAPlace:
    """The model of an executor is on a GPU; --gpus or CUDA_VISIBLE_DEVICES choose which."""

    index: int = 0
    is_host = False


class Scope:
    """Fleet's scope has a program's variables by name. Here a torch model has them."""

    def find_var(self, name: str) -> Any:
        raise BadRequest(
            f"Scope.find_var({name!r}): a model has its values: model.get_parameter({name!r}),"
            " model.get_buffer; a table's rows are in trireme.interchange.export_parquet"
        )

    var = find_var


_GLOBAL = Scope()


def global_scope() -> Scope:
    return _GLOBAL


class Executor:
    """Runs programs of this process. place: where models have to be; None: anywhere."""

    def __init__(self, place: CPUPlace | CUDAPlace | None = None) -> None:
        kinds = (CPUPlace, CUDAPlace, type(None))
        check_kind("Executor", "place", place, kinds, "CPUPlace(), CUDAPlace(0) or None")
        self.place = place
        self._tallies: dict[Program, Tally] = {}

    def run(
        self,
        program: Any = None,
        feed: Mapping[str, Any] | None = None,
        fetch_list: Sequence[Any] | None = None,
        scope: Scope | None = None,
        return_numpy: bool = True,
    ) -> list[Any]:
        """Run a program once.

        Args:
            program: a startup program: join the job, with tables and parameters. That of
                get_pserver_program: serve, and end the process. A program of `minimize`, default
                the last one: make one step on the batch `feed`; its clone(for_test=True): evaluate.
            feed: name of a column -> array or tensor, whose first dimension is the example.
            fetch_list: as of train_from_dataset; metrics are of this worker, since the first run.
            scope: global_scope() or None.
            return_numpy: arrays in place of tensors.

        Returns:
            The values of fetch_list.

        Raises:
            BadRequest: another program, another scope, no feed, or no value of a name.
        """
        check_scope("Executor.run", scope)
        if isinstance(program, (StartupProgram, ServerProgram)):
            if feed is not None or fetch_list:
                raise BadRequest("Executor.run: expected feed and fetch_list with a main program")
            if isinstance(program, ServerProgram):
                program.serve()
            elif not calls.is_server():
                main = program.main or programs.required("Executor.run of a startup program")
                self._trainer("run", main)
            return []
        main = self._main("run", program)
        if feed is None:
            raise BadRequest(
                "Executor.run: expected feed={name: values}, found none; train_from_dataset reads"
                " files"
            )
        return self._step(main, _batch(feed), names_of("fetch_list", fetch_list), return_numpy)

    def train_from_dataset(
        self,
        program: Any = None,
        dataset: Any = None,
        scope: Scope | None = None,
        thread: int = 0,
        debug: bool = False,
        fetch_list: Sequence[Any] | None = None,
        fetch_info: Sequence[str] | None = None,
        print_period: int = 100,
        fetch_handler: Any = None,
        **options: Any,
    ) -> dict[str, float]:
        """Train one pass over the data; see fleet.train_from_dataset.

        Args:
            program: of `minimize`, default the last one; or a trireme.Trainer.
            thread: 0: the dataset's threads read.
            options: those of Trainer.fit.
        """
        trainer = self._checked("train_from_dataset", program, dataset, scope, thread)
        if isinstance(program, Program) and program.is_test:
            raise BadRequest(
                "Executor.train_from_dataset: expected a program to train, found a clone for test"
            )
        _check_handler("train_from_dataset", fetch_handler)
        return calls.train_from_dataset(
            trainer,
            dataset,
            debug=debug,
            fetch_list=fetch_list,
            fetch_info=fetch_info,
            print_period=print_period,
            **options,
        )

    def infer_from_dataset(
        self,
        program: Any = None,
        dataset: Any = None,
        scope: Scope | None = None,
        thread: int = 0,
        debug: bool = False,
        fetch_list: Sequence[Any] | None = None,
        fetch_info: Sequence[str] | None = None,
        print_period: int = 100,
        fetch_handler: Any = None,
        **options: Any,
    ) -> dict[str, float]:
        """Evaluate one pass over the data; options: those of Trainer.evaluate."""
        trainer = self._checked("infer_from_dataset", program, dataset, scope, thread)
        _check_handler("infer_from_dataset", fetch_handler)
        return calls.infer_from_dataset(
            trainer,
            dataset,
            debug=debug,
            fetch_list=fetch_list,
            fetch_info=fetch_info,
            print_period=print_period,
            **options,
        )

    def close(self) -> None:
        """Does nothing: fleet.stop_worker() leaves the job."""

    def _checked(
        self, method: str, program: Any, dataset: Iterable[Any] | None, scope: Any, thread: int
    ) -> Trainer:
        check_scope(f"Executor.{method}", scope)
        if dataset is None:
            raise BadRequest(f"Executor.{method}: expected a dataset, found none")
        if thread != 0:
            raise BadRequest(
                f"Executor.{method}: expected thread=0, found {thread}: dataset.set_thread sets"
                " the threads that read; a worker trains with torch's threads, or with those of"
                " trireme.Trainer(threads=...), which may be given in place of the program"
            )
        if isinstance(program, Trainer):
            return self._placed(method, program)
        return self._trainer(method, self._main(method, program))

    def _main(self, method: str, program: Any) -> Program:
        if program is None:
            return programs.required(f"Executor.{method}")
        if not isinstance(program, Program):
            raise BadRequest(
                f"Executor.{method}: expected the program of minimize (default_main_program()),"
                f" found {type(program).__name__}"
            )
        return program

    def _trainer(self, method: str, program: Program) -> Trainer:
        return self._placed(method, program.trainer)

    def _placed(self, method: str, trainer: Trainer) -> Trainer:
        device = device_of(trainer.model)
        if self.place is not None and (device == HOST) != self.place.is_host:
            raise BadRequest(
                f"Executor.{method}: expected the model where {self.place} says, found it on"
                f" {device}: move it by model.to(...) before"
                " minimize, or make the executor with the other place"
            )
        return trainer

    def _step(
        self, program: Program, batch: Batch, names: Sequence[str], return_numpy: bool
    ) -> list[Any]:
        trainer = self._trainer("run", program)
        score = trainer.scorer
        trainer.model.train(not program.is_test)
        if program.is_test:
            trainer.optimizer.refresh()  # a forward pass alone brings rows, and no dense weights
            with torch.no_grad():
                scored = score(trainer.model, batch)
        else:
            trainer.optimizer.zero_grad()
            scored = score(trainer.model, batch)
            assert scored.loss is not None
            scored.loss.backward()  # type: ignore[no-untyped-call]
            trainer.optimizer.step()
        if program not in self._tallies:
            self._tallies[program] = Tally(trainer.metrics, trainer.label)
        self._tallies[program].add(scored)
        values = self._values(program, trainer, scored, names)
        return [_as_array(value) for value in values] if return_numpy else values

    def _values(
        self, program: Program, trainer: Trainer, scored: Scored, names: Sequence[str]
    ) -> list[Any]:
        figures = self._tallies[program].figures() if names else {}
        if scored.loss is not None:
            figures["loss"] = float(scored.loss.detach())
        return [value_of(name, trainer.model, scored, figures) for name in names]


def _batch(feed: Mapping[str, Any]) -> Batch:
    return as_batch(
        {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in feed.items()
        }
    )


def _as_array(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    return np.asarray(value) if isinstance(value, (bool, int, float)) else value


def check_scope(what: str, scope: Any) -> None:
    """Raises BadRequest: another scope than the global one."""
    if scope is not None and scope is not _GLOBAL:
        raise BadRequest(
            f"{what}: expected scope=None or global_scope(), found {type(scope).__name__}: a model"
            " has its own parameters; make another model"
        )


def _check_handler(method: str, handler: Any) -> None:
    if handler is not None:
        raise BadRequest(
            f"Executor.{method}: expected fetch_handler=None, found {type(handler).__name__}:"
            " fetch_list and print_period print values, trireme.Dump writes them"
        )
