"""The role of this process: server, worker, compute worker of a heterogeneous job (heter), or
embedded, which is everything in one process.

An environment that states only half of a place in a job, or two different places, is an error that
names the variables. Only an environment that states nothing means embedded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from trireme.errors import BadRequest, check_choice
from trireme.launch.environment import PLACE, VARIABLES, read_facts, require
from trireme.launch.fact_values import (
    TIMEOUT_S_DEFAULT,
    optional_integer,
    optional_text,
    to_address,
    to_addresses,
    to_compute_workers,
    to_durability,
    to_flag,
    to_gpu,
    to_metrics_address,
    to_seconds,
)
from trireme.launch.stated_facts import Facts

RoleName = Literal["server", "worker", "heter", "embedded"]
ROLES = ("server", "worker", "heter", "embedded")
# Facts that are texts, which others check when they use them.
_TEXTS = (
    *("keys", "root", "state_dir", "skip_records", "limits", "memory", "ssd_dir"),
    *("store_hosts", "interface"),
)

REFUSED = 2
"""The exit code of a process whose command, place or state is wrong."""

STOPPED = 143
"""The exit code of a launched server or compute worker that a signal has ended before its job was
over."""


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
        ends_at_sigterm: a worker of torchrun, which restarts all of them when one has died, and
            ends the others with SIGTERM: that does not ask the job to stop.
        local_num: how many workers of torchrun are on this machine; 0: unknown.
        label: of a compute worker, the kind that it is, such as gpu.
        heter: (label, "host:port") of every compute worker of the job, in order. `index` of one is
            its place among them.
        listen: the address that a server or compute worker binds.
        devices: (label, device of torch that it stands for here), such as ("gpu", "cpu").
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
    ends_at_sigterm: bool = False
    local_num: int = 0
    local_index: int | None = None
    servers: tuple[str, ...] = ()
    label: str = ""
    heter: tuple[tuple[str, str], ...] = ()
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
    devices: tuple[tuple[str, str], ...] = ()
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
        elif self.role == "heter":
            workers = f"{self.num_workers} worker{'' if self.num_workers == 1 else 's'}"
            what = f"compute worker {self.index} of {len(self.heter)}, {self.label}, listening on"
            what += f" {self.listen}, for {workers}, servers {', '.join(self.servers)}"
        else:
            what = f"worker {self.index} of {self.num_workers}, servers {', '.join(self.servers)}"
            if self.heter:
                what += ", compute workers " + ", ".join(
                    f"{a} ({label})" for label, a in self.heter
                )
        return f"trireme: {what} ({self.source})"


def read_role(env: Mapping[str, str] | None = None, **arguments: Any) -> ProcessRole:
    """The role of this process, from the environment (default: its own) and from arguments.

    Args:
        arguments: facts, which win over the environment; None: not stated. Besides those of
            `trireme.init`:
            label: of a compute worker; default that of its entry in `heter`.
            listen: `host:port` that a server or compute worker binds; default its entry in
                `servers` or `heter`.
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
            devices: label -> the device that it stands for in this process, as {"gpu": "cpu"}.
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
        base = replace(base, gpu=to_gpu(facts))
    if base.keys is not None and base.insecure:
        raise BadRequest(
            f"init: expected {facts['keys'].name} or {facts['insecure'].name}, found both"
        )
    if not place:
        _refuse_durability(base, facts)
        return base
    name = require(facts, "role", "a process of a job").value
    check_choice("init", ROLES, **{facts["role"].name: name})
    if name == "embedded":
        return _embedded(facts, base)
    if "label" in facts and name != "heter":
        raise BadRequest(
            f"init: expected no label of a {name}, found {facts['label'].name}="
            f"{facts['label'].value}, which is of a compute worker (TRIREME_ROLE=heter)"
        )
    if to_flag(facts.get("join")) and not (name == "worker" and "servers" in facts):
        raise BadRequest(
            "init: expected only workers that know the servers to join a job"
            f" ({facts['join'].name}), found a {name}; TRIREME_SERVERS names the servers"
        )
    if "heter" in facts:
        base = replace(base, heter=to_compute_workers(facts["heter"]))
    if name == "server" and "servers" not in facts and _knows_only_its_address(facts):
        address = to_address(facts["listen"], low=0)
        fd = optional_integer(facts, "listen_fd", low=3)
        return replace(base, role="server", num_workers=0, listen=address, listen_fd=fd)
    if name == "worker" and "servers" not in facts and "master" in facts:
        return _rank(facts, base)
    has_place = name == "worker" or "index" in facts or "listen" in facts
    source = "servers" if has_place else "server address"
    addresses = to_addresses(require(facts, "servers", f"a {name}", source))
    roles = {"server": _server, "worker": _worker, "heter": _compute_worker}
    return roles[str(name)](facts, addresses, base)


