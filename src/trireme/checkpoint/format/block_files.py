"""Files of dense blocks: safetensors, with weights and optimizer state of each block."""

import json
import struct
from collections.abc import Collection, Iterator, Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from trireme.checkpoint.format.manifest import BlockFile, FileEntry
from trireme.errors import BadRequest, Corruption, reading
from trireme.protocol.block_spec import BlockSpec
from trireme.storage.checked_file import CheckedFile
from trireme.storage.storage import Storage

# Of the weights, and of what optimizers keep beside them.
DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.bool: "BOOL"}

Tensors = dict[str, Tensor]


def write_tensors(file: CheckedFile, tensors: Tensors) -> None:
    """Write tensors in the format of safetensors from their own memory; the package safetensors
    would first make two copies of all of them.

    Format: huggingface.co/docs/safetensors. Raises BadRequest for a dtype that DTYPES lacks.
    """
    # The widest first, so that each begins at a multiple of its width; then by name, so that the
    # same state makes the same bytes in whatever order a server received it.
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


def read_tensors(storage: Storage, entry: FileEntry) -> Tensors:
    """The tensors of a file. Raises Corruption if it is not safetensors."""
    where = f"{storage.name}/{entry.path}"
    with reading(where), storage.open(entry.path) as file:
        data = b"".join(iter(lambda: file.read(8 << 20), b""))
    try:
        tensors: Tensors = load_tensors(data)
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise Corruption(f"{where}: expected safetensors, found {error}") from error
    return tensors


def read_blocks(
    storage: Storage, block_file: BlockFile, wanted: Collection[str]
) -> Iterator[tuple[BlockSpec, Tensors, Mapping[int, int]]]:
    """Spec, tensors and marks of the blocks of a file whose ids are wanted."""
    blocks = [block for block in block_file.blocks if block.spec.id in wanted]
    if not blocks:
        return
    tensors_of_block: dict[str, Tensors] = {}
    for name, tensor in read_tensors(storage, block_file.file).items():
        block_id, _, state = name.rpartition("/")
        tensors_of_block.setdefault(block_id, {})[state] = tensor
    for block in blocks:
        tensors = tensors_of_block.get(block.spec.id, {})
        num_weights = tensors["weights"].numel() if "weights" in tensors else 0
        if num_weights != block.spec.size:
            raise Corruption(
                f"{storage.name}/{block_file.file.path}: expected {block.spec.size} weights of"
                f" {block.spec.id}, found {num_weights}"
            )
        yield block.spec, tensors, block.marks
