"""What this process is: server, worker, or alone with its tables embedded.

The only place in Trireme that reads the environment. Three families of variables say it:

- Trireme's own, `TRIREME_*`, which win over everything but arguments;
- Fleet's (`TRAINING_ROLE`, `PADDLE_*`, `POD_IP`), as PaddleCloudRoleMaker reads them, except that a
  worker needs no address of its own;
- torchrun's `RANK` and `WORLD_SIZE`, which with `TRIREME_SERVERS` make a worker.

Each family is turned into *facts* (role, servers, index, ...), each with the name it came from;
facts are merged by rank, then checked as a whole. An environment that says only half, or says two
things, is an error that names the variables. Only one that says nothing at all is embedded.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast

from trireme.errors import BadRequest
from trireme.telemetry.address import join_address, split_address

RoleName = Literal["server", "worker", "embedded"]

TIMEOUT_S_DEFAULT = 300.0
DURABILITIES = ("none", "process", "machine")

# What each variable of Trireme's own says.
VARIABLES: Mapping[str, str] = {
    "TRIREME_ROLE": "role",
    "TRIREME_SERVERS": "servers",
    "TRIREME_INDEX": "index",
    "TRIREME_NUM_WORKERS": "num",
    "TRIREME_STREAMS": "streams",
    "TRIREME_JOIN": "join",
    "TRIREME_LISTEN": "listen",
    "TRIREME_LISTEN_FD": "listen_fd",
    "TRIREME_TIMEOUT_S": "timeout_s",
    "TRIREME_INSECURE": "insecure",
    "TRIREME_KEYS": "keys",
    "TRIREME_ROOT": "root",
    "TRIREME_DURABILITY": "durability",
    "TRIREME_STATE_DIR": "state_dir",
    "TRIREME_LOG_BYTES": "log_bytes",
    "TRIREME_THREADS": "threads",
    "TRIREME_METRICS": "metrics",
    "TRIREME_LIMITS": "limits",
}

REFUSED = 2
"""The exit code of a process whose command, place or state is wrong."""

# The facts that make a process part of a job; the others only tune it.
_PLACE = ("role", "servers", "index", "num", "join", "listen", "listen_fd")
PLACE_VARIABLES = tuple(name for name, fact in VARIABLES.items() if fact in _PLACE)

# Where a missing fact could have come from, for the message.
_SOURCES = {
    "role": "TRIREME_ROLE (server, worker, embedded) or TRAINING_ROLE (PSERVER, TRAINER)",
    "servers": "TRIREME_SERVERS or PADDLE_PSERVERS_IP_PORT_LIST (host:port,host:port,...)",
    "server address": "an address to listen on (--listen, TRIREME_LISTEN), or its place in a job "
    "(TRIREME_SERVERS and TRIREME_INDEX, or PADDLE_PSERVERS_IP_PORT_LIST, POD_IP and PADDLE_PORT)",
    "worker index": "TRIREME_INDEX, PADDLE_TRAINER_ID or torchrun's RANK",
    "server index": "TRIREME_INDEX or TRIREME_LISTEN, or POD_IP and PADDLE_PORT",
    "num": "TRIREME_NUM_WORKERS, PADDLE_TRAINERS_NUM or torchrun's WORLD_SIZE",
}

_FLEET_ROLES = {"PSERVER": "server", "TRAINER": "worker"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The place of this process in its job.

    A server may have been told its address only: then `servers` is empty, `num_workers` is 0 and
    `index` says nothing (workers tell it the rest). `listen` is the address a server binds;
    `streams` are those that workers share out among themselves, 0 for one of each worker's own; a
    worker that `is_late` joins a job that runs, and hears there which it is.
    `listen_fd` a socket that already listens there, handed over by the launcher, so that no other
    process can take the port in between.
    """

    role: RoleName
    index: int = 0
    num_workers: int = 1
    streams: int = 0
    is_late: bool = False
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
    threads: int | None = None
    metrics: str | None = None
    limits: str | None = None
    source: str = "nothing set"

    def describe(self) -> str:
        """The line printed at start: what this process is, and how that was found."""
        if self.role == "embedded":
            what = "embedded, one process with the tables in its own memory"
        elif self.role == "server":
            plural = "" if self.num_workers == 1 else "s"
            workers = f", {self.num_workers} worker{plural}" if self.num_workers else ""
            which = f"server {self.index} of {len(self.servers)}" if self.servers else "server"
            what = f"{which}, listening on {self.listen}{workers}"
        elif self.is_late:
            what = f"a worker that comes late, servers {', '.join(self.servers)}"
        else:
            what = f"worker {self.index} of {self.num_workers}, servers {', '.join(self.servers)}"
        return f"trireme: {what} ({self.source})"


