"""What the environment states about this process, as facts.

This is the only module of Trireme that reads its settings from the environment. Three families of
variables state the place of a process in a job:

- Trireme's own, `TRIREME_*`, which win over everything but arguments;
- Fleet's (`TRAINING_ROLE`, `PADDLE_*`, `POD_IP`), as PaddleCloudRoleMaker reads them, except that a
  worker of servers needs no address of its own; without servers PADDLE_TRAINER_ENDPOINTS and
  PADDLE_CURRENT_ENDPOINT make one that hosts its part of the rows;
- torchrun's `RANK` and `WORLD_SIZE`, which with `TRIREME_SERVERS` make a worker; without, one that
  hosts its part of the rows, and meets the others at `MASTER_ADDR:MASTER_PORT`.

Each family becomes facts (role, servers, index, ...), each with the name of the variable that it
came from. FLAGS_selected_gpus and torchrun's LOCAL_RANK only choose a GPU. Facts are merged by
rank; `process_role` checks them as a whole.
"""

import difflib
import os
import re
from collections.abc import Mapping
from typing import Any

from trireme.errors import BadRequest, check_choice
from trireme.label import is_label
from trireme.launch.fleet_stages import ALL, heter_facts
from trireme.launch.stated_facts import Fact, Facts, as_text, is_set, stated

