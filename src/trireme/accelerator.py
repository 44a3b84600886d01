"""Where a model computes: which devices there are, and how tensors get there and back.

This is the only module that names a kind of device other than the CPU. Rows are pulled into memory
of the CPU. They follow a model to its device through page-locked memory and a stream of their own,
so that the copy overlaps with what the device computes; gradients come back likewise.

Threads: a Link may be used by several.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trireme.errors import BadRequest
from trireme.label import without_number

_GPU = "cuda"
HOST = torch.device("cpu")
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
"""What a device or NumPy raises that has no memory for a tensor."""
LABELS = ("cpu", "gpu")


def runs_triton(device: torch.device) -> bool:
    """Whether Triton compiles kernels for this device."""
    return device.type == _GPU


def reduces_by_nccl(device: torch.device) -> bool:
    """Whether all-reduce of this device's tensors is NCCL's. Raises BadRequest: neither NCCL nor
    gloo takes them.
    """
    if device.type not in (HOST.type, _GPU):
        raise BadRequest(f"all-reduce: expected tensors on cpu or {_GPU}, found {device}")
    return device.type == _GPU


def await_device(device: torch.device) -> None:
    """Wait until the device has done what this thread has given it."""
    if device.type == _GPU:
        torch.cuda.current_stream(device).synchronize()


def current(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which kernels run on this device."""
    context: AbstractContextManager[Any] = (
        torch.cuda.device(device) if device.type == _GPU else nullcontext()
    )
    return context


@contextmanager
def autocast(dtype: torch.dtype | None, devices: Iterable[torch.device]) -> Iterator[None]:
    """Let torch compute on these devices under `torch.autocast`; None: as outside. Raises
    BadRequest: there is none for one of them.
    """
    with ExitStack() as contexts:
        for kind in {device.type for device in devices if dtype is not None}:
            if not torch.amp.is_autocast_available(kind):
                raise BadRequest(f"autocast: expected a device that torch has it for, found {kind}")
            contexts.enter_context(torch.autocast(kind, dtype))
        yield


def is_in_autocast() -> bool:
    """Whether this thread is within a `torch.autocast` of any device."""
    return any(torch.is_autocast_enabled(kind) for kind in (HOST.type, _GPU))


def device_of_label(label: str, places: Mapping[str, str]) -> torch.device:
    """The device that a label, cpu or gpu, stands for in this process. One with a number, such as
    gpu_2, stands for that of gpu if nothing else is said of it.

    places: label -> what it stands for instead, as TRIREME_DEVICE_GPU says of gpu; other labels
        have to be there.

    Raises BadRequest: an unknown label or device, or no such device here.
    """
    kind = label if label in places else without_number(label)
    if kind not in LABELS and kind not in places:
        raise BadRequest(
            f"device: expected a label of {', '.join(LABELS)}, or TRIREME_DEVICE_{label.upper()} to"
            f" name its device, found {label!r}"
        )
    name = places.get(kind) or {"gpu": _GPU}.get(kind, kind)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BadRequest(f"device: expected a device of torch for {label}, found {name!r}") from (
            error
        )
    if device.type == _GPU and not torch.cuda.is_available():
        raise BadRequest(
            f"device: expected a GPU for the label {label}, found none that torch"
            f" {torch.__version__} sees; TRIREME_DEVICE_GPU=cpu lets the CPU stand in for it"
        )
    return device


def seed_from_host(device: torch.device) -> None:
    """Seed the random numbers of a device from those of the CPU, which go on."""
    if device.type == _GPU:
        seed = int(torch.randint(1 << 62, ()))
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


def torch_name(kind: str) -> str:
    """What torch calls the device of a type of machines, "cpu" or "gpu"."""
    return _GPU if kind == "gpu" else kind


def describe_gpus() -> list[tuple[str, int]]:
    """(name, bytes of memory) of each GPU that torch sees."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(num_gpus())]
    return [(one.name, one.total_memory) for one in gpus]


def built_for() -> str:
    """What this torch computes on: "CUDA 12.8", or "CPUs"."""
    return "CPUs" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def num_gpus() -> int:
    """GPUs that torch sees."""
    return torch.cuda.device_count()


def select_gpu(place: int, places: Mapping[str, str]) -> None:
    """Make a GPU torch's current one, unless another device stands in for GPUs.

    place: among those that torch sees. Raises BadRequest: there is no such GPU.
    """
    device = device_of_label("gpu", places)
    if device.type != _GPU:
        return
    if place >= num_gpus():
        raise BadRequest(f"device: expected a GPU below {num_gpus()}, as torch sees, found {place}")
    torch.cuda.set_device(place)


def share_gpus(place: int, num: int) -> None:
    """Give process `place` of the `num` on this machine a GPU of its own, if there are as many and
    torch has not used one yet.
    """
    is_untouched = not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if 0 < num <= num_gpus() and is_untouched:
        torch.cuda.set_device(place)


def common_device(devices: Iterable[torch.device], what: str) -> torch.device:
    """The one device among these; the CPU if there are none. Raises BadRequest: there are more."""
    distinct = {torch.empty(0, device=device).device for device in devices}
    if len(distinct) > 1:
        names = ", ".join(sorted(map(str, distinct)))
        raise BadRequest(f"{what}: expected one device, found {names}")
    return distinct.pop() if distinct else HOST


class Sent:
    """Tensors on their way to a device."""

    def __init__(self, tensors: list[Tensor], event: torch.cuda.Event | None = None) -> None:
        self._tensors, self._event = tensors, event

    def receive(self) -> list[Tensor]:
        """The tensors, for what this thread gives to the device from now on."""
        if self._event is not None:
            current = torch.cuda.current_stream(self._tensors[0].device)
            current.wait_event(self._event)
            for tensor in self._tensors:
                tensor.record_stream(current)
        return self._tensors


class Link:
    """Copies tensors between the CPU and a device without streams: `Tensor.to`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def is_host(self) -> bool:
        """Whether the device is the CPU, so that tensors stay where they are."""
        return self.device.type == HOST.type

    def send(self, tensors: Sequence[Tensor]) -> Sent:
        """Begin to copy tensors of the CPU to the device. They must not be changed after."""
        return Sent([tensor.to(self.device) for tensor in tensors])

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors on the CPU, complete. Those that are there already are not copied."""
        return [tensor.to(HOST) for tensor in tensors]


class StreamLink(Link):
    """Copies through page-locked memory on two streams, one for each direction."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._up: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._down: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, tensors: Sequence[Tensor]) -> Sent:
        if not tensors:
            return Sent([])
        with _on(self._up):
            moved = [self._begin_send(tensor) for tensor in tensors]
            return Sent(moved, self._up.record_event())

    def _begin_send(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != HOST.type:  # rows of a pass are there already
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with _on(self._down):
            copies = [self._begin_copy(tensor) for tensor in tensors]
        self._down.synchronize()
        return copies

    def _begin_copy(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == HOST.type:
            return tensor
        tensor.record_stream(self._down)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return copy.copy_(tensor, non_blocking=True)


def _on(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return context


@functools.cache
def link_to(device: torch.device) -> Link:
    """The link of this process to a device."""
    return StreamLink(device) if device.type == _GPU else Link(device)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one device on the CPU, complete."""
    devices = {tensor.device for tensor in tensors if tensor.device.type != HOST.type}
    link = link_to(devices.pop() if len(devices) == 1 else HOST)
    return link.to_host(tensors)
