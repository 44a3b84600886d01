"""The compute workers of a heterogeneous job, by the options with Fleet's names.

--heter_worker_num "2;1" --heter_devices "gpu;npu": two of label gpu and one of label npu, on this
machine; --heter_workers "a:1,b:1;c:1" instead of numbers: their addresses, on several machines.
"""

import contextlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trireme.errors import BadRequest
from trireme.label import is_label, without_number
from trireme.launch.addresses import bind_free, bind_local
from trireme.protocol.job_limits import COMPUTE_WORKERS_MAX

GPU = "gpu"


@dataclass(frozen=True, slots=True)
class ComputePlacement:
    """workers: (label, address) of each of the job. sockets: of each here, bound to its address, by
    its place in `workers`.
    """

    workers: tuple[tuple[str, str], ...] = ()
    sockets: Mapping[int, socket.socket] = field(default_factory=dict)

    @property
    def on_gpus(self) -> list[int]:
        """The places of those that compute on GPUs: of label gpu, or of one such as gpu_2."""
        labels = [without_number(label) for label, _ in self.workers]
        return [i for i, label in enumerate(labels) if label == GPU]

    @property
    def on_gpus_here(self) -> list[int]:
        return [i for i in self.on_gpus if i in self.sockets]

    def __str__(self) -> str:
        """As TRIREME_HETER has it."""
        return ",".join(f"{label}={address}" for label, address in self.workers)


def place_compute_workers(
    numbers: Sequence[int],
    labels: Sequence[str],
    listed: Sequence[Sequence[str]],
    *,
    host: str | None,
    interface: str | None,
    stack: contextlib.ExitStack,
) -> ComputePlacement:
    """Choose and bind addresses. numbers, labels, listed: number, label and addresses of each kind;
    labels default to gpu if there is one kind. host, interface: as of LaunchConfig.

    Raises BadRequest: the options contradict each other.
    """
    counts = [len(addresses) for addresses in listed] or list(numbers)
    _check(counts, numbers, labels, listed)
    all_labels = [
        label for label, num in zip(labels or [GPU], counts, strict=True) for _ in range(num)
    ]
    if listed:
        addresses = tuple(address for kind in listed for address in kind)
        sockets = bind_local("--heter_workers", addresses, host, stack)
    else:
        addresses, sockets = bind_free(sum(counts), interface, stack)
    return ComputePlacement(tuple(zip(all_labels, addresses, strict=True)), sockets)


def _check(
    counts: Sequence[int],
    numbers: Sequence[int],
    labels: Sequence[str],
    listed: Sequence[Sequence[str]],
) -> None:
    if not counts:
        raise BadRequest(
            "launch: expected --heter_worker_num or --heter_workers with --heter_devices, found"
            " neither"
        )
    if listed and numbers and list(numbers) != counts:
        raise BadRequest(
            "launch: expected --heter_worker_num to be the numbers of --heter_workers,"
            f" {_join(counts)}, found {_join(numbers)}"
        )
    if min(counts) < 1:
        raise BadRequest(
            f"launch: expected --heter_worker_num of at least 1, found {_join(counts)}; without"
            " compute workers leave it out"
        )
    if sum(counts) > COMPUTE_WORKERS_MAX:
        raise BadRequest(
            f"launch: expected at most {COMPUTE_WORKERS_MAX} compute workers, found {sum(counts)}:"
            " the coordinator tells their addresses to each worker that joins"
        )
    if len(labels) != len(counts) and (labels or len(counts) > 1):
        raise BadRequest(
            f"launch: expected --heter_devices to have a label for each of the {len(counts)} kinds"
            f" of compute workers ({_join(counts)}), found {_join(labels) or 'none'}"
        )
    if wrong := [label for label in labels if not is_label(label)]:
        raise BadRequest(
            "launch: expected --heter_devices as labels such as gpu;npu, of lower-case letters,"
            f" digits and _, found {wrong[0]!r}"
        )


def _join(values: Sequence[object]) -> str:
    return ";".join(map(str, values))
