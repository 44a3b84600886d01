"""Files of dense blocks: safetensors, with weights and optimizer state of each block."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from trireme.checkpoint.format.manifest import BlocksFile, FileEntry
from trireme.errors import BadRequest, Corruption
from trireme.protocol.block_spec import BlockSpec
from trireme.server.block_store import Part
from trireme.server.state import ServerState
from trireme.storage.storage import CheckedFile, Storage, written

FILE_BYTES = 64 << 20
# Of the weights, and of what optimizers keep beside them.
DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.bool: "BOOL"}

Tensors = dict[str, Tensor]


def save_blocks(server: ServerState, storage: Storage, prefix: str) -> list[dict[str, Any]]:
    """All blocks of this server, of one moment; returns their part of the manifest."""
    with server.blocks_lock:
        saved: list[_Saved] = [
            (_of_part(spec, part), part.tensors, part.marks)
            for spec in server.blocks.specs()
            for part in server.blocks.parts_of(spec.id)
        ]
    files = []
    for number, group in enumerate(_groups(saved)):
        tensors = {f"{spec.id}/{name}": t for spec, of, _ in group for name, t in of.items()}
        path = f"{prefix}blocks/server-{server.index}-{number}.safetensors"
        with written(storage, path) as (file, entry):
            write_tensors(file, tensors)
        blocks = [
            {"spec": spec.to_wire(), "marks": [list(pair) for pair in sorted(marks.items())]}
            for spec, _, marks in group
        ]
        files.append({"file": dict(entry), "blocks": blocks})
    return files


_Saved = tuple[BlockSpec, Mapping[str, Tensor], Mapping[int, int]]


def _of_part(spec: BlockSpec, part: Part) -> BlockSpec:
    """A block in several pieces is saved as as many blocks."""
    return spec if part.size == spec.size else replace(spec, start=part.start, size=part.size)


def _groups(saved: list[_Saved]) -> Iterator[list[_Saved]]:
    """In files' worth: a load reads one whole."""
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


def write_tensors(file: CheckedFile, tensors: Tensors) -> None:
    """Write a file of safetensors, as its package does, from the tensors' own memory: the package
    would make two copies of all of them first.

    Format: huggingface.co/docs/safetensors. Raises BadRequest for a dtype that has no name here.
    """
    # The widest first, so that each lies at a multiple of its width; then by name, because the same
    # state makes the same bytes, whatever order a server came to know it in.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        if tensor.dtype not in DTYPES:
            known = ", ".join(str(dtype) for dtype in DTYPES)
            raise BadRequest(f"checkpoint: expected {known}, found {name} of {tensor.dtype}")
        begin, end = end, end + tensor.nbytes
        dtype, shape = DTYPES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for _, tensor in ordered:
        if tensor.nbytes:
            file.write(tensor.reshape(-1).numpy())


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
