"""The role of this process: server, worker, or embedded, which is everything in one process.

An environment that states only half of a place in a job, or two different places, is an error that
names the variables. Only an environment that states nothing means embedded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from trireme.errors import BadRequest
from trireme.launch.environment import PLACE, VARIABLES, Fact, Facts, as_text, read_facts, require
from trireme.telemetry.address import join_address, split_address

RoleName = Literal["server", "worker", "embedded"]

TIMEOUT_S_DEFAULT = 300.0
DURABILITIES = ("none", "process", "machine")
REFUSED = 2
"""The exit code of a process whose command, place or state is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRole:
    """The place of this process in its job.

    A server may know only its address. Then `servers` is empty, `num_workers` is 0 and `index` has
    no meaning; workers send the rest.

    Attributes:
        streams: number of streams that the workers share; 0: each worker has its own.
        is_late: a worker that joins a running job, which assigns its index.
        hosts: a worker whose process hosts the server of its part of the rows.
        master: where such workers tell each other their addresses, if `servers` does not list them.
        local_num: how many workers of torchrun are on this machine; 0: unknown.
        listen: the address that a server binds.
        gpu: place among the visible ones of the GPU that this process must use; None: not stated.
        local_index: of it among the processes of this machine that share its GPUs, or None.
        listen_fd: a socket that listens there already. The launcher passes it on, so that no other
            process can take the port in between.
    """

    role: RoleName
    index: int = 0
    num_workers: int = 1
    streams: int = 0
    is_late: bool = False
    hosts: bool = False
    master: str | None = None
    local_num: int = 0
    local_index: int | None = None
    servers: tuple[str, ...] = ()
    listen: str | None = None
    listen_fd: int | None = None
    timeout_s: float = TIMEOUT_S_DEFAULT
    insecure: bool = False
    keys: str | None = None
    root: str | None = None
    durability: str = "none"
    state_dir: str | None = None
    log_bytes: int | None = None
    skip_records: str | None = None
    threads: int | None = None
    metrics: str | None = None
    limits: str | None = None
    memory: str | None = None
    ssd_dir: str | None = None
    store_hosts: str | None = None
    device_gpu: str | None = None
    interface: str | None = None
    gpu: int | None = None
    source: str = "nothing set"

    def describe(self) -> str:
        """The line printed at start: the role, and the variables that state it."""
        if self.role == "embedded":
            what = "embedded, one process with the tables in its own memory"
        elif self.role == "server":
            plural = "" if self.num_workers == 1 else "s"
            workers = f", {self.num_workers} worker{plural}" if self.num_workers else ""
            which = f"server {self.index} of {len(self.servers)}" if self.servers else "server"
            what = f"{which}, listening on {self.listen}{workers}"
        elif self.hosts:
            where = f"listening on {self.listen}" if self.listen else f"meeting at {self.master}"
            what = f"worker {self.index} of {self.num_workers}, which host the rows, {where}"
        elif self.is_late:
            what = f"a late worker, servers {', '.join(self.servers)}"
        else:
            what = f"worker {self.index} of {self.num_workers}, servers {', '.join(self.servers)}"
        return f"trireme: {what} ({self.source})"


def read_role(env: Mapping[str, str] | None = None, **arguments: Any) -> ProcessRole:
    """The role of this process, from the environment (default: its own) and from arguments.

    Args:
        arguments: facts, which win over the environment; None: not stated. Besides those of
            `trireme.init`:
            listen: `host:port` that a server binds; default its entry in `servers`.
            insecure: servers may listen beyond loopback without keys, and so may workers, which
                connect to each other in a global shuffle.
            root: folder below which a server writes and reads checkpoints.
            durability: what survives a server: none, process, machine.
            state_dir: folder of this server alone for that state.
            log_bytes: growth of the log between two snapshots.
            skip_records: records of the log to leave out if they fail, as FILE:OFFSET,...
            threads: threads of Trireme's own work; default: chosen from the machine.
            limits: bounds on what peers may make a server hold, see trireme.server.server_limits.
            memory: bytes that the tables take in memory, such as 20GiB.
            ssd_dir: folders for the rows beyond that, as PATH,...
            store_hosts: hosts of stores that peers may name, see trireme.server.store_hosts.
            device_gpu: the device that stands in for the label gpu, such as cpu.
            interface: the network device at whose address other processes reach this one.

    Raises:
        BadRequest: the environment states only half, contradicts itself, or holds a value out of
            range; the message names the variables. TypeError: an unknown argument.
    """
    if unknown := arguments.keys() - set(VARIABLES.values()):
        raise TypeError(f"read_role: expected facts of a role, found {sorted(unknown)}")
    facts = read_facts(env, arguments)
    place = [key for key in PLACE if key in facts]
    base = _base_role(facts, place)
    if "role" not in facts or facts["role"].value != "server":
        base = replace(base, gpu=_gpu(facts))
    if base.keys is not None and base.insecure:
        raise BadRequest(
            f"init: expected {facts['keys'].name} or {facts['insecure'].name}, found both"
        )
    if not place:
        _refuse_durability(base, facts)
        return base
    name = require(facts, "role", "a process of a job").value
    if name not in ("server", "worker", "embedded"):
        raise BadRequest(
            f"init: expected {facts['role'].name} to be server, worker or embedded, found {name!r}"
        )
    if name == "embedded":
        return _embedded(facts, base)
    if name == "server" and "servers" not in facts and _knows_only_its_address(facts):
        address = _address(facts["listen"], low=0)
        fd = _optional_integer(facts, "listen_fd", low=3)
        return replace(base, role="server", num_workers=0, listen=address, listen_fd=fd)
    if name == "worker" and "servers" not in facts and "master" in facts:
        return _rank(facts, base)
    has_place = name == "worker" or "index" in facts or "listen" in facts
    source = "servers" if has_place else "server address"
    addresses = _addresses(require(facts, "servers", f"a {name}", source))
    return (_server if name == "server" else _worker)(facts, addresses, base)


