"""The requests that read and change a server's state: decode, have it done, answer."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import numpy as np

from trireme.errors import BadRequest, NotReady, ResourceExhausted, TriremeError
from trireme.protocol.block_messages import map_from_wire, specs_from_wire
from trireme.protocol.clipping import norm_from_wire
from trireme.protocol.membership import Pace, PassMembers
from trireme.protocol.pass_lease import PassLease
from trireme.protocol.routing import NUM_BUCKETS, Keys
from trireme.protocol.wire import Array, Arrays, Push, need, need_list, need_time
from trireme.rpc import Deferred, Handler, Reply, Request
from trireme.server.prepared_load import PreparedLoad
from trireme.server.removal import remove
from trireme.server.row_scan import check_reply, read_rows
from trireme.server.served_tables import ServedTable
from trireme.server.server_stats import stats_of
from trireme.server.staging import Waiter
from trireme.server.state import ServerState
from trireme.table import TableSchema

KEY_COUNTERS = ("admitted", "rejected", "expired", "evicted")

RowsWanted = list[tuple[ServedTable, int, Keys]]
"""The tables of a pull: the row class of each, and keys."""


class RequestHandlers:
    """The methods `ps.*` and `policy.*` of docs/protocol.md. Threads: any."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def handlers(self) -> dict[str, Handler]:
        return {
            "ps.map": self._on_map,
            "ps.group": self._on_members,
            "ps.create_table": self._on_create_table,
            "ps.create_blocks": self._on_create_blocks,
            "ps.begin_anew": self._on_begin_anew,
            "ps.pull": self._on_pull,
            "ps.lease": self._on_lease,
            "ps.release": self._on_release,
            "ps.rows": self._on_rows,
            "ps.announce": self._on_announce,
            "ps.norm": self._on_norm,
            "ps.push": self._on_push,
            "ps.remove": self._on_remove,
            "ps.streams": lambda _: self._streams(),
            "ps.stats": lambda _: Reply(stats_of(self._state)),
            "policy.shrink": self._on_shrink,
            "policy.counters": lambda _: self._counters(),
        }

    # ---- control ----

    def _on_map(self, request: Request) -> Reply | Deferred:
        """The reply contains the state's id, and the version of the map that is here: workers send
        a map only where it is missing. A worker that knew another id learns of the loss.
        """
        state, body, bucket_map = self._state, request.body, None
        index, job = need(body, "index", int), need(body, "job", str)
        if (head := body.get("map")) is not None:
            arrays = Arrays(request.arrays)
            bucket_map = map_from_wire(head, arrays, state.held.room)
            arrays.end()
            if not 0 <= index < len(bucket_map.servers):
                raise BadRequest(
                    f"ps.map: expected an index below {len(bucket_map.servers)}, found {index}"
                )
        state.adopt_map(job, bucket_map, index, request)
        version = state.assignment.version
        return state.journal.answered(Reply({"state": state.state_id, "version": version}))

    def _on_members(self, request: Request) -> Reply | Deferred:
        self._state.adopt_members(PassMembers.from_wire(request.body), request)
        return self._state.journal.answered(Reply())

    def _on_create_table(self, request: Request) -> Reply | Deferred:
        schema = TableSchema.from_wire(need(request.body, "schema", dict))
        needs_room = self._state.tier is not None or isinstance(self._state.prepared, PreparedLoad)
        if needs_room and schema.name not in self._state.tables:
            self._state.check_settled()  # a load or import that is decided has it
        self._state.create_table(schema)
        has_tier = self._state.table(schema.name).rows.tier is not None
        return self._state.journal.answered(Reply({"tier": has_tier}))

    def _on_create_blocks(self, request: Request) -> Reply | Deferred:
        state, body = self._state, request.body
        arrays = Arrays(request.arrays)
        specs = specs_from_wire(need(body, "shapes", dict), arrays, state.held.room)
        values = arrays.take("values of blocks", np.float32, (None,))
        arrays.end()
        optimizer, groups = need(body, "optimizer", str), need_list(body, "groups", dict)
        state.create_blocks(optimizer, groups, specs, values, request)
        return state.journal.answered(Reply())

    def _on_begin_anew(self, request: Request) -> Reply | Deferred:
        """Another model begins, with nothing of an earlier one."""
        state, body = self._state, request.body
        need_list(body, "tables", str)
        need(body, "blocks", bool)

        def change() -> Reply:
            state.begin_anew(body)
            return Reply()

        return state.journal.change_once(change)

    def _on_lease(self, request: Request) -> Reply | Deferred:
        """A pass on a device begins."""
        self._state.lease(PassLease.from_wire(request.body))
        return self._state.journal.answered(Reply())

    def _on_release(self, request: Request) -> Reply | Deferred:
        """It was given up, or a successor of its worker has come."""
        self._state.release(PassLease.from_wire(request.body))
        return self._state.journal.answered(Reply())

    # ---- pull ----

    def _on_rows(self, request: Request) -> Reply:
        """Wide rows of keys, for a pass: which keys have one, and zeros for the others."""
        state, body = self._state, request.body
        state.check_settled()
        state.assignment.map_of_version(need(body, "map", int))
        table, arrays = state.table(body.get("table")), Arrays(request.arrays)
        rows, mark = table.rows, table.mark
        keys_K = arrays.take("keys", np.uint64, (None,))
        arrays.end()
        check_reply("ps.rows", request, len(keys_K), rows)
        num_buckets = len(state.assignment.owned_buckets())
        is_present, wide = read_rows(rows, keys_K, num_buckets, state.pool, request.room)
        return Reply({"version": rows.version, "mark": mark}, [is_present.astype(np.uint8), wide])

    def _on_announce(self, request: Request) -> Reply:
        """Keys that a pull will ask for soon: their rows may be fetched from SSD."""
        wanted = self._rows_wanted(request)
        if self._state.tier is not None:
            self._state.tier.fetcher.announce([(table.rows, keys_K) for table, _, keys_K in wanted])
        return Reply()

    def _on_pull(self, request: Request) -> Reply | Deferred:
        """Answer rows of keys, then the blocks of this server in the map's order, if requested.

        In sync, `staged` is the step up to which all servers have staged the stream's pushes; the
        answer waits until this server has applied it. `norm` is that of the step's gradient, if it
        is clipped by norm. In bounded, `pace` gives the step that the rows are for; the answer
        waits until no other stream is too far behind it. `after` is a push of the stream that came
        on the same connection before; the push counts, so errors of the pull are part of the reply.
        """
        body = request.body
        after = need({"after": 0} | body, "after", int)
        if not after:
            return self._pull(request)
        try:
            self._check_applied(need(body, "stream", int), after)
            return self._pull(request)
        except TriremeError as error:
            return Reply({"refused": f"{error.name}: {error}"})

    def _pull(self, request: Request) -> Reply | Deferred:
        state, body = self._state, request.body
        state.check_settled()
        wanted = self._rows_wanted(request)
        with_blocks, time = need(body, "blocks", bool), need_time(body)
        bucket_map = state.assignment.map_of_version(need(body, "map", int))

        def answer() -> Reply:
            block_ids = bucket_map.blocks_of(state.assignment.index) if with_blocks else []
            self._check_reply(wanted, block_ids, request.reply_bytes_max)
            return self._read(wanted, block_ids, time)

        stream, staged = need(body, "stream", int), need(body, "staged", int)
        pace, norm = Pace.from_wire(body.get("pace")), norm_from_wire(body.get("norm"))
        if not staged and pace is None:
            return answer()

        def is_ready(waiter: Waiter) -> bool:
            if pace is not None:
                return state.pacing.when_within(stream, pace, waiter)
            state.staging.set_norm(staged, norm)
            state.staging.declare(stream, staged)
            return state.staging.when_applied(stream, staged, waiter)

        waits = ("pull", stream, 0 if pace is None else pace.step)
        num_bytes = sum(array.nbytes for array in request.arrays)
        return self._answer_when(
            is_ready, answer, lambda: self._describe_wait(stream, pace), waits, num_bytes
        )

    def _check_applied(self, stream: int, sequence: int) -> None:
        """Raises NotReady: this push of a stream has not been applied here."""
        with self._state.lock:
            known = self._state.streams.get(stream)
        last = 0 if known is None else known.last
        if last < sequence:
            raise NotReady(
                f"pull: expected push {sequence} of stream {stream} to be applied, found {last}: it"
                " was lost on its way, or refused"
            )

    def _answer_when(
        self,
        is_ready: Callable[[Waiter], bool],
        answer: Callable[[], Reply],
        describe: Callable[[], str],
        waits: Hashable,
        num_bytes: int,
    ) -> Reply | Deferred:
        """Answer now if `is_ready`, else when it calls the waiter that it was given, or with the
        error that it calls it with. waits: names the wait; another one of this name replaces it.
        num_bytes: what it holds, even if its client has gone.
        """
        state, journal, held = self._state, self._state.journal, self._state.held
        deferred = Deferred(describe=describe)

        def finish(error: Exception | None = None) -> None:
            def make_reply() -> Reply:
                if error is not None:
                    raise error
                return answer()

            journal.answer_when_kept(deferred, make_reply)

        def wake(error: Exception | None = None) -> None:
            held.free(waits)
            state.woken.append(partial(finish, error))

        def is_ready_now() -> bool:
            with state.lock:
                if is_ready(wake):
                    return True
                try:
                    held.hold(waits, num_bytes)
                except ResourceExhausted:
                    is_ready(_nobody)  # it holds nothing
                    raise
                return False

        try:
            with journal.pushing():
                try:
                    is_now = is_ready_now()
                finally:
                    state.apply_steps()
        finally:
            state.answer_woken()
        return journal.answered(answer()) if is_now else deferred

    def _rows_wanted(self, request: Request) -> RowsWanted:
        tables = [self._state.table(name) for name in need(request.body, "tables", list)]
        classes = need_list(request.body, "classes", int)
        if len(classes) != len(tables):
            raise BadRequest(f"pull: expected a class for {len(tables)} tables, found {classes}")
        arrays = Arrays(request.arrays)
        keys = [arrays.take(f"keys of {t.schema.name}", np.uint64, (None,)) for t in tables]
        arrays.end()
        return list(zip(tables, classes, keys, strict=True))

    def _check_reply(
        self, wanted: RowsWanted, block_ids: Sequence[str], num_bytes_max: int
    ) -> None:
        """Raises ResourceExhausted before the rows take memory: the reply could not be sent."""
        num_floats = sum(len(keys_K) * table.schema.width_of(c) for table, c, keys_K in wanted)
        num_bytes = 4 * (num_floats + self._state.blocks.size_of(block_ids))
        if num_bytes > num_bytes_max:
            raise ResourceExhausted(
                f"pull: expected rows and blocks of at most {num_bytes_max} bytes, which both sides"
                f" take as a message, found {num_bytes}"
            )

    def _read(self, wanted: RowsWanted, block_ids: Sequence[str], time: int) -> Reply:
        state, version = self._state, self._state.streams.num_pushes
        arrays: list[Array] = []
        missing = []
        for table, row_class, keys_K in wanted:
            if state.tier is not None:
                state.tier.fetcher.note_pull(table.rows, keys_K)
            rows, num_missing = table.read(row_class, keys_K, time, state.pool)
            arrays.append(rows)
            missing.append(num_missing)
        if block_ids:
            with state.blocks_lock:
                arrays.append(state.blocks.read(block_ids))
        state.counts.add_pull(
            (table.schema.name, len(keys_K), num_missing)
            for (table, _, keys_K), num_missing in zip(wanted, missing, strict=True)
        )
        stop = state.staging.stop
        body = {"version": version, "missing": missing, "stop": stop and stop.to_wire()}
        return Reply(body, arrays)

    def _on_norm(self, request: Request) -> Reply | Deferred:
        """Answer this server's share of the norm of a step when the step is complete here."""
        state = self._state
        stream, step = need(request.body, "stream", int), need(request.body, "staged", int)
        state.assignment.map_of_version(need(request.body, "map", int))

        def answer() -> Reply:
            with state.lock:
                return Reply(state.staging.norm_of(step).to_wire())

        def is_ready(waiter: Waiter) -> bool:
            state.staging.declare(stream, step)
            return state.staging.when_complete(stream, step, waiter)

        waits = ("norm", stream)
        return self._answer_when(
            is_ready, answer, lambda: self._describe_wait(stream, None), waits, 0
        )

    def _describe_wait(self, stream: int, pace: Pace | None) -> str:
        with self._state.lock:
            if pace is None:
                return self._state.staging.waiting_for()
            return self._state.pacing.waiting_for(stream, pace)

    # ---- push ----

    def _on_push(self, request: Request) -> Reply | Deferred:
        version = self._state.push(Push.from_wire(request.body, request.arrays), request)
        return self._state.journal.answered(Reply({"version": version}))

    def _streams(self) -> Reply:
        """The last sequence and position of each stream that everything here has applied."""
        state = self._state
        with state.lock:
            streams = state.streams.applied()
            return Reply({"streams": streams, "applied_step": state.staging.applied})

    # ---- rows that go ----

    def _on_remove(self, request: Request) -> Reply | Deferred:
        state = self._state
        return state.journal.change_once(
            lambda: Reply({"rows": remove(state, request.body, request.arrays)})
        )

    def _on_shrink(self, request: Request) -> Reply | Deferred:
        """Shrink one of `slices` slices of this server's buckets, in all tables."""
        state, body = self._state, request.body
        slices, index = need(body, "slices", int), need(body, "slice", int)
        if not 0 <= index < slices <= NUM_BUCKETS:
            raise BadRequest(
                f"policy.shrink: expected 0 <= slice < slices <= {NUM_BUCKETS}, found {index},"
                f" {slices}"
            )
        need_time(body)
        need(body, "day_over", bool)
        state.assignment.map()
        return state.journal.change_once(lambda: Reply({"tables": state.shrink(body)}))

    def _counters(self) -> Reply:
        """What has become of keys, by table."""
        tables = {}
        for name, table in list(self._state.tables.items()):
            counters = table.rows.counters
            tables[name] = {kind: table.counted[kind] + counters[kind] for kind in KEY_COUNTERS}
        return Reply({"tables": tables})


def _nobody(*_: object, **__: object) -> None:
    """Waits for nothing, and is told so."""
