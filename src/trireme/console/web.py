"""The web server of the console: one page, and events for it. It only reads.

/events follows the job, /row?table=T&row=R is JSON of one row.

Whoever asks for anything has to know the token, in the link (?token=...) or in the cookie that the
link of the page leaves. The page loads nothing from elsewhere, and its security policy forbids
it to.
"""

from __future__ import annotations

import hmac
import json
import threading
from http.cookies import CookieError, SimpleCookie
from importlib import resources
from urllib.parse import SplitResult, parse_qs, parse_qsl, urlencode

from trireme.console.feed import Feed, as_json
from trireme.console.row_look import Rows
from trireme.errors import BadRequest, TriremeError, UnknownTable
from trireme.telemetry.http_server import HttpServer, RequestHandler

THREADS_MAX = 32
VIEWERS_MAX = 16
"""Browsers that follow the events; each has a thread."""
_SILENCE_S = 10.0  # after which a browser is told that the console lives
_COOKIE = "trireme_console"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/console.css": ("console.css", "text/css; charset=utf-8"),
    "/console.js": ("console.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def _without_token(url: SplitResult) -> str:
    """The same place, whatever else was asked for."""
    rest = [(name, value) for name, value in parse_qsl(url.query) if name != "token"]
    return url.path + (f"?{urlencode(rest)}" if rest else "")


class Console(HttpServer):
    """Serves the page of a feed at `address`. Raises BadRequest: it cannot be bound."""

    def __init__(self, address: str, feed: Feed, rows: Rows, token: str) -> None:
        self.feed, self.rows, self.token = feed, rows, token
        self.viewers = threading.Semaphore(VIEWERS_MAX)
        super().__init__("console", address, _ConsoleHandler, threads_max=THREADS_MAX)

    @property
    def link(self) -> str:
        """The link that opens the page."""
        return f"{self.url}/?token={self.token}"


class _ConsoleHandler(RequestHandler):
    server: Console

    def do_GET(self) -> None:
        self.limit_answer()
        url = self.url
        token = parse_qs(url.query).get("token", [""])[0]
        if url.path not in (*_FILES, "/events", "/row"):
            self._say(404, "there are /, /events and /row")
        elif not self._knows(token or self._cookie()):
            self._say(403, "open the link that trireme console has printed: it has the token")
        elif token and url.path in _FILES:  # the token leaves the address bar
            cookie = f"{_COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/"
            self.answer(
                303, b"", "text/plain", {"Location": _without_token(url), "Set-Cookie": cookie}
            )
        elif url.path == "/events":
            self._follow()
        elif url.path == "/row":
            self._look(parse_qs(url.query, keep_blank_values=True))
        else:
            name, kind = _FILES[url.path]
            body = resources.files("trireme.console").joinpath("page").joinpath(name).read_bytes()
            self.answer(200, body, kind, _HEADERS)

    def _knows(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.server.token.encode())

    def _cookie(self) -> str:
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return ""
        return cookies[_COOKIE].value if _COOKIE in cookies else ""

    def _look(self, query: dict[str, list[str]]) -> None:
        """Answer what there is of a row, or {"error": why not}."""
        try:
            table, row = (query.get(name, [""])[0] for name in ("table", "row"))
            status, body = 200, as_json(self.server.rows.find(table, row))
        except TriremeError as error:
            status = 400 if isinstance(error, BadRequest) else 503
            status = 404 if isinstance(error, UnknownTable) else status
            body = json.dumps({"error": str(error), "type": type(error).__name__})
        self.answer(status, body.encode(), "application/json", _HEADERS)

    def _follow(self) -> None:
        """Send the history, then events until the browser leaves."""
        server = self.server
        if not server.viewers.acquire(blocking=False):
            self._say(503, f"{VIEWERS_MAX} browsers follow already")
            return
        try:
            with server.feed.watched():
                self._send_events()
        finally:
            server.viewers.release()

    def _send_events(self) -> None:
        server = self.server
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self._send("history", server.feed.history())
        number = 0
        while not server.feed.over.is_set():
            event = server.feed.after(number, _SILENCE_S)
            if event is None:
                self.wfile.write(b": still here\n\n")
            else:
                number, name, text = event
                self._send(name, text)

    def _send(self, name: str, text: str) -> None:
        self.wfile.write(f"event: {name}\ndata: {text}\n\n".encode())

    def _say(self, status: int, text: str) -> None:
        self.answer(status, f"{text}\n".encode(), "text/plain; charset=utf-8", _HEADERS)
