"""Names of Fleet that have no counterpart here: what to write in place of each."""

import dis
import sys
from typing import NoReturn

from trireme.errors import Absent

ABSENT = {
    "BoxPSDataset": "it belongs to a closed library; fleet.InMemoryDataset and fleet.PSGPU train on"
    " a GPU",
    "CommunicateTopology": "a job has workers and servers; its model is not cut into parts",
    "DatasetBase": "write fleet.InMemoryDataset or fleet.QueueDataset",
    "Fleet": "the functions of trireme.fleet are those of the one job of a process",
    "FileInstantDataset": "fleet.QueueDataset reads files as they come",
    "HybridCommunicateGroup": "a job has workers and servers; its model is not cut into parts",
    "UtilBase": "fleet.util has its functions",
    "auto": "a model is not cut into parts; trireme place chooses where stages run",
    "check_memory_usage": "trireme top shows the memory of servers, nvidia-smi that of a GPU",
    "check_save_pre_patch_done": "fleet.save_persistables returns when all is written",
    "collective_perf": "nothing is measured before training; trireme top shows a running job",
    "distributed_scaler": "torch.amp.GradScaler works around the optimizer as it is",
    "get_fl_client": "federated training is not supported",
    "get_hybrid_communicate_group": "a job has workers and servers; fleet.worker_index and"
    " fleet.worker_num say where this one is",
    "init_coordinator": "server 0 coordinates a job: leave it out",
    **dict.fromkeys(
        ("init_heter_worker", "run_heter_worker"),
        "leave it out: exe.run(startup_program), or making the Trainer, computes for the workers"
        " and ends the process",
    ),
    "local_device_ids": "CUDA_VISIBLE_DEVICES has the GPUs of this process, fleet.device('gpu') is"
    " its own",
    "main_program": "fleet.static.default_main_program() is that of minimize(fleet.Loss(...))",
    "make_fl_strategy": "federated training is not supported",
    "print_table_stat": "trireme top shows the tables of a running job, and Trainer.counters()"
    " counts admitted and removed rows",
    "recompute": "use torch.utils.checkpoint.checkpoint in forward",
    "recompute_hybrid": "use torch.utils.checkpoint.checkpoint in forward",
    "recompute_sequential": "use torch.utils.checkpoint.checkpoint_sequential in forward",
    "save_cache_model": "Trainer.save(mode='hot', hot=0.1) writes the rows that are used most",
    "save_cache_table": "Trainer.save(mode='hot', hot=0.1) writes the rows that are used most",
    "split_files": "fleet.util.get_file_shard(files) has those of this worker",
    "startup_program": "fleet.static.default_startup_program()",
    "utils": "HDFS and other stores are read by their paths: hdfs://HOST:PORT/FILE; for calls of"
    " your own use fsspec",
    "world_device_ids": "each process has its own GPU, fleet.device('gpu')",
}


def check_absent(name: str) -> None:
    """Raises as `refuse`: a name of Fleet without a counterpart."""
    if name in ABSENT:
        refuse(f"fleet.{name}: it has no counterpart here: {ABSENT[name]}")


def refuse(message: str) -> NoReturn:
    """Raises Absent; in `from MODULE import NAME` ImportError, as that statement drops the text of
    an AttributeError.
    """
    frame = sys._getframe(1)
    while frame.f_globals["__name__"].startswith(__package__) and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]:
        raise ImportError(message)
    raise Absent(message)
