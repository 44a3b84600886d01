"""A misbehaving network for tests: a TCP proxy that loses, repeats, delays and reorders messages.

It stands between clients and one server, splits ZMTP into messages, and does to some of them what a
network with retrying clients can do:

  - lose_request: the request is lost and the connection cut (TCP loses nothing else);
  - lose_reply: the request was handled, its reply is lost and the connection cut;
  - cut_request, cut_reply: the connection is cut in the midst of the message;
  - duplicate: the request arrives twice in a row;
  - replay: the request arrives again after up to 8 newer requests, of this or any other connection;
  - delay: the request arrives late, so that requests of other connections overtake it.

What happens is drawn from one seeded generator; with several connections their interleaving still
depends on timing. Under CURVE use neither duplicate nor replay: an encrypted message cannot be
repeated, and messages are single parts there.

    with Proxy(server.endpoint, Faults(seed=7, duplicate=0.2)) as proxy:
        client.call(proxy.endpoint, ...)
        assert proxy.counts["duplicate"] > 0
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
_REPLAY_DISTANCE_MAX = 8
# Clients seem to be there, so that they share no memory with the server, and all that they send
# comes through here.
_OTHER_MACHINE = "127.0.0.2"


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How often each thing happens to a request, as probabilities; `delay_s_max` in seconds.
    lose_reply_to: what the first request contains whose reply is lost besides.
    """

    seed: int
    lose_request: float = 0.0
    lose_reply: float = 0.0
    cut_request: float = 0.0
    cut_reply: float = 0.0
    duplicate: float = 0.0
    replay: float = 0.0
    delay: float = 0.0
    delay_s_max: float = 0.02
    lose_reply_to: bytes = b""


class Proxy:
    """Listens at `endpoint` and passes messages to and from `target`, both "host:port".

    `is_calm` switches the faults off; `counts` says how many of each happened, and "request" how
    many passed.
    """

    def __init__(self, target: str, faults: Faults) -> None:
        self.target = target
        self.endpoint = ""
        self.is_calm = False
        self.counts: Counter[str] = Counter()
        self._faults = faults
        self._random = random.Random(faults.seed)
        self._replays: list[tuple[int, bytes, asyncio.StreamWriter]] = []
        self._links: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Cut all connections that are open."""
        self._run(self._cut())

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _close(self) -> None:
        self._server.close()
        await self._cut()

    async def _cut(self) -> None:
        for task in self._links:
            task.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        writers = [writer]
        try:
            host, _, port = self.target.rpartition(":")
            back_reader, back_writer = await asyncio.open_connection(
                host, int(port), local_addr=(_OTHER_MACHINE, 0)
            )
            writers.append(back_writer)
            await self._link(_Link(reader, writer, back_reader, back_writer))
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # either side went away, or cut() was called: the other side learns it below
        finally:
            self._links.discard(task)
            for each in writers:
                each.transport.abort()
            for each in writers:
                with contextlib.suppress(OSError, asyncio.CancelledError):
                    await each.wait_closed()

    async def _link(self, link: _Link) -> None:
        pumps = [
            asyncio.ensure_future(pump) for pump in (self._requests(link), self._replies(link))
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _requests(self, link: _Link) -> None:
        await _greeting(link.reader, link.back_writer)
        link.back_writer.write(await _message(link.reader, link.back_writer))  # hello
        while True:
            message = await _message(link.reader, link.back_writer)
            self.counts["request"] += 1
            if self._happens("lose_request"):
                return
            if self._happens("delay"):
                await asyncio.sleep(self._random.uniform(0, self._faults.delay_s_max))
            if self._happens("cut_request"):
                await _part(message, link.back_writer)
                return
            link.loses_reply = self._happens("lose_reply") or self._is_chosen(message)
            link.cuts_reply = self._happens("cut_reply")
            link.back_writer.write(message)
            if self._happens("duplicate"):
                link.back_writer.write(message)
            self._replay_due()
            if self._happens("replay"):
                due = self.counts["request"] + self._random.randint(1, _REPLAY_DISTANCE_MAX)
                self._replays.append((due, message, link.back_writer))
            await link.back_writer.drain()

    async def _replies(self, link: _Link) -> None:
        await _greeting(link.back_reader, link.writer)
        while True:
            message = await _message(link.back_reader, link.writer)
            if link.loses_reply:
                return
            if link.cuts_reply:
                await _part(message, link.writer)
                return
            link.writer.write(message)
            await link.writer.drain()

    def _replay_due(self) -> None:
        waiting = []
        for due, message, writer in self._replays:
            if due > self.counts["request"]:
                waiting.append((due, message, writer))
            elif not writer.is_closing():
                writer.write(message)
        self._replays = waiting

    def _is_chosen(self, request: bytes) -> bool:
        chosen = self._faults.lose_reply_to
        is_chosen = chosen != b"" and chosen in request and not self.counts["lose_reply_to"]
        self.counts["lose_reply_to"] += is_chosen
        return is_chosen

    def _happens(self, fault: str) -> bool:
        happens = not self.is_calm and self._random.random() < getattr(self._faults, fault)
        self.counts[fault] += happens
        return happens


class _Link:
    """One client's connection and the one made for it to the server."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        back_reader: asyncio.StreamReader,
        back_writer: asyncio.StreamWriter,
    ) -> None:
        self.reader, self.writer = reader, writer
        self.back_reader, self.back_writer = back_reader, back_writer
        self.loses_reply = self.cuts_reply = False


async def _greeting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Passes the first bytes as they come: each side waits for part of the other's greeting."""
    num_bytes = _GREETING_BYTES
    while num_bytes:
        data = await reader.read(num_bytes)
        if not data:
            raise asyncio.IncompleteReadError(b"", num_bytes)
        writer.write(data)
        num_bytes -= len(data)


async def _part(message: bytes, writer: asyncio.StreamWriter) -> None:
    """The first half of it, and the end."""
    writer.write(message[: len(message) // 2])
    writer.write_eof()
    await writer.drain()


async def _message(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The bytes of the next message. ZMTP commands before it (the handshake's) go to `writer`."""
    message = bytearray()
    while True:
        flags = (await reader.readexactly(1))[0]
        size = await reader.readexactly(8 if flags & _LONG else 1)
        body = await reader.readexactly(int.from_bytes(size, "big"))
        if flags & _COMMAND:
            writer.write(bytes([flags]) + size + body)
            continue
        message += bytes([flags]) + size + body
        if not flags & _MORE:
            return bytes(message)