def _base_role(facts: Facts, place: Sequence[str]) -> ProcessRole:
    """What does not depend on the place in a job."""
    names = dict.fromkeys(name for key in place for name in facts[key].name.split("/"))
    return ProcessRole(
        role="embedded",
        timeout_s=_seconds(facts.get("timeout_s")),
        insecure=_flag(facts.get("insecure")),
        keys=_optional_text(facts, "keys"),
        root=_optional_text(facts, "root"),
        durability=_durability(facts.get("durability")),
        state_dir=_optional_text(facts, "state_dir"),
        log_bytes=_optional_integer(facts, "log_bytes", low=1),
        skip_records=_optional_text(facts, "skip_records"),
        streams=_optional_integer(facts, "streams", low=1) or 0,
        threads=_optional_integer(facts, "threads", low=1),
        metrics=_metrics_address(facts.get("metrics")),
        limits=_optional_text(facts, "limits"),
        memory=_optional_text(facts, "memory"),
        ssd_dir=_optional_text(facts, "ssd_dir"),
        store_hosts=_optional_text(facts, "store_hosts"),
        device_gpu=_optional_text(facts, "device_gpu"),
        interface=_optional_text(facts, "interface"),
        local_index=_optional_integer(facts, "local_index", low=0),
        local_num=_optional_integer(facts, "local_num", low=1) or 0,
        source="from " + ", ".join(names) if names else "nothing names servers",
    )


def _knows_only_its_address(facts: Facts) -> bool:
    """Whether a server got its address and nothing else, which is all it needs.

    With Fleet's variables a missing list of servers is a mistake instead.
    """
    own = ("argument listen", "TRIREME_LISTEN")
    return "listen" in facts and facts["listen"].name in own and "index" not in facts


def _embedded(facts: Facts, base: ProcessRole) -> ProcessRole:
    """An argument may embed a process of a job, and `source` shows it. A variable may not."""
    _refuse_durability(base, facts)
    role = facts["role"]
    others = ", ".join(facts[key].name for key in PLACE if key in facts and key != "role")
    if others and not role.name.startswith("argument"):
        raise BadRequest(
            f"init: expected nothing about a job beside {role.name}=embedded, found {others}"
        )
    return replace(base, source=f"from {role.name}" + (f", not {others}" if others else ""))


def _refuse_durability(base: ProcessRole, facts: Facts) -> None:
    if base.durability != "none":
        raise BadRequest(
            f"init: expected servers for {facts['durability'].name}={base.durability}, found tables"
            " embedded in this process, which end with it; save checkpoints, or start the script"
            " with trireme launch"
        )


def _worker(facts: Facts, servers: tuple[str, ...], base: ProcessRole) -> ProcessRole:
    if _flag(facts.get("join")):
        return _late_worker(facts, servers, base)
    index, num = _worker_index(facts)
    role = replace(base, role="worker", index=index, num_workers=num, servers=servers)
    listen = facts.get("listen") or facts.get("listen_fd")
    if listen is None:
        return role
    if "listen" not in facts or servers[index : index + 1] != (_address(listen),):
        raise BadRequest(
            "init: expected no address to listen on for a worker, except its own in the list of"
            f" servers that workers host, found {listen.name}={listen.value}"
        )
    _refuse_without_servers(role, facts, len(servers))
    fd = _optional_integer(facts, "listen_fd", low=3)
    return replace(role, hosts=True, listen=servers[index], listen_fd=fd)


def _rank(facts: Facts, base: ProcessRole) -> ProcessRole:
    """A worker of torchrun's variables alone; one that is alone in its job is embedded."""
    index, num = _worker_index(facts)
    if num == 1:
        _refuse_durability(base, facts)
        return base
    role = replace(base, role="worker", index=index, num_workers=num, hosts=True)
    _refuse_without_servers(role, facts, num)
    return replace(role, master=str(facts["master"].value))


def _refuse_without_servers(role: ProcessRole, facts: Facts, num_servers: int) -> None:
    """Refuse what workers that host the rows cannot do."""
    if num_servers != role.num_workers:
        raise BadRequest(
            f"init: expected as many servers as workers where workers host them, found"
            f" {num_servers} and {role.num_workers}"
        )
    if role.streams:
        raise BadRequest(
            f"init: expected servers for {facts['streams'].name}={role.streams}, found workers that"
            " host the rows, and may not come and go"
        )
    _refuse_durability(role, facts)


