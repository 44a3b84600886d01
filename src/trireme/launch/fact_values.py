"""The values of facts: numbers, addresses and flags, checked, with the name of the variable."""

import re
from collections.abc import Sequence
from typing import cast

from trireme.errors import BadRequest, check_choice
from trireme.label import is_label
from trireme.launch.stated_facts import Fact, Facts, as_text
from trireme.protocol.job_limits import SECONDS_MAX
from trireme.telemetry.address import join_address, split_address

TIMEOUT_S_DEFAULT = 300.0
# A name or an IPv4 address, or an IPv6 address in brackets: not several, and no URL.
_HOST = re.compile(r"[^\s\[\]:;,/=@]+|\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]")
DURABILITIES = ("none", "process", "machine")


def to_addresses(fact: Fact) -> tuple[str, ...]:
    value = fact.value
    parts = value.split(",") if isinstance(value, str) else list(cast("Sequence[str]", value))
    servers = tuple(to_address(Fact(part, fact.name)) for part in parts)
    if not servers or len(set(servers)) != len(servers):
        raise BadRequest(
            f"init: expected {fact.name} to list different host:port addresses, "
            f"found {as_text(value)!r}"
        )
    return servers


def to_compute_workers(fact: Fact) -> tuple[tuple[str, str], ...]:
    """(label, "host:port") of each compute worker, from `label=host:port,label=host:port`."""
    text = str(fact.value)
    pairs = [part.strip().partition("=") for part in text.split(",")]
    if wrong := [label + sign for label, sign, _ in pairs if not sign or not is_label(label)]:
        raise BadRequest(
            f"init: expected {fact.name} as label=host:port,... with labels such as gpu, found"
            f" {wrong[0]!r} in {text!r}"
        )
    addresses = to_addresses(Fact([address for *_, address in pairs], fact.name))
    return tuple((label, a) for (label, *_), a in zip(pairs, addresses, strict=True))


def to_address(fact: Fact, *, low: int = 1) -> str:
    """`host:port`. Port 0 is allowed only where a free one is chosen: nobody can connect to it."""
    text = str(fact.value).strip()
    host, _, port = text.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and low <= int(port) < 65536
    if not _HOST.fullmatch(host) or not is_port:
        raise BadRequest(
            f"init: expected host:port with a port of {low} to 65535 in {fact.name}, found {text!r}"
        )
    return f"{host}:{int(port)}"


def optional_text(facts: Facts, key: str) -> str | None:
    return str(facts[key].value) if key in facts else None


def optional_integer(facts: Facts, key: str, *, low: int) -> int | None:
    return facts[key].integer(low=low) if key in facts else None


def to_gpu(facts: Facts) -> int | None:
    if "gpu" in facts and "," in str(facts["gpu"].value):
        raise BadRequest(
            f"init: expected one GPU for a process in {facts['gpu'].name}, found"
            f" {facts['gpu'].value}; trireme launch --gpus starts a worker for each"
        )
    return optional_integer(facts, "gpu", low=0)


def to_durability(fact: Fact | None) -> str:
    mode = "none" if fact is None else str(fact.value).strip()
    if fact is not None:
        check_choice("init", DURABILITIES, **{fact.name: mode})
    return mode


def to_seconds(fact: Fact | None) -> float:
    if fact is None:
        return TIMEOUT_S_DEFAULT
    try:
        seconds = float(str(fact.value))
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise BadRequest(f"init: expected {fact.name} to be seconds > 0, found {fact.value!r}")
    if seconds > SECONDS_MAX:
        raise BadRequest(
            f"init: expected {fact.name} to be at most {SECONDS_MAX:g} s, found {fact.value!r}"
        )
    return seconds


def to_metrics_address(fact: Fact | None) -> str | None:
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


def to_flag(fact: Fact | None) -> bool:
    if fact is None:
        return False
    if isinstance(fact.value, bool):
        return fact.value
    if str(fact.value) not in ("0", "1"):
        raise BadRequest(f"init: expected {fact.name} to be 0 or 1, found {fact.value!r}")
    return fact.value == "1"