def _base_role(facts: Facts, place: Sequence[str]) -> ProcessRole:
    """What does not depend on the place in a job."""
    names = dict.fromkeys(name for key in place for name in facts[key].name.split("/"))
    devices = cast("dict[str, str]", facts["devices"].value if "devices" in facts else {})
    texts: dict[str, Any] = {name: optional_text(facts, name) for name in _TEXTS}
    return ProcessRole(
        **texts,
        role="embedded",
        timeout_s=to_seconds(facts.get("timeout_s")),
        insecure=to_flag(facts.get("insecure")),
        durability=to_durability(facts.get("durability")),
        log_bytes=optional_integer(facts, "log_bytes", low=1),
        streams=optional_integer(facts, "streams", low=1) or 0,
        threads=optional_integer(facts, "threads", low=1),
        metrics=to_metrics_address(facts.get("metrics")),
        devices=tuple(devices.items()),
        local_index=optional_integer(facts, "local_index", low=0),
        ends_at_sigterm=bool(optional_integer(facts, "restarts", low=0)),
        local_num=optional_integer(facts, "local_num", low=1) or 0,
        source="from " + ", ".join(names) if names else "no servers are configured",
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
    if to_flag(facts.get("join")):
        return _late_worker(facts, servers, base)
    index, num = _worker_index(facts)
    role = replace(base, role="worker", index=index, num_workers=num, servers=servers)
    listen = facts.get("listen") or facts.get("listen_fd")
    if listen is None:
        return role
    if "listen" not in facts or servers[index : index + 1] != (to_address(listen),):
        raise BadRequest(
            "init: expected no address to listen on for a worker, except its own in the list of"
            f" servers that workers host, found {listen.name}={listen.value}"
        )
    _refuse_without_servers(role, facts, len(servers))
    fd = optional_integer(facts, "listen_fd", low=3)
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
    if role.heter:
        raise BadRequest(
            f"init: expected servers with compute workers ({facts['heter'].name}), found workers"
            " that host the rows"
        )
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
    for key in ("index", "num", "streams", "heter", "listen", "listen_fd"):
        if key in facts:
            raise BadRequest(
                f"init: expected only the servers for a worker that joins a job"
                f" ({facts['join'].name}), which assigns the rest, found {facts[key].name}"
            )
    return replace(base, role="worker", is_late=True, num_workers=0, servers=servers)


def _server(facts: Facts, servers: tuple[str, ...], base: ProcessRole) -> ProcessRole:
    listen = to_address(facts["listen"]) if "listen" in facts else None
    index = _own_index(facts, "servers", servers, listen)
    return replace(
        base,
        role="server",
        index=index,
        num_workers=optional_integer(facts, "num", low=1) or 0,
        servers=servers,
        listen=listen or servers[index],
        listen_fd=optional_integer(facts, "listen_fd", low=3),
    )


def _compute_worker(facts: Facts, servers: tuple[str, ...], base: ProcessRole) -> ProcessRole:
    heter = require(facts, "heter", "a compute worker")
    listen = to_address(facts["listen"]) if "listen" in facts else None
    index = _own_index(facts, "heter", [address for _, address in base.heter], listen)
    label, address = base.heter[index]
    if "label" in facts and facts["label"].value != label:
        raise BadRequest(
            f"init: expected {facts['label'].name} to be the label of compute worker {index} in"
            f" {heter.name}, {label}, found {facts['label'].value};"
            " TRIREME_HETER=label=host:port,... gives each its label, in every process of the job"
        )
    return replace(
        base,
        role="heter",
        index=index,
        num_workers=require(facts, "num", "a compute worker").integer(low=1),
        servers=servers,
        label=label,
        listen=listen or address,
        listen_fd=optional_integer(facts, "listen_fd", low=3),
    )


def _own_index(facts: Facts, listed: str, addresses: Sequence[str], listen: str | None) -> int:
    """The place of a server or compute worker in the list of its kind. listed: the fact with it."""
    noun = {"servers": "server", "heter": "compute worker"}[listed]
    if "index" in facts or listen is None:
        fact = require(facts, "index", f"a {noun}", "server index")
        index = fact.integer(low=0)
        if index >= len(addresses):
            raise BadRequest(
                f"init: expected {fact.name} below the number of {noun}s in "
                f"{facts[listed].name} = {len(addresses)}, found {index}"
            )
        if listen in addresses and addresses.index(listen) != index:
            raise BadRequest(
                f"init: expected {fact.name} and {facts['listen'].name} to be one place in"
                f" {facts[listed].name} = {','.join(addresses)}, found {index} and {listen}"
            )
        return index
    if listen not in addresses:
        raise BadRequest(
            f"init: expected {facts['listen'].name} to be listed in {facts[listed].name} = "
            f"{','.join(addresses)}, found {listen}; set TRIREME_INDEX if others reach it by "
            "another address"
        )
    return addresses.index(listen)