class _Fact(NamedTuple):
    value: object  # a string out of the environment, or an argument as given
    name: str  # the variable or argument it came from


_Facts = dict[str, _Fact]


def read_role(
    env: Mapping[str, str] | None = None,
    *,
    role: str | None = None,
    servers: str | Sequence[str] | None = None,
    index: int | None = None,
    num: int | None = None,
    streams: int | None = None,
    join: bool | None = None,
    listen: str | None = None,
    timeout_s: float | None = None,
    insecure: bool | None = None,
    keys: str | None = None,
    root: str | None = None,
    durability: str | None = None,
    state_dir: str | None = None,
    log_bytes: int | None = None,
    threads: int | None = None,
    metrics: str | int | None = None,
    limits: str | None = None,
) -> Role:
    """Find out what this process is. Arguments win over the environment (`None`: not given).

    Args:
        env: the environment; default `os.environ`.
        role: "server", "worker" or "embedded".
        servers: all servers as `host:port`, in order: a sequence, or one string with commas.
        index: of this process among those of its role.
        num: number of workers.
        streams: that workers share out among themselves; default: each has its own.
        join: this is a worker that joins a job that runs.
        listen: `host:port` that a server binds; default its entry in `servers`.
        timeout_s: how long to wait for the other processes of the job; > 0.
        insecure: a server may listen beyond loopback without keys, and so may a worker, to the
            others, in a global shuffle.
        keys: folder with the keys of this process.
        root: folder below which a server writes and reads checkpoints.
        durability: what outlives a server: none, process, machine.
        state_dir: folder of this server alone where that is kept.
        log_bytes: by how much the log may grow between snapshots.
        threads: threads of Trireme's own work in this process; default: chosen from the machine.
        metrics: [HOST:]PORT to answer /metrics and /healthz at, port 0 for any; default: nowhere.
        limits: of what peers may make a server hold, as `trireme.protocol.server_limits` reads it.

    Raises:
        BadRequest: the environment says only half, contradicts itself, or holds a value out of
            range; the message names the variables.
    """
    env = os.environ if env is None else env
    given = {
        "role": role,
        "servers": servers,
        "index": index,
        "num": num,
        "streams": streams,
        "join": join,
        "listen": listen,
        "timeout_s": timeout_s,
        "insecure": insecure,
        "keys": keys,
        "root": root,
        "durability": durability,
        "state_dir": state_dir,
        "log_bytes": log_bytes,
        "threads": threads,
        "metrics": metrics,
        "limits": limits,
    }
    facts = _own_facts(env)
    facts |= {key: _Fact(v, f"argument {key}") for key, v in given.items() if v is not None}
    facts = _families(env, facts) | facts
    return _check(facts)