# Trireme's own variables, and the fact that each states.
VARIABLES: Mapping[str, str] = {
    "TRIREME_ROLE": "role",
    "TRIREME_SERVERS": "servers",
    "TRIREME_INDEX": "index",
    "TRIREME_NUM_WORKERS": "num",
    "TRIREME_STREAMS": "streams",
    "TRIREME_JOIN": "join",
    "TRIREME_LABEL": "label",
    "TRIREME_HETER": "heter",
    "TRIREME_LISTEN": "listen",
    "TRIREME_LISTEN_FD": "listen_fd",
    "TRIREME_JOINING": "joining",
    "TRIREME_TIMEOUT_S": "timeout_s",
    "TRIREME_INSECURE": "insecure",
    "TRIREME_KEYS": "keys",
    "TRIREME_ROOT": "root",
    "TRIREME_DURABILITY": "durability",
    "TRIREME_STATE_DIR": "state_dir",
    "TRIREME_LOG_BYTES": "log_bytes",
    "TRIREME_SKIP_RECORDS": "skip_records",
    "TRIREME_THREADS": "threads",
    "TRIREME_METRICS": "metrics",
    "TRIREME_LIMITS": "limits",
    "TRIREME_MEMORY": "memory",
    "TRIREME_SSD_DIR": "ssd_dir",
    "TRIREME_STORE_HOSTS": "store_hosts",
    "TRIREME_DEVICE_GPU": "devices",
    "TRIREME_INTERFACE": "interface",
}
DEVICES = "TRIREME_DEVICE_"
"""Before the label, in capitals, whose device in this process the variable names."""
# Variables that a script may set for torch, and for what that uses, which read them as they are
# loaded. By name: Lightning and others set some that begin alike, for later.
_READ_AT_LOAD = (
    *("OMP_NUM_THREADS", "OMP_DYNAMIC", "OMP_PLACES", "OMP_PROC_BIND", "OMP_STACKSIZE"),
    *("OMP_THREAD_LIMIT", "OMP_WAIT_POLICY", "GOMP_CPU_AFFINITY", "GOMP_SPINCOUNT"),
    *("KMP_AFFINITY", "KMP_BLOCKTIME", "MKL_DYNAMIC", "MKL_NUM_THREADS", "MKL_THREADING_LAYER"),
    *("OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS"),
    *("NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "DNNL_MAX_CPU_ISA"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "ARROW_DEFAULT_MEMORY_POOL"),
)
_at_load: dict[str, str] | None = None
# The facts that make a process part of a job. The others only tune it.
PLACE = ("role", "servers", "index", "num", "join", "label", "heter", "listen", "listen_fd")
PLACE_VARIABLES = tuple(name for name, fact in VARIABLES.items() if fact in PLACE)

# Where a missing fact could have come from, for messages.
_SOURCES = {
    "role": "TRIREME_ROLE (server, worker, heter, embedded) or TRAINING_ROLE (PSERVER, TRAINER,"
    " HETER_TRAINER)",
    "servers": "TRIREME_SERVERS or PADDLE_PSERVERS_IP_PORT_LIST (host:port,host:port,...)",
    "server address": "an address to listen on (--listen, TRIREME_LISTEN), or its place in a job "
    "(TRIREME_SERVERS and TRIREME_INDEX, or PADDLE_PSERVERS_IP_PORT_LIST, POD_IP and PADDLE_PORT)",
    "worker index": "TRIREME_INDEX, PADDLE_TRAINER_ID or torchrun's RANK",
    "server index": "TRIREME_INDEX or TRIREME_LISTEN, or POD_IP and PADDLE_PORT",
    "heter": f"TRIREME_HETER (label=host:port,...) or {ALL}",
    "num": "TRIREME_NUM_WORKERS, PADDLE_TRAINERS_NUM or torchrun's WORLD_SIZE",
}
_FLEET_VARIABLES = {
    "TRAINING_ROLE": "role",
    "PADDLE_PSERVERS_IP_PORT_LIST": "servers",
    "PADDLE_TRAINERS_NUM": "num",
    "PADDLE_TRAINER_ID": "index",
}
_GPU_VARIABLES = {
    "FLAGS_selected_gpus": "gpu",
    "LOCAL_RANK": "local_index",
    "LOCAL_WORLD_SIZE": "local_num",
}
_FLEET_ROLES = {"PSERVER": "server", "TRAINER": "worker", "HETER_TRAINER": "heter"}


def inherited() -> Mapping[str, str]:
    """The environment of this process."""
    return os.environ


def note_load() -> None:
    """Torch has been loaded, in this environment, before the script begins."""
    global _at_load
    _at_load = _of_torch()


def set_too_late() -> list[str]:
    """Variables that the script has set or changed after `note_load`."""
    if _at_load is None:
        return []
    return [name for name, value in _of_torch().items() if _at_load.get(name) != value]


def _of_torch() -> dict[str, str]:
    return {name: os.environ[name] for name in _READ_AT_LOAD if name in os.environ}


def note_joined() -> None:
    """Tell the launcher, by the absence of a file, that this worker has come to the servers."""
    path = os.environ.pop("TRIREME_JOINING", "")
    if os.path.lexists(path):
        os.unlink(path)


def name_network_device(interface: str) -> None:
    """Tell NCCL, and gloo in process groups of the script's own, unless the user has."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface)


def read_facts(env: Mapping[str, str] | None, arguments: Mapping[str, Any]) -> Facts:
    """The facts of the environment (default `os.environ`) and of the arguments, which win. Raises
    BadRequest: an unknown TRIREME_* variable, or variables that contradict each other.
    """
    env = os.environ if env is None else env
    facts = _own_facts(env)
    facts |= {
        key: Fact(value, f"argument {key}") for key, value in arguments.items() if value is not None
    }
    return stated(env, _GPU_VARIABLES) | _family_facts(env, facts) | facts


def names_server(role: str | None) -> bool:
    """Whether an argument, or else the environment, makes this process a server, whatever else they
    state, which may be wrong.
    """
    own = role or os.environ.get("TRIREME_ROLE", "").strip()
    return own == "server" or (not own and os.environ.get("TRAINING_ROLE", "").strip() == "PSERVER")


def unknown_variables(env: Mapping[str, str]) -> dict[str, str]:
    """TRIREME_* variables that have no effect -> the known one that is meant, "" if none is."""
    names = [n for n in sorted(env) if n.startswith("TRIREME_") and not _names_service(env, n)]
    wrong = [name for name in names if name not in VARIABLES and not _names_device(name)]
    return {name: next(iter(difflib.get_close_matches(name, VARIABLES, n=1)), "") for name in wrong}


def job_variables(env: Mapping[str, str]) -> list[str]:
    """Variables that are set and known: Trireme's and Fleet's, which state a place or tune it."""
    own = [name for name in sorted(env) if name in VARIABLES or _names_device(name)]
    return [name for name in (*own, *_FLEET_VARIABLES, *_GPU_VARIABLES) if is_set(env, name)]


def _names_service(env: Mapping[str, str], name: str) -> bool:
    """Kubernetes sets such variables in every pod beside a Service called trireme or trireme-*."""
    service = re.fullmatch(r"(TRIREME\w*?)_(SERVICE_(HOST|PORT)|PORT)(_\w+)?", name)
    return service is not None and f"{service[1]}_SERVICE_HOST" in env


def _names_device(name: str) -> bool:
    label = name.removeprefix(DEVICES).lower()
    return name.startswith(DEVICES) and is_label(label) and name.isupper()


def require(facts: Facts, key: str, process: str, source: str | None = None) -> Fact:
    """The fact `key`. Raises BadRequest with the variables that could state it."""
    if key in facts:
        return facts[key]
    roles = {Fact(role, "TRAINING_ROLE"): name for name, role in _FLEET_ROLES.items()}
    stated = (f"{one.name}={roles.get(one) or as_text(one.value)}" for one in facts.values())
    others = ", ".join(stated)
    is_argument = "role" in facts and facts["role"].name.startswith("argument")
    raise BadRequest(
        f"init: {process} needs {_SOURCES[source or key]}, found none of these, but {others}"
        + ("" if is_argument else "; unset everything to run embedded")
    )


def _own_facts(env: Mapping[str, str]) -> Facts:
    """Facts of the TRIREME_* variables. One with an unknown name would have no effect: an error."""
    for name, near in unknown_variables(env).items():
        hint = f"; did you mean {near}?" if near else ""
        raise BadRequest(
            f"init: expected only known TRIREME_* variables ({', '.join(VARIABLES)}), "
            f"found {name}{hint}"
        )
    devices: dict[str, str] = {}
    for name in sorted(env):
        if _names_device(name) and is_set(env, name):
            devices[name.removeprefix(DEVICES).lower()] = env[name].strip()
    facts = stated(env, {name: fact for name, fact in VARIABLES.items() if fact != "devices"})
    return facts | ({"devices": Fact(devices, f"{DEVICES}*")} if devices else {})


def _family_facts(env: Mapping[str, str], own: Facts) -> Facts:
    """Facts of Fleet's or torchrun's variables that apply to this process."""
    fleet, torchrun = _fleet_facts(env, own), _torchrun_facts(env)
    if fleet and torchrun and "role" not in own:
        names = ", ".join(fact.name for fact in (*fleet.values(), *torchrun.values()))
        raise BadRequest(
            f"init: expected Fleet's variables or torchrun's, found both ({names}); "
            "set TRIREME_ROLE to the role of this process, or unset one family"
        )
    if fleet and torchrun:
        return {}
    facts = fleet or torchrun
    if "role" in own and "role" in facts and own["role"].value != facts["role"].value:
        # Variables of another role: only those about the whole job apply here.
        return {key: fleet[key] for key in ("servers", "num", "heter") if key in fleet}
    return facts


def _fleet_facts(env: Mapping[str, str], own: Facts) -> Facts:
    """Fleet's variables. POD_IP alone states nothing: clusters set it in every container."""
    facts = stated(env, _FLEET_VARIABLES)
    if is_set(env, "PADDLE_PORT"):
        address = f"{env.get('POD_IP', '')}:{env['PADDLE_PORT']}"
        facts["listen"] = Fact(address, "POD_IP:PADDLE_PORT")
    if is_set(env, "PADDLE_TRAINER_ENDPOINTS"):
        _add_endpoints(facts, env["PADDLE_TRAINER_ENDPOINTS"])
    if "role" in facts:
        fleet_role = str(facts["role"].value).strip()
        check_choice("init", _FLEET_ROLES, TRAINING_ROLE=fleet_role)
        facts["role"] = Fact(_FLEET_ROLES[fleet_role], "TRAINING_ROLE")
        # PADDLE_TRAINER_ID is the index of a worker. Others are identified by their address.
        facts.pop("listen" if fleet_role == "TRAINER" else "index", None)
    role = str(facts.get("role", Fact("worker", "")).value)
    facts |= heter_facts(env, role)
    if role == "worker" and "servers" not in facts | own and is_set(env, "PADDLE_CURRENT_ENDPOINT"):
        _add_own_endpoint(facts, env)
    return facts


def _add_own_endpoint(facts: Facts, env: Mapping[str, str]) -> None:
    """Without servers the workers' endpoints are those of the servers that they host."""
    names = {"PADDLE_TRAINER_ENDPOINTS": "servers", "PADDLE_CURRENT_ENDPOINT": "listen"}
    facts |= {"role": Fact("worker", "PADDLE_CURRENT_ENDPOINT"), **stated(env, names)}


def _add_endpoints(facts: Facts, text: str) -> None:
    """Use the length of PADDLE_TRAINER_ENDPOINTS; nothing connects to workers of servers."""
    endpoints = text.split(",")
    num = len(endpoints)
    if not all(endpoint.strip() for endpoint in endpoints):
        raise BadRequest(
            f"init: expected PADDLE_TRAINER_ENDPOINTS as host:port,host:port,..., found {text!r}"
        )
    if "num" not in facts:
        facts["num"] = Fact(num, "PADDLE_TRAINER_ENDPOINTS")
    elif facts["num"].integer(low=1) != num:
        raise BadRequest(
            f"init: expected PADDLE_TRAINERS_NUM to equal the length of PADDLE_TRAINER_ENDPOINTS, "
            f"found {facts['num'].value} and {num} ({text})"
        )


def _torchrun_facts(env: Mapping[str, str]) -> Facts:
    facts = stated(env, {"RANK": "index", "WORLD_SIZE": "num"})
    if not facts:
        return {}
    role = Fact("worker", "/".join(fact.name for fact in facts.values()))
    if is_set(env, "MASTER_ADDR") and is_set(env, "MASTER_PORT"):
        address = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
        facts["master"] = Fact(address, "MASTER_ADDR:MASTER_PORT")
    return {"role": role, **facts, **stated(env, {"TORCHELASTIC_MAX_RESTARTS": "restarts"})}
