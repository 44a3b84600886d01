"""The command `trireme launch`."""

import argparse
from pathlib import Path

from trireme.commands.options import KEYS, add_common, add_config, add_infer, picked, seconds
from trireme.commands.run import checked_config
from trireme.errors import BadRequest
from trireme.launch.fork_server import START_METHODS
from trireme.launch.local_job import launch
from trireme.launch.machines import START_PORT
from trireme.launch.placement import LaunchConfig

SUMMARY = "start the servers, workers and compute workers of a job"
EXAMPLES = (
    """
examples:
  trireme launch --server_num 2 --worker_num 2 train.py --epochs 3
      start 2 servers and 2 workers on this machine, on free ports; --epochs belongs to train.py
  trireme launch --server_num 1 --worker_num 2 -m config.yaml -o runner.epochs=1
      train from a YAML file with PaddleRec's keys instead of a script: see `trireme run --help`
  trireme launch --server_num 0 --worker_num 2 train.py
      start 2 workers that hold the rows themselves, for mode collective: see docs/collective.md
  trireme launch --gpus 0,1,2,3 train.py
  trireme launch --ips 10.0.0.1,10.0.0.2 --gpus 0,1,2,3 --insecure train.py
      the same with a worker on each of 4 GPUs, and on two machines: run it on both
  trireme launch --server_num 1 --worker_num 1 --streams 16 train.py
  trireme launch --join 127.0.0.1:40001 --worker_num 2 train.py
      cut the data of each pass into 16 streams, which workers take one after the other; the second
      command adds two workers while the job runs, with the server address that the first prints
  trireme launch --servers 10.0.0.1:6000,10.0.0.2:6000 --workers 10.0.0.1:0,10.0.0.2:0 \\
      --insecure train.py
      run this command on both machines; each starts the processes of its own machine
  trireme launch --server_num 1 --worker_num 4 --heter_worker_num 1 --heter_devices gpu \\
      --gpus 0 train.py
      a heterogeneous job: 4 workers read and pull, and a compute worker runs the model for them on
      a GPU. It runs the same script, up to its Trainer; see docs/heterogeneous.md. With
      TRIREME_DEVICE_GPU=cpu instead of --gpus 0 it computes on the CPU
  trireme launch --servers 10.0.0.1:6000 --workers 10.0.0.1:0,10.0.0.1:0 \\
      --heter_devices "gpu;npu" --heter_workers "10.0.0.2:7000,10.0.0.2:7001;10.0.0.3:7000" \\
      --keys keys train.py
      the same on three machines, with two kinds of compute workers: run it on each

Options go before the script. Logs are log/serverlog.N, log/workerlog.N and log/heterlog.N; worker 0
also writes to the console.

If a process fails, all are stopped; with --max_restart it is restarted instead. The exit code is
that of the failed process, 128 + n if signal n ended it or stopped the job, and 2 for a wrong
command. On SIGTERM Trainer.fit ends after its step and takes a last checkpoint if it takes any; the
exit code is then 0.

Environment, for every process of the job; options override it:
  TRIREME_TIMEOUT_S, TRIREME_KEYS, TRIREME_ROOT, TRIREME_LIMITS, TRIREME_INSECURE=1,
  TRIREME_DURABILITY, TRIREME_STATE_DIR, TRIREME_LOG_BYTES, TRIREME_SKIP_RECORDS,
  TRIREME_MEMORY, TRIREME_SSD_DIR, TRIREME_STORE_HOSTS, TRIREME_STREAMS, TRIREME_INTERFACE
      the same as the options
  TRIREME_METRICS
      the same as --metrics PORT: server i gets PORT + i, the workers get the ports after the last
      server, compute workers those after the last worker; with port 0 each process chooses a free
      port and logs it
  TRIREME_THREADS, OMP_NUM_THREADS
      threads of Trireme and of torch; default: a share of the cores
  TRIREME_DEVICE_GPU
      the device that stands in for a GPU where a script asks for one, or where a compute worker of
      label gpu or gpu_2 computes, such as cpu
  CUDA_VISIBLE_DEVICES, FLAGS_selected_gpus
      the GPUs of this machine; launch gives each worker its own, or each compute worker of a
      label such as gpu or gpu_2 if the job has some
"""
    + KEYS
)


# Options of fleetrun and paddle.distributed.launch that do not exist here, by what to do instead.
_INSTEAD = {
    "--server_num 0, --ips or --gpus alone make a collective job, others have servers": (
        "run_mode",
    ),
    "server 0 hosts the coordinator": ("coordinators", "coordinator_num", "http_port"),
    "barriers and reductions go through the servers": ("with_gloo", "gloo_port"),
    "name all machines with --ips, or --servers and --workers, on each of them": (
        "master",
        "nnodes",
    ),
    "the index of a process is its place in --ips, --servers or --workers": ("rank",),
}
FLEETRUN_ONLY = {f"--{name}": why for why, names in _INSTEAD.items() for name in names}


