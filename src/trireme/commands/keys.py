"""The command `trireme keys`."""

import argparse
import sys
from pathlib import Path

from trireme.errors import BadRequest, check_counts
from trireme.protocol.job_limits import COMPUTE_WORKERS_MAX, WORKERS_MAX

SUMMARY = "make keys that encrypt a job and admit its workers"
EXAMPLES = """
examples:
  trireme keys keys
  trireme launch --keys keys --server_num 2 --worker_num 2 train.py
      make one folder for a whole job: its traffic is encrypted, and no other process is admitted
  trireme keys keys --worker_num 2
      make separate keys: copy keys/server to the machines of servers, and keys/worker.0 and
      keys/worker.1 to the machine of one worker each
  trireme server --listen 10.0.0.1:6000 --keys server
  TRIREME_KEYS=worker.0 TRIREME_SERVERS=10.0.0.1:6000 TRIREME_ROLE=worker TRIREME_INDEX=0 \\
      TRIREME_NUM_WORKERS=2 python train.py
      start a server and a worker with these keys
  trireme keys keys --add worker.2
      make keys for one more worker; servers that start from now on admit it

Servers need server.key and clients.pub (the admitted public keys, one per line), workers need
client.key and server.pub, compute workers (--heter_worker_num) all four. The *.key files are
secret: they have mode 600 and belong only on the machines that need them. To revoke a key, delete
its line from clients.pub. Servers read these files when they start.
"""


def add_to(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("folder", type=Path, metavar="DIR", help="folder to write to; created if it does not exist")
    add("--worker_num", type=int, metavar="N", help="write a folder for servers and one per worker")
    add(
        "--heter_worker_num",
        type=int,
        default=0,
        metavar="N",
        help="with --worker_num, also a folder per compute worker",
    )
    add("--add", metavar="NAME", help="add a worker to the keys in DIR; its folder is DIR/NAME")
    add("--force", action="store_true", help="replace existing keys")
    command.set_defaults(run=_keys)


def _keys(arguments: argparse.Namespace) -> int:
    from trireme.launch import key_folder  # loads NumPy

    folder, num, added = arguments.folder, arguments.worker_num, arguments.add
    if num is not None and added is not None:
        raise BadRequest("keys: expected --worker_num or --add, found both")
    if num is not None:
        check_counts("keys", **{"--worker_num": num})
    if arguments.heter_worker_num < 0 or (arguments.heter_worker_num and num is None):
        raise BadRequest(
            "keys: expected --heter_worker_num of at least 0, with --worker_num, found"
            f" {arguments.heter_worker_num}"
        )
    for noun, count, most in (
        ("worker", num or 0, WORKERS_MAX),
        ("heter_worker", arguments.heter_worker_num, COMPUTE_WORKERS_MAX),
    ):
        if count > most:
            raise BadRequest(f"keys: expected --{noun}_num of at most {most}, found {count}")
    if added is not None:
        files = key_folder.add_worker(folder, added, replace=arguments.force)
    elif num is not None:
        names = [f"worker.{index}" for index in range(num)]
        compute = [f"heter.{index}" for index in range(arguments.heter_worker_num)]
        files = key_folder.make_folders(
            folder, [*names, *compute], compute=compute, replace=arguments.force
        )
    else:
        files = key_folder.make_shared_folder(folder, replace=arguments.force)
    purposes = {
        key_folder.SERVER_KEY: "secret, for every server and compute worker",
        key_folder.ADMITTED: "for every server and compute worker: the workers that it admits",
        key_folder.CLIENT_KEY: "secret, for its worker",
        key_folder.SERVER_PUB: "for its worker: the servers that it trusts",
    }
    width = max(len(str(file)) for file in files)
    for file in files:
        sys.stdout.write(f"{file!s:{width}}  {purposes[file.name]}\n")
    return 0