def _own_facts(env: Mapping[str, str]) -> _Facts:
    """Facts of the TRIREME_* variables. One with an unknown name would have no effect: an error."""
    for name in sorted(env):
        if name.startswith("TRIREME_") and name not in VARIABLES:
            near = difflib.get_close_matches(name, VARIABLES, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise BadRequest(
                f"init: expected only known TRIREME_* variables ({', '.join(VARIABLES)}), "
                f"found {name}{hint}"
            )
    return {fact: _Fact(env[name], name) for name, fact in VARIABLES.items() if _is_set(env, name)}


def _is_set(env: Mapping[str, str], name: str) -> bool:
    return bool(env.get(name, "").strip())


def _families(env: Mapping[str, str], own: _Facts) -> _Facts:
    """Facts of Fleet's or torchrun's variables, as far as they speak of this process."""
    fleet, torchrun = _fleet_facts(env), _torchrun_facts(env)
    if fleet and torchrun and "role" not in own:
        names = ", ".join(fact.name for fact in (*fleet.values(), *torchrun.values()))
        raise BadRequest(
            f"init: expected Fleet's variables or torchrun's, found both ({names}); "
            "set TRIREME_ROLE to say which role this process has, or unset one family"
        )
    if fleet and torchrun:
        return {}
    facts = fleet or torchrun
    if "role" in own and "role" in facts and own["role"].value != facts["role"].value:
        # Of another role's variables only what they say about the whole job holds.
        return {key: fleet[key] for key in ("servers", "num") if key in fleet}
    return facts


def _fleet_facts(env: Mapping[str, str]) -> _Facts:
    """Fleet's variables. POD_IP alone says nothing: clusters set it in every container."""
    if _is_set(env, "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST"):
        raise BadRequest(
            "init: expected servers and workers only, found heterogeneous workers in "
            "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST, which are not supported"
        )
    facts = {
        fact: _Fact(env[name], name)
        for fact, name in (
            ("role", "TRAINING_ROLE"),
            ("servers", "PADDLE_PSERVERS_IP_PORT_LIST"),
            ("num", "PADDLE_TRAINERS_NUM"),
            ("index", "PADDLE_TRAINER_ID"),
        )
        if _is_set(env, name)
    }
    if _is_set(env, "PADDLE_PORT"):
        facts["listen"] = _Fact(
            f"{env.get('POD_IP', '')}:{env['PADDLE_PORT']}", "POD_IP:PADDLE_PORT"
        )
    if _is_set(env, "PADDLE_TRAINER_ENDPOINTS"):
        _add_endpoints(facts, env["PADDLE_TRAINER_ENDPOINTS"])
    if "role" in facts:
        spelled = str(facts["role"].value).strip()
        if spelled not in _FLEET_ROLES:
            raise BadRequest(
                f"init: expected TRAINING_ROLE to be one of {', '.join(_FLEET_ROLES)}, "
                f"found {spelled!r}"
            )
        facts["role"] = _Fact(_FLEET_ROLES[spelled], "TRAINING_ROLE")
        # PADDLE_TRAINER_ID numbers workers; a server is known by its address, which workers lack.
        facts.pop("index" if spelled == "PSERVER" else "listen", None)
    return facts


def _add_endpoints(facts: _Facts, text: str) -> None:
    """PADDLE_TRAINER_ENDPOINTS: only its length matters, since workers are not connected to."""
    num = len(text.split(","))
    if "num" not in facts:
        facts["num"] = _Fact(num, "PADDLE_TRAINER_ENDPOINTS")
    elif _integer(facts["num"], low=1) != num:
        raise BadRequest(
            f"init: expected PADDLE_TRAINERS_NUM to equal the length of PADDLE_TRAINER_ENDPOINTS, "
            f"found {facts['num'].value} and {num} ({text})"
        )


def _torchrun_facts(env: Mapping[str, str]) -> _Facts:
    facts = {
        fact: _Fact(env[name], name)
        for fact, name in (("index", "RANK"), ("num", "WORLD_SIZE"))
        if _is_set(env, name)
    }
    return (
        {"role": _Fact("worker", "/".join(f.name for f in facts.values())), **facts}
        if facts
        else {}
    )


def _check(facts: _Facts) -> Role:
    """One Role out of the facts, or an error that names what is missing or contradicts."""
    place = [key for key in _PLACE if key in facts]
    names = dict.fromkeys(name for key in place for name in facts[key].name.split("/"))
    base = Role(
        role="embedded",
        timeout_s=_seconds(facts.get("timeout_s")),
        insecure=_flag(facts.get("insecure")),
        keys=str(facts["keys"].value) if "keys" in facts else None,
        root=str(facts["root"].value) if "root" in facts else None,
        durability=_durability(facts),
        state_dir=str(facts["state_dir"].value) if "state_dir" in facts else None,
        log_bytes=_integer(facts["log_bytes"], low=1) if "log_bytes" in facts else None,
        streams=_integer(facts["streams"], low=1) if "streams" in facts else 0,
        threads=_integer(facts["threads"], low=1) if "threads" in facts else None,
        metrics=_metrics(facts.get("metrics")),
        limits=str(facts["limits"].value) if "limits" in facts else None,
        source="from " + ", ".join(names) if names else "nothing names servers",
    )
    if base.keys is not None and base.insecure:
        raise BadRequest(
            f"init: expected {facts['keys'].name} or {facts['insecure'].name}, found both"
        )
    if not place:
        _refuse_durability(base, facts)
        return base
    name = _need(facts, "role", "a process of a job").value
    if name not in ("server", "worker", "embedded"):
        raise BadRequest(
            f"init: expected {facts['role'].name} to be server, worker or embedded, found {name!r}"
        )
    if name == "embedded":
        return _embedded(facts, base)
    if name == "server" and "servers" not in facts and _listens_alone(facts):
        listen = _address(facts["listen"], low=0)
        return replace(base, role="server", num_workers=0, listen=listen, listen_fd=_fd(facts))
    knows_itself = name == "worker" or "index" in facts or "listen" in facts
    described = "servers" if knows_itself else "server address"
    servers = _servers(_need(facts, "servers", f"a {name}", described))
    return (_server if name == "server" else _worker)(facts, servers, base)


def _listens_alone(facts: _Facts) -> bool:
    """Whether a server was told its address and nothing else, which is all it needs.

    Not so with Fleet's variables: there a missing list of servers is a mistake.
    """
    own = ("argument listen", "TRIREME_LISTEN")
    return "listen" in facts and facts["listen"].name in own and "index" not in facts


def _embedded(facts: _Facts, base: Role) -> Role:
    """An argument may embed a process of a job, which its source then says; a variable may not."""
    _refuse_durability(base, facts)
    role = facts["role"]
    others = ", ".join(facts[key].name for key in _PLACE if key in facts and key != "role")
    if others and not role.name.startswith("argument"):
        raise BadRequest(
            f"init: expected nothing about a job beside {role.name}=embedded, found {others}"
        )
    return replace(base, source=f"from {role.name}" + (f", not {others}" if others else ""))


def _worker(facts: _Facts, servers: tuple[str, ...], base: Role) -> Role:
    if listen := facts.get("listen") or facts.get("listen_fd"):
        raise BadRequest(
            f"init: expected no address to listen on for a worker, "
            f"found {listen.name}={listen.value}"
        )
    if _flag(facts.get("join")):
        return _late(facts, servers, base)
    num_fact = _need(facts, "num", "a worker")
    index_fact = _need(facts, "index", "a worker", "worker index")
    num, index = _integer(num_fact, low=1), _integer(index_fact, low=0)
    if index >= num:
        raise BadRequest(
            f"init: expected {index_fact.name} below {num_fact.name} = {num}, found {index}"
        )
    return replace(base, role="worker", index=index, num_workers=num, servers=servers)


def _late(facts: _Facts, servers: tuple[str, ...], base: Role) -> Role:
    for key in ("index", "num", "streams"):
        if key in facts:
            raise BadRequest(
                f"init: expected nothing but the servers of a worker that joins a job"
                f" ({facts['join'].name}), which says the rest, found {facts[key].name}"
            )
    return replace(base, role="worker", is_late=True, num_workers=0, servers=servers)


def _server(facts: _Facts, servers: tuple[str, ...], base: Role) -> Role:
    listen = _address(facts["listen"]) if "listen" in facts else None
    index = _server_index(facts, servers, listen)
    return replace(
        base,
        role="server",
        index=index,
        num_workers=_integer(facts["num"], low=1) if "num" in facts else 0,
        servers=servers,
        listen=listen or servers[index],
        listen_fd=_fd(facts),
    )


def _fd(facts: _Facts) -> int | None:
    return _integer(facts["listen_fd"], low=3) if "listen_fd" in facts else None


def _server_index(facts: _Facts, servers: tuple[str, ...], listen: str | None) -> int:
    if "index" in facts or listen is None:
        fact = _need(facts, "index", "a server", "server index")
        index = _integer(fact, low=0)
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


def _need(facts: _Facts, key: str, who: str, described: str | None = None) -> _Fact:
    if key in facts:
        return facts[key]
    found = ", ".join(f"{f.name}={_show(f.value)}" for f in facts.values())
    chosen = "role" in facts and facts["role"].name.startswith("argument")
    raise BadRequest(
        f"init: {who} needs {_SOURCES[described or key]}, found none of these, but {found}"
        + ("" if chosen else "; unset everything to run embedded")
    )


def _show(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def _servers(fact: _Fact) -> tuple[str, ...]:
    value = fact.value
    parts = value.split(",") if isinstance(value, str) else list(cast("Sequence[str]", value))
    servers = tuple(_address(_Fact(part, fact.name)) for part in parts)
    if not servers or len(set(servers)) != len(servers):
        raise BadRequest(
            f"init: expected {fact.name} to list different host:port addresses, "
            f"found {_show(value)!r}"
        )
    return servers


def _address(fact: _Fact, *, low: int = 1) -> str:
    """`host:port`, stripped. Port 0 only where it is to be chosen: nobody could connect to it."""
    text = str(fact.value).strip()
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not low <= int(port) < 65536:
        raise BadRequest(
            f"init: expected host:port with a port of {low} to 65535 in {fact.name}, found {text!r}"
        )
    return f"{host}:{int(port)}"


def _integer(fact: _Fact, *, low: int) -> int:
    text = str(fact.value).strip()
    if not text.isdecimal() or int(text) < low:
        raise BadRequest(f"init: expected {fact.name} to be an integer >= {low}, found {text!r}")
    return int(text)


def _durability(facts: _Facts) -> str:
    fact = facts.get("durability")
    mode = "none" if fact is None else str(fact.value).strip()
    if fact is not None and mode not in DURABILITIES:
        raise BadRequest(
            f"init: expected {fact.name} to be one of {', '.join(DURABILITIES)}, found {mode!r}"
        )
    return mode


def _refuse_durability(base: Role, facts: _Facts) -> None:
    if base.durability != "none":
        raise BadRequest(
            f"init: expected servers for {facts['durability'].name}={base.durability}, found tables"
            " embedded in this process, which end with it; save checkpoints, or start the script"
            " with trireme launch"
        )


def _seconds(fact: _Fact | None) -> float:
    if fact is None:
        return TIMEOUT_S_DEFAULT
    try:
        seconds = float(str(fact.value))
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise BadRequest(f"init: expected {fact.name} to be seconds > 0, found {fact.value!r}")
    return seconds


def _metrics(fact: _Fact | None) -> str | None:
    """`host:port`, loopback where no host is named; None: nowhere."""
    if fact is None:
        return None
    try:
        return join_address(*split_address(str(fact.value)))
    except BadRequest:
        raise BadRequest(
            f"init: expected {fact.name} to be [HOST:]PORT with a port up to 65535,"
            f" found {fact.value!r}"
        ) from None


def _flag(fact: _Fact | None) -> bool:
    if fact is None:
        return False
    if isinstance(fact.value, bool):
        return fact.value
    if str(fact.value) not in ("0", "1"):
        raise BadRequest(f"init: expected {fact.name} to be 0 or 1, found {fact.value!r}")
    return fact.value == "1"