def add_to(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--server_num",
        type=int,
        metavar="N",
        help="number of servers, all on this machine; 0: the workers hold the rows themselves",
    )
    add("--worker_num", "--trainer_num", type=int, metavar="N", help="number of workers")
    _add_machines(command)
    _add_compute_workers(command)
    _add_processes(command)
    add(
        "--streams",
        type=int,
        metavar="S",
        help="in mode async, cut the data of each pass into S streams, which the workers share;"
        " workers can then join later, and others continue the stream of a worker that died;"
        " default: one stream per worker",
    )
    add(
        "--join",
        type=_addresses,
        default=(),
        metavar="HOST:PORT,...",
        help="start workers (--worker_num, default 1) that join the running job of these servers;"
        " it must have been started with --streams",
    )
    add(
        "--console",
        metavar="[HOST:]PORT",
        help="show the job in a browser, see trireme console; port 0 chooses a free one; default:"
        " off",
    )
    add_common(command)
    add_config(command)
    add_infer(command)
    add("--stream", action="store_true", help="train on days of data, as trireme stream")
    add("script", nargs="?", metavar="SCRIPT", help="the Python script that every process runs")
    add("script_args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    command.set_defaults(run=_launch)


def _add_processes(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--log_dir",
        type=Path,
        default=Path("log"),
        metavar="DIR",
        help="folder for the log files, one per process; default: log",
    )
    add(
        "--grace_s",
        type=seconds,
        default=30.0,
        metavar="S",
        help="processes that do not stop within this many seconds are killed; default: 30",
    )
    add(
        "--max_restart",
        type=int,
        default=0,
        metavar="N",
        help="restart each process that dies, up to N times, while the others wait; a server"
        " recovers its state (--durability process becomes the default), a worker continues"
        " where its predecessor was, a compute worker keeps nothing; without servers all workers of"
        " this machine are restarted, and continue from their newest checkpoint; default: 0",
    )
    add(
        "--start_method",
        choices=START_METHODS,
        help="forkserver: a process loads torch once, and servers, workers and compute workers are"
        " forked from it; spawn: each loads torch itself; default: forkserver, but spawn for a"
        " script with the word environ or putenv, which may set variables that torch reads when it"
        " is loaded",
    )


def _add_machines(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--servers",
        type=_addresses,
        default=(),
        metavar="HOST:PORT,...",
        help="addresses of all servers, to choose their ports or use several machines",
    )
    add(
        "--workers",
        "--trainers",
        type=_addresses,
        default=(),
        metavar="HOST:PORT,...",
        help="addresses of all workers, on several machines; ports matter with --server_num 0",
    )
    add(
        "--gpus",
        "--devices",
        type=_addresses,
        default=(),
        metavar="N,...",
        help="GPUs of this machine, as CUDA numbers or names them; each worker sees one of them, or"
        " each compute worker of a label such as gpu or gpu_2; default: FLAGS_selected_gpus."
        " Without --server_num or --servers workers hold the rows",
    )
    add(
        "--nproc_per_node",
        type=int,
        metavar="N",
        help="workers on each machine, instead of a worker per GPU",
    )
    add(
        "--ips",
        type=_addresses,
        default=(),
        metavar="HOST,...",
        help="machines of a job without servers; run the command on each of them",
    )
    add(
        "--start_port",
        type=int,
        metavar="PORT",
        help=f"with --ips, the first port of the workers of a machine; default: {START_PORT}",
    )
    add(
        "--host",
        help="which of the listed hosts is this machine, where several are its own; default with"
        " --ips: POD_IP",
    )
    add(
        "--interface",
        metavar="NAME",
        help="the network device, such as eth2, at whose address other processes reach those here,"
        " and which NCCL and gloo use; default: the one on the way to the others",
    )


def _add_compute_workers(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--heter_worker_num",
        type=_numbers,
        default=(),
        metavar="N[;N...]",
        help="number of compute workers of each kind, all on this machine: they run the model for"
        " the workers, which read, pull and push",
    )
    add(
        "--heter_devices",
        type=_kinds,
        default=(),
        metavar="LABEL[;LABEL...]",
        help="label of each kind, such as gpu: the device that it computes on, and the keyword in"
        " trireme.Stages of what it computes; default for one kind: gpu",
    )
    add(
        "--heter_workers",
        type=_address_lists,
        default=(),
        metavar="HOST:PORT,...[;HOST:PORT,...]",
        help="addresses of all compute workers of each kind, on several machines",
    )


def _launched(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Arguments of python for every process of the job."""
    if arguments.config_yaml is None:
        if arguments.script is None:
            raise BadRequest("launch: expected a script or -m config.yaml, found neither")
        if arguments.opt or arguments.infer or arguments.stream:
            raise BadRequest(
                "launch: expected -o, --infer and --stream with -m config.yaml, found"
                f" {arguments.script}; options of a script go after it"
            )
        return (arguments.script, *arguments.script_args)
    if arguments.script is not None:
        raise BadRequest(
            f"launch: expected a script or -m config.yaml, found both: {arguments.script}"
        )
    if arguments.infer and arguments.stream:
        raise BadRequest("launch: expected --infer or --stream, found both")
    _, settings = checked_config(arguments, is_online=arguments.stream)  # as servers will again
    settings.model_root(arguments.root)
    options = ["--infer"] if arguments.infer else []
    options += ["-o", *arguments.opt] if arguments.opt else []
    command = "stream" if arguments.stream else "run"
    return ("-m", "trireme", command, "-m", str(arguments.config_yaml), *options)


def _launch(arguments: argparse.Namespace) -> int:
    command = _launched(arguments)
    return launch(LaunchConfig(command=command, **picked(arguments, LaunchConfig)))


def _addresses(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _kinds(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(";"))


def _address_lists(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(_addresses(part) for part in _kinds(text))


def _numbers(text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() for part in _kinds(text)):
        raise argparse.ArgumentTypeError(f"expected numbers such as 2 or 2;1, found {text!r}")
    return tuple(int(part) for part in _kinds(text))