def _worker_index(facts: Facts) -> tuple[int, int]:
    """(index, number of workers)."""
    num_fact = require(facts, "num", "a worker")
    index_fact = require(facts, "index", "a worker", "worker index")
    num, index = num_fact.integer(low=1), index_fact.integer(low=0)
    if index >= num:
        raise BadRequest(
            f"init: expected {index_fact.name} below {num_fact.name} = {num}, found {index}"
        )
    return index, num


def _late_worker(facts: Facts, servers: tuple[str, ...], base: ProcessRole) -> ProcessRole:
    for key in ("index", "num", "streams", "listen", "listen_fd"):
        if key in facts:
            raise BadRequest(
                f"init: expected only the servers for a worker that joins a job"
                f" ({facts['join'].name}), which assigns the rest, found {facts[key].name}"
            )
    return replace(base, role="worker", is_late=True, num_workers=0, servers=servers)


def _server(facts: Facts, servers: tuple[str, ...], base: ProcessRole) -> ProcessRole:
    listen = _address(facts["listen"]) if "listen" in facts else None
    index = _server_index(facts, servers, listen)
    return replace(
        base,
        role="server",
        index=index,
        num_workers=_optional_integer(facts, "num", low=1) or 0,
        servers=servers,
        listen=listen or servers[index],
        listen_fd=_optional_integer(facts, "listen_fd", low=3),
    )


def _server_index(facts: Facts, servers: tuple[str, ...], listen: str | None) -> int:
    if "index" in facts or listen is None:
        fact = require(facts, "index", "a server", "server index")
        index = fact.integer(low=0)
        if index >= len(servers):
            raise BadRequest(
                f"init: expected {fact.name} below the number of servers in "
                f"{facts['servers'].name} = {len(servers)}, found {index}"
            )
        return index
    if listen not in servers:
        raise BadRequest(
            f"init: expected {facts['listen'].name} to be listed in {facts['servers'].name} = "
            f"{','.join(servers)}, found {listen}; set TRIREME_INDEX if others reach it by another "
            "address"
        )
    return servers.index(listen)


def _addresses(fact: Fact) -> tuple[str, ...]:
    value = fact.value
    parts = value.split(",") if isinstance(value, str) else list(cast("Sequence[str]", value))
    servers = tuple(_address(Fact(part, fact.name)) for part in parts)
    if not servers or len(set(servers)) != len(servers):
        raise BadRequest(
            f"init: expected {fact.name} to list different host:port addresses, "
            f"found {as_text(value)!r}"
        )
    return servers


def _address(fact: Fact, *, low: int = 1) -> str:
    """`host:port`. Port 0 is allowed only where a free one is chosen: nobody can connect to it."""
    text = str(fact.value).strip()
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not low <= int(port) < 65536:
        raise BadRequest(
            f"init: expected host:port with a port of {low} to 65535 in {fact.name}, found {text!r}"
        )
    return f"{host}:{int(port)}"


def _optional_text(facts: Facts, key: str) -> str | None:
    return str(facts[key].value) if key in facts else None


def _optional_integer(facts: Facts, key: str, *, low: int) -> int | None:
    return facts[key].integer(low=low) if key in facts else None


def _gpu(facts: Facts) -> int | None:
    if "gpu" in facts and "," in str(facts["gpu"].value):
        raise BadRequest(
            f"init: expected one GPU for a process in {facts['gpu'].name}, found"
            f" {facts['gpu'].value}; trireme launch --gpus starts a worker for each"
        )
    return _optional_integer(facts, "gpu", low=0)


def _durability(fact: Fact | None) -> str:
    mode = "none" if fact is None else str(fact.value).strip()
    if fact is not None and mode not in DURABILITIES:
        raise BadRequest(
            f"init: expected {fact.name} to be one of {', '.join(DURABILITIES)}, found {mode!r}"
        )
    return mode


def _seconds(fact: Fact | None) -> float:
    if fact is None:
        return TIMEOUT_S_DEFAULT
    try:
        seconds = float(str(fact.value))
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise BadRequest(f"init: expected {fact.name} to be seconds > 0, found {fact.value!r}")
    return seconds


def _metrics_address(fact: Fact | None) -> str | None:
    """`host:port`, loopback where no host is named."""
    if fact is None:
        return None
    try:
        return join_address(*split_address(str(fact.value)))
    except BadRequest:
        raise BadRequest(
            f"init: expected {fact.name} to be [HOST:]PORT with a port up to 65535,"
            f" found {fact.value!r}"
        ) from None


def _flag(fact: Fact | None) -> bool:
    if fact is None:
        return False
    if isinstance(fact.value, bool):
        return fact.value
    if str(fact.value) not in ("0", "1"):
        raise BadRequest(f"init: expected {fact.name} to be 0 or 1, found {fact.value!r}")
    return fact.value == "1"
