"""What is the same for all workers of a job: facts on which they agree, and the bucket map.

The first worker fixes a fact; the others must report the same value.
"""

import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import xxhash

from trireme.errors import BadRequest, Corruption, NotReady, SchemaMismatch
from trireme.protocol.block_messages import ids_from_wire, map_from_kept, map_to_kept, map_to_wire
from trireme.protocol.compute_addresses import (
    ComputeAddresses,
    addresses_from_wire,
    addresses_to_wire,
)
from trireme.protocol.routing import BucketMap
from trireme.protocol.wire import Arrays, need, need_list
from trireme.rpc import HeldBytes, Reply, Request
from trireme.storage.document import Part

FACTS_MAX = 64
_OPTION = "job "  # before the names of facts that are options of the job
_RECOVERED = (
    "; this server continues from its --state_dir: start the job as it was (--servers), or another"
    " one with another folder"
)


class Facts:
    """Facts of one job. job: its id, drawn at random. bucket_map: None until the first worker has
    joined. server_states: per server a name that changes when it loses its state; empty at first.
    compute_workers: as the last worker that was started with them has told.
    """

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self.job = uuid.uuid4().hex
        self.bucket_map: BucketMap | None = None
        self._facts: dict[str, Any] = {}
        self.server_states: list[str] = []
        self.compute_workers: ComputeAddresses = ()
        self._kept_map: Part | None = None
        self._added = b""  # digest of the last request whose blocks the map has
        self._hint = ""  # appended to errors

    @property
    def num_workers(self) -> int:
        """Workers that the job begins with; 0 until the first has joined."""
        return int(self._facts.get("num_workers", 0))

    @property
    def num_streams(self) -> int:
        """Leased streams of each pass; 0: none are leased."""
        return int(self._facts["streams"])

    def agree(self, fact: str, value: Any, worker: int) -> None:
        """Fix a fact. Raises SchemaMismatch if it has another value."""
        known = self._facts.setdefault(fact, value)
        if known != value:
            raise SchemaMismatch(
                f"coordinator: {fact} is {known!r} for this job, worker {worker} has {value!r}"
                f"{self._hint}"
            )

    def agree_on_option(self, name: str, value: str, worker: int, *, takes_part: bool) -> None:
        """Fix an option of the job, such as its strategy. Only workers that take part fix one."""
        fact = f"{_OPTION}{name}"
        if fact not in self._facts:
            if not takes_part:
                raise NotReady(f"coordinator: no worker that takes part has set its {name} yet")
            if len(self._facts) >= FACTS_MAX:
                raise BadRequest(
                    f"coord.agree: expected at most {FACTS_MAX} facts, found {fact!r}, too"
                )
            self._held.hold(("fact", fact), len(fact) + len(value))
        self.agree(fact, value, worker)

    def on_states(self, worker: int, request: Request) -> Reply:
        """Check that no server has lost its state since the first worker reported it."""
        del worker
        states = need_list(request.body, "states", str)
        num_servers = len(self._facts["servers"])
        if len(states) != num_servers:
            raise BadRequest(
                f"coord.states: expected those of {num_servers} servers, found {len(states)}"
            )
        self.server_states = self.server_states or states
        for server, (known, reported) in enumerate(zip(self.server_states, states, strict=True)):
            if known != reported:
                raise Corruption(f"coordinator: server {server} has lost its state")
        return Reply()

    def begin_map(self, servers: tuple[str, ...]) -> BucketMap:
        """The map; the first worker's servers get even shares."""
        if self.bucket_map is None:
            self._use(BucketMap.even(servers))
        return self._existing_map()

    def _use(self, bucket_map: BucketMap) -> None:
        if bucket_map is not self.bucket_map:
            self.bucket_map, self._kept_map = bucket_map, partial(map_to_kept, bucket_map)

    def on_map(self, request: Request) -> Reply:
        del request
        head, arrays = map_to_wire(self._existing_map())
        return Reply({"map": head}, arrays)

    def on_add_blocks(self, worker: int, request: Request) -> Reply:
        """Add blocks to the map. Every worker asks for the same ones."""
        del worker
        asked = _digest(request)
        if asked != self._added:  # for half a million blocks, a thousand workers ask the same
            self._add_blocks(request)
            self._added = asked
        return self.on_map(request)

    def _add_blocks(self, request: Request) -> None:
        arrays = Arrays(request.arrays)
        ids = ids_from_wire(arrays, self._held.room)
        bucket_map, owners = self._existing_map(), None
        if need(request.body, "are_placed", bool):
            owners = arrays.take("owners of blocks", np.uint16, (len(ids),)).tolist()
            if max(owners, default=0) >= (num_servers := len(bucket_map.servers)):
                raise BadRequest(
                    f"coord.add_blocks: expected owners below {num_servers}, found {max(owners)}"
                )
            for block_id, owner in zip(ids, owners, strict=True):
                known = bucket_map.blocks.get(block_id, owner)
                if known != owner:
                    raise SchemaMismatch(
                        f"coordinator: block {block_id} is on server {known}, found {owner}:"
                        f" workers must place blocks alike{self._hint}"
                    )
        arrays.end()
        grown = bucket_map.with_blocks(ids, owners)
        self._held.hold("coordinator's map", grown.num_bytes)
        self._use(grown)

    def on_begin_anew(self, worker: int, request: Request) -> Reply:
        """Forget the options of the job, so that another model may have others, and if asked the
        blocks.
        """
        del worker
        drops_blocks = need(request.body, "blocks", bool)
        for fact in [fact for fact in self._facts if fact.startswith(_OPTION)]:
            del self._facts[fact]
            self._held.free(("fact", fact))
        self.renew_map(blocks=not drops_blocks)
        return self.on_map(request)

    def renew_map(self, *, blocks: bool = True) -> None:
        """Let servers refuse pushes of before: streams start over, so their numbers come again."""
        self._use(self._existing_map().renewed(blocks=blocks))
        self._added = self._added if blocks else b""

    def _existing_map(self) -> BucketMap:
        if self.bucket_map is None:
            raise NotReady("coordinator: no worker has joined yet")
        return self.bucket_map

    def state(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "states": self.server_states,
            "facts": self._facts,
            "compute_workers": addresses_to_wire(self.compute_workers),
            "map": self._kept_map,
        }

    def install(self, state: Mapping[str, Any]) -> None:
        self.job, self.server_states, self._facts = state["job"], state["states"], state["facts"]
        self.compute_workers = addresses_from_wire(state)
        if state["map"] is not None:
            self._use(map_from_kept(state["map"]))
        self._hint = _RECOVERED


def _digest(request: Request) -> bytes:
    """Of the blocks that a request names."""
    forms = [(array.dtype.str, array.shape) for array in request.arrays]
    digest = xxhash.xxh3_128(repr((request.body.get("are_placed"), forms)).encode())
    for array in request.arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()
