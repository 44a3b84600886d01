"""The machines and GPUs of a job, as paddle.distributed.launch names them: --gpus, --ips, --host.

Each machine runs the same command and starts a worker per GPU. Without servers the workers hold the
rows, and listen at the ports from --start_port on.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile

from trireme.errors import BadRequest, check_counts
from trireme.launch.addresses import is_local
from trireme.launch.placement import LaunchConfig

START_PORT = 6070
_VISIBLE, _SELECTED, _MACHINES = (
    "CUDA_VISIBLE_DEVICES",
    "FLAGS_selected_gpus",
    "PADDLE_NUM_TRAINERS",
)


def spread(config: LaunchConfig, env: Mapping[str, str]) -> LaunchConfig:
    """The configuration with GPUs and machines replaced by a number or list of workers. One that
    names neither processes nor GPUs gets a worker for each GPU of this machine.

    Raises BadRequest: the options, or CUDA_VISIBLE_DEVICES, FLAGS_selected_gpus and
    PADDLE_NUM_TRAINERS, contradict each other.
    """
    _check(config, env)
    gpus = _chosen(config.gpus, env)
    counts = config.server_num, config.worker_num, config.nproc_per_node
    named = config.servers + config.workers + config.join
    if not gpus and counts == (None,) * 3 and not named and not config.has_compute_workers:
        gpus = _all_gpus(env)
    num = config.nproc_per_node or len(gpus)
    config = replace(config, gpus=gpus)
    if config.ips:
        return _on_machines(config, num, env)
    if config.has_compute_workers:  # which have the GPUs
        named_num = config.worker_num is not None or bool(config.workers)
        return config if named_num else replace(config, worker_num=config.nproc_per_node)
    is_alone = config.server_num is None and not config.servers + config.join
    if num and is_alone:
        config = replace(config, server_num=0)
    if num and config.worker_num is None and not config.workers:
        config = replace(config, worker_num=num)
    return config


def _on_machines(config: LaunchConfig, num: int, env: Mapping[str, str]) -> LaunchConfig:
    """Workers that hold the rows, `num` on each machine of --ips."""
    named = config.servers + config.workers + config.join
    if config.server_num or config.worker_num or named or config.has_compute_workers:
        raise BadRequest(
            "launch: expected --ips with --gpus or --nproc_per_node alone: it is for jobs without"
            " servers; name the processes of others with --servers and --workers"
        )
    if num < 1:
        raise BadRequest("launch: expected --gpus or --nproc_per_node with --ips, found neither")
    first = START_PORT if config.start_port is None else config.start_port
    workers = tuple(f"{ip}:{first + i}" for ip in config.ips for i in range(num))
    return replace(config, server_num=0, workers=workers, host=_own_host(config, env))


def _own_host(config: LaunchConfig, env: Mapping[str, str]) -> str:
    """The address in --ips that is this machine's."""
    if config.host is not None or env.get("POD_IP") in config.ips:
        host = config.host or env["POD_IP"]
        if host not in config.ips:
            raise BadRequest(
                f"launch: expected --host {host} to be one of --ips {','.join(config.ips)}"
            )
        return host
    local = [ip for ip in config.ips if is_local(f"{ip}:0")]
    if len(local) != 1:
        raise BadRequest(
            f"launch: expected one address of this machine in --ips {','.join(config.ips)}, found"
            f" {', '.join(local) or 'none'}" + ("; name it with --host" if local else "")
        )
    return local[0]


def _check(config: LaunchConfig, env: Mapping[str, str]) -> None:
    if config.start_port is not None and not config.ips:
        raise BadRequest(
            "launch: expected --ips with --start_port, found none: without it ports are chosen free"
        )
    if config.nproc_per_node is not None:
        check_counts("launch", **{"--nproc_per_node": config.nproc_per_node})
    num = config.worker_num if config.worker_num is not None else len(config.workers) or None
    if not config.ips and num is not None and config.nproc_per_node not in (None, num):
        raise BadRequest(
            f"launch: expected --nproc_per_node to be the number of workers, {num}, found"
            f" {config.nproc_per_node}"
        )
    lists = config.ips + config.servers + config.workers
    if config.host is not None and not lists and not config.heter_workers:
        raise BadRequest(
            "launch: expected --ips, --servers, --workers or --heter_workers with --host"
            f" {config.host}, which is one of their hosts, found none"
        )
    if len(set(config.ips)) < len(config.ips) or "" in config.ips:
        raise BadRequest(
            f"launch: expected --ips to name different machines, found {','.join(config.ips)}"
        )
    stated, num = env.get(_MACHINES, "").strip(), len(config.ips) or 1
    if stated not in ("", str(num)) and not config.servers and not config.server_num:
        raise BadRequest(
            f"launch: expected {_MACHINES} to be the number of machines in --ips, {num}, found"
            f" {stated}"
        )


def _chosen(option: tuple[str, ...], env: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that --gpus names, by the number or name that CUDA gives them, or those that
    FLAGS_selected_gpus names by their place among the visible ones; empty: neither is given.
    """
    visible, places = _visible(env), _split(env.get(_SELECTED, ""))
    source, gpus = ("--gpus", option) if option else (_SELECTED, places)
    if wrong := [gpu for gpu in gpus if not _is_gpu(gpu)]:
        raise BadRequest(
            f"launch: expected {source} to name GPUs by number, or as GPU-... or MIG-..., found"
            f" {wrong[0]!r} in {','.join(gpus)!r}"
        )
    names = gpus if visible is None else visible
    by_name = option or visible is None
    known = {name if by_name else str(place): name for place, name in enumerate(names)}
    if len(set(gpus)) < len(gpus) or not known.keys() >= set(gpus):
        among = "" if visible is None else f" among those of {_VISIBLE}={','.join(visible)}"
        raise BadRequest(
            f"launch: expected {source} to name different GPUs{among}, found {','.join(gpus)}"
        )
    return tuple(known[gpu] for gpu in gpus)


def _all_gpus(env: Mapping[str, str]) -> tuple[str, ...]:
    """All that are visible. Loads torch to count them, unless CUDA_VISIBLE_DEVICES does."""
    visible = _visible(env)
    if visible is None:
        from trireme import accelerator

        visible = tuple(map(str, range(accelerator.num_gpus())))
    if not visible:
        raise BadRequest(
            "launch: expected --server_num or --servers before the script, such as --server_num 1,"
            " or GPUs for a job without servers, a worker on each, found neither; without GPUs give"
            " --nproc_per_node"
        )
    return visible


def _visible(env: Mapping[str, str]) -> tuple[str, ...] | None:
    """As CUDA reads them: a name that no GPU can have, such as -1, ends the list."""
    return tuple(takewhile(_is_gpu, _split(env[_VISIBLE]))) if _VISIBLE in env else None


def _is_gpu(name: str) -> bool:
    return name.isdecimal() or name.startswith(("GPU-", "MIG-"))


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def gpu_variables(gpu: str | None) -> dict[str, str]:
    """The variables of a worker that sees one GPU alone; none without."""
    return {} if gpu is None else {_VISIBLE: gpu, _SELECTED: "0"}
