"""Files of dense blocks: safetensors, with weights and optimizer state of each block."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from trireme.errors import Corruption
from trireme.ps.blocks import BlockSpec
from trireme.ps.checkpoint.manifest import BlocksFile, FileEntry
from trireme.ps.checkpoint.storage import Storage, written
from trireme.ps.shard import Shard

FILE_BYTES = 64 << 20

Tensors = dict[str, Tensor]


def save_blocks(shard: Shard, storage: Storage, prefix: str) -> list[dict[str, Any]]:
    """All blocks of this server, of one moment; returns their part of the manifest."""
    with shard.blocks_locked():
        saved: list[_Saved] = [
            (spec, shard.blocks.state_of(spec.id), dict(shard.blocks.marks[spec.id]))
            for spec in shard.blocks.specs()
        ]
    files = []
    for number, group in enumerate(_groups(saved)):
        tensors = {f"{spec.id}/{name}": t for spec, of, _ in group for name, t in of.items()}
        path = f"{prefix}blocks/server-{shard.index}-{number}.safetensors"
        with written(storage, path) as (file, entry):
            file.write(save_tensors(tensors))
        blocks = [
            {"spec": spec.to_wire(), "marks": [list(pair) for pair in sorted(marks.items())]}
            for spec, _, marks in group
        ]
        files.append({"file": dict(entry), "blocks": blocks})
    return files


_Saved = tuple[BlockSpec, Tensors, Mapping[int, int]]


def _groups(saved: list[_Saved]) -> Iterator[list[_Saved]]:
    """In files' worth: what is written is copied once more, a file at a time."""
    group: list[_Saved] = []
    num_bytes = 0
    for block in saved:
        group.append(block)
        num_bytes += sum(tensor.nbytes for tensor in block[1].values())
        if num_bytes >= FILE_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def tensors_of(storage: Storage, entry: FileEntry) -> Tensors:
    """The tensors of a file. Raises Corruption if it is not safetensors."""
    with storage.open(entry.path) as file:
        data = b"".join(iter(lambda: file.read(8 << 20), b""))
    try:
        tensors: Tensors = load_tensors(data)
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise Corruption(
            f"{storage.name}/{entry.path}: expected safetensors, found {error}"
        ) from error
    return tensors


def read_blocks(
    storage: Storage, part: BlocksFile, wanted: Collection[str]
) -> Iterator[tuple[BlockSpec, Tensors, Mapping[int, int]]]:
    """Spec, tensors and marks of those blocks of a file that are wanted."""
    mine = [block for block in part.blocks if block.spec.id in wanted]
    if not mine:
        return
    where = f"{storage.name}/{part.file.path}"
    of_block: dict[str, Tensors] = {}
    for name, tensor in tensors_of(storage, part.file).items():
        block_id, _, state = name.rpartition("/")
        of_block.setdefault(block_id, {})[state] = tensor
    for block in mine:
        tensors = of_block.get(block.spec.id, {})
        if "weights" not in tensors or tensors["weights"].numel() != block.spec.size:
            raise Corruption(f"{where}: expected {block.spec.size} weights of {block.spec.id}")
        yield block.spec, tensors, block.marks
