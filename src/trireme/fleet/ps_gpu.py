"""PSGPU: Fleet's GPU parameter server, as passes on a device.

psgpu = fleet.PSGPU()
dataset._set_use_ps_gpu(True)           # a fleet.InMemoryDataset
dataset.load_into_memory()
psgpu.begin_pass(trainer)               # brings the rows of the data to the model's device
fleet.train_from_dataset(trainer, dataset)
psgpu.end_pass()                        # gives them back to the servers, all or none
psgpu.finalize()
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from trireme.errors import Absent, BadRequest, NotReady
from trireme.fleet.program import programs

if TYPE_CHECKING:
    from trireme.fleet.dataset import InMemoryDataset
    from trireme.train import Trainer

log = logging.getLogger("trireme.fleet")

# Methods of Fleet's PSGPU that have no place here, and why.
ELSEWHERE = {
    "set_slot_dim_vector": "a table says the dims of its features: trireme.Table(dims={...})",
    "set_slot_offset_vector": "a model names its features, which need no order",
    "dump_to_mem": "end_pass brings all rows of the pass back",
    "add_sparse_optimizer": "a table says its rule: trireme.Table(optimizer=...)",
    "set_mode": "there is one way to train rows on a device",
}


class PSGPU:
    """The passes of this process: as in Fleet, every PSGPU() is the same one. Its threads: the one
    that trains.

    Methods that Fleet's has too and that cannot be followed are refused by name.
    """

    _of_process: ClassVar[PSGPU | None] = None
    _dataset: InMemoryDataset | None
    _trainer: Trainer | None  # of the last pass
    _trained: InMemoryDataset | None  # by the last pass
    _slots: tuple[str, ...]

    def __new__(cls) -> PSGPU:
        if cls._of_process is None:
            cls._of_process = super().__new__(cls)
            cls._of_process.forget()
        return cls._of_process

    def __getattr__(self, name: str) -> Any:
        if name in ELSEWHERE:
            raise Absent(f"PSGPU.{name}: it has no place here; {ELSEWHERE[name]}")
        raise AttributeError(f"PSGPU has no attribute {name!r}")

    def forget(self) -> None:
        """Begin anew, as with another job."""
        self._dataset = self._trained = None
        self._trainer, self._slots = None, ()

    @property
    def _is_in_pass(self) -> bool:
        return self._trainer is not None and is_in_pass(self._trainer)

    def check_between(self, what: str) -> None:
        """Raises BadRequest: a pass has not ended, whose rows would be lost."""
        if self._is_in_pass:
            raise BadRequest(
                f"{what}: expected no pass under way, found one whose rows are on the device alone:"
                " call PSGPU().end_pass() before, or abandon_pass() to forget them"
            )

    # ---- what it trains ----

    def init_gpu_ps(self, gpus: Sequence[int]) -> None:
        """Does nothing but say so: the GPU of this process is chosen before it trains. Raises
        BadRequest: several GPUs.
        """
        if len(gpus) != 1:
            raise BadRequest(
                f"PSGPU.init_gpu_ps: expected one GPU, found {list(gpus)}: a process has one; for"
                " a pass over several start a worker for each: trireme launch --gpus 0,1"
            )
        log.warning(
            "PSGPU.init_gpu_ps: nothing to do: --gpus, CUDA_VISIBLE_DEVICES or FLAGS_selected_gpus"
            " choose the GPU of a process, and model.to(fleet.device('gpu')) uses it"
        )

    def set_slot_vector(self, slots: Sequence[int]) -> None:
        """Have `begin_pass` check that the data has features of these names. All features of the
        model are trained on its device, named here or not.
        """
        self._slots = tuple(str(slot) for slot in slots)

    def set_dataset(self, dataset: InMemoryDataset) -> None:
        """Set the data of the next pass. load_into_memory of the dataset does so, too. Raises
        BadRequest: it is not a fleet.InMemoryDataset with _set_use_ps_gpu(True).
        """
        if not getattr(dataset, "uses_ps_gpu", False):
            raise BadRequest(
                "PSGPU.set_dataset: expected a fleet.InMemoryDataset for which"
                f" _set_use_ps_gpu(True) was called, found {type(dataset).__name__} without"
            )
        self._dataset = dataset

    def load_into_memory(self, is_shuffle: bool = False) -> None:
        """As of the dataset that was set. Raises NotReady: none was."""
        self._set().load_into_memory(is_shuffle)

    def set_date(self, year: int, month: int, day: int) -> None:
        """As of the dataset that was set, with numbers. Raises NotReady: none was."""
        self._set().set_date(f"{year:04}{month:02}{day:02}")

    def _set(self) -> InMemoryDataset:
        if self._dataset is None:
            raise NotReady(
                "PSGPU: expected a dataset, found none: call dataset._set_use_ps_gpu(True) and"
                " dataset.load_into_memory() of a fleet.InMemoryDataset, or"
                " PSGPU().set_dataset(dataset), before"
            )
        return self._dataset

    # ---- passes ----

    def begin_pass(self, trainer: Trainer | None = None) -> None:
        """Bring the rows that the dataset needs to the device of the model, until `end_pass`.

        trainer: in the place of Fleet's program; None: of the program of `minimize`.

        Raises NotReady: no dataset was set. BadRequest: a pass is under way; the data lacks a
            feature of `set_slot_vector`; as Trainer.begin_pass.
        """
        self.check_between("PSGPU.begin_pass")
        dataset = self._set()
        names = {field.name for field in dataset.schema.fields}
        if missing := [slot for slot in self._slots if slot not in names]:
            raise BadRequest(
                f"PSGPU.begin_pass: expected the slots {list(self._slots)} among the fields of the"
                f" data, found no {', '.join(missing)} among {sorted(names)}"
            )
        if trainer is None:
            trainer = programs.required("PSGPU.begin_pass").trainer
        trainer.begin_pass(dataset)
        self._trainer, self._trained = trainer, dataset

    def check_trained(self, trainer: Trainer, dataset: Any) -> None:
        """Check what is to be trained on. Raises NotReady: a dataset with use_ps_gpu outside of a
        pass. BadRequest: a pass over other data, or of another trainer.
        """
        if self._is_in_pass:
            if dataset is not self._trained or trainer is not self._trainer:
                raise BadRequest(
                    "fleet.train_from_dataset: expected the trainer and the dataset of the pass"
                    " under way, found others: call PSGPU().end_pass() before"
                )
        elif getattr(dataset, "uses_ps_gpu", False) and not is_in_pass(trainer):
            raise NotReady(
                "fleet.train_from_dataset: expected PSGPU().begin_pass(trainer) before training on"
                " a dataset with _set_use_ps_gpu(True), found no pass under way"
            )

    def end_pass(self) -> None:
        """Give the servers what the pass has trained, all or nothing; after an error it may be
        called again. Raises NotReady: there is no pass. Others as Trainer.end_pass.
        """
        self._passing("end_pass").end_pass()

    def abandon_pass(self) -> None:
        """Forget what the pass has trained. Fleet has no such method. Raises as `end_pass`."""
        self._passing("abandon_pass").abandon_pass()

    def _passing(self, method: str) -> Trainer:
        if self._trainer is None or not self._is_in_pass:
            raise NotReady(
                f"PSGPU.{method}: expected begin_pass(trainer) before, found no pass under way"
            )
        return self._trainer

    def finalize(self) -> None:
        """Forget dataset, trainer and slots. Raises BadRequest: a pass is under way."""
        self.check_between("PSGPU.finalize")
        self.forget()


def is_in_pass(trainer: Trainer) -> bool:
    return trainer.optimizer.mode.trains_rows_on_device
