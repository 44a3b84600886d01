"""The web console: its history, its events, and who may read them."""

from __future__ import annotations

import http.client
import json
import math
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.test_top_view import busy
from trireme.commands import cli
from trireme.commands.console import token_of
from trireme.console.feed import POINTS_MAX, Feed, History, Point, point_of
from trireme.console.row_look import Rows
from trireme.console.web import VIEWERS_MAX, Console
from trireme.errors import NotReady
from trireme.rpc import Reply, Request, RpcClient, Server
from trireme.top.interval import status_of
from trireme.top.job_snapshot import Snapshot

TOKEN = "a-token-of-the-tests"


def point(at: float) -> Point:
    return Point(
        at=at,
        examples_per_s=1.0,
        num_rows=2.0,
        pull_s=None,
        push_s=None,
        hit_share=None,
        figures={},
    )


def test_the_history_covers_the_whole_job_in_bounded_memory() -> None:
    history = History()
    for at in range(10 * POINTS_MAX):
        history.add(point(float(at)))
    times = [kept.at for kept in history.points]
    assert POINTS_MAX // 2 <= len(times) < POINTS_MAX
    assert times[0] == 0.0
    steps = {after - before for before, after in pairwise(times)}
    assert len(steps) == 1, "the points are evenly spaced"
    assert times[-1] + steps.pop() >= 10 * POINTS_MAX - 1, "the last moments are there"


def test_a_point_has_the_slowest_requests_and_the_figures_that_are_shown() -> None:
    before, now = (Snapshot(at, [busy("a:1", n)]) for at, n in ((10.0, 100), (12.0, 140)))
    drawn = point_of(5.0, status_of(before, now))
    assert (drawn.at, drawn.examples_per_s, drawn.num_rows) == (5.0, 1280.0, 12_007.0)
    assert drawn.pull_s == pytest.approx(0.01)
    assert drawn.push_s == pytest.approx(0.03)
    assert drawn.hit_share is None
    assert drawn.figures == {}


METRICS = """
# TYPE trireme_worker_silence_seconds gauge
trireme_worker_silence_seconds{worker="0"} 1
# TYPE trireme_worker_reported_figure gauge
trireme_worker_reported_figure{worker="0",figure="<b>auc</b>"} 0.5
trireme_worker_reported_figure{worker="0",figure="loss"} NaN
"""


@pytest.fixture
def console() -> Iterator[Console]:

    text = np.frombuffer(METRICS.encode(), np.uint8)
    handlers = {"server.metrics": lambda _: Reply({}, [text]), "coord.map": not_ready}
    with Server("127.0.0.1:0", handlers, name="server 0") as server:
        feed = Feed(RpcClient(name="console"), [server.endpoint], interval_s=0.01, timeout_s=10.0)
        rows = Rows(RpcClient(name="rows"), [server.endpoint], timeout_s=10.0)
        console = Console("127.0.0.1:0", feed, rows, TOKEN)
        feed.start()
        console.start()
        try:
            yield console
        finally:
            feed.stop()
            console.stop()
            rows.close()


def not_ready(_: Request) -> Reply:

    raise NotReady("no worker has connected")


def ask(console: Console, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(console.url.removeprefix("http://"), timeout=30)
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


def test_only_who_knows_the_token_gets_anything(console: Console) -> None:
    cookie = {"Cookie": f"trireme_console={TOKEN}"}
    for path in (
        "/",
        "/events",
        "/console.js",
        "/row?table=t&row=1",
        "/?token=another",
        "/events?token=",
    ):
        with closing(ask(console, path)) as answer:
            assert answer.status == 403
            assert b"the link" in answer.read()
    with closing(ask(console, "/", Cookie='trireme_console="')) as answer:
        assert answer.status == 403
    with closing(ask(console, f"/?token={TOKEN}")) as answer:
        assert (answer.status, answer.getheader("Location")) == (303, "/")
        cookie_set = answer.getheader("Set-Cookie") or ""
        assert f"trireme_console={TOKEN}; HttpOnly; SameSite=Strict" in cookie_set
    with closing(ask(console, f"/?a=1%202&token={TOKEN}&b=3")) as answer:
        assert answer.getheader("Location") == "/?a=1+2&b=3", "what else was asked for stays"
    with closing(ask(console, f"/row?token={TOKEN}&table=&row=5")) as answer:
        assert answer.status == 400, "answered at once: a program keeps no cookie"
        assert b"a table of 1 to" in answer.read()
    with closing(ask(console, "/", **cookie)) as answer:
        page = answer.read().decode()
        assert (answer.status, "<h1>Trireme</h1>" in page) == (200, True)
        assert "default-src 'none'" in (answer.getheader("Content-Security-Policy") or "")
        assert "http://" not in page, "the page loads nothing from elsewhere"
        assert "https://" not in page
    with closing(ask(console, "/../../etc/passwd", **cookie)) as answer:
        assert answer.status == 404


def test_what_is_no_url_is_answered_and_logs_no_error(
    console: Console, caplog: pytest.LogCaptureFixture
) -> None:
    for path in ("http://[/", "http://[::1/row?table=a"):
        assert ask(console, path, Host="here").status == 400
    assert "Traceback" not in caplog.text


def events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in answer:
        if line.startswith(b"event: "):
            name = line.removeprefix(b"event: ").strip().decode()
        elif line.startswith(b"data: "):
            yield name, json.loads(line.removeprefix(b"data: "), parse_constant=refuse)


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_a_browser_gets_the_history_and_then_what_happens(console: Console) -> None:
    with closing(ask(console, "/events", Cookie=f"trireme_console={TOKEN}")) as answer:
        following = events(answer)
        name, history = next(following)
        assert (name, type(history)) == ("history", list)
        name, first = next(following)
        assert name == "job"
        [worker] = first["job"]["workers"]
        assert worker["figures"] == {"<b>auc</b>": 0.5, "loss": None}
        _, second = next(following)
        assert second["point"]["at"] > first["point"]["at"]
        assert math.isfinite(second["job"]["examples_per_s"])


def test_when_no_server_answers_any_more_the_page_says_so_and_keeps_the_history() -> None:
    with Server("127.0.0.1:0", {}, name="server 0") as server:
        endpoint = server.endpoint
    feed = Feed(RpcClient(name="console"), [endpoint], interval_s=0.01, timeout_s=0.2)
    feed.start()
    try:
        event = feed.after(0, 30.0)
        assert event is not None
        number, name, text = event
        assert (number, name) == (1, "silent")
        assert endpoint in json.loads(text)["error"]
        assert feed.history() == "[]"
    finally:
        feed.stop()
    assert feed.after(10**6, 30.0) is None, "nobody waits for a feed that has ended"


def test_more_viewers_than_threads_are_refused(console: Console) -> None:
    cookie = {"Cookie": f"trireme_console={TOKEN}"}
    viewers = [ask(console, "/events", **cookie) for _ in range(VIEWERS_MAX)]
    with closing(ask(console, "/events", **cookie)) as answer:
        assert answer.status == 503
    for viewer in viewers:
        viewer.close()


def test_the_token_may_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    options = ["console", "--servers", "127.0.0.1:1", "--token_file", str(file)]
    assert cli.main(options) == 2
    assert "expected a token in --token_file" in capsys.readouterr().err
    for content in ("short", "with a space in it", "<script>alert(1)</script>"):
        file.write_text(content)
        assert cli.main(options) == 2
        assert "at least 16 letters, digits" in capsys.readouterr().err
    file.write_text(f"{TOKEN}\n")
    assert token_of(file) == TOKEN
    assert token_of(None) != token_of(None)


def test_a_job_that_is_not_there_is_an_error_and_no_link(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["console", "--servers", "127.0.0.1:1", "--timeout_s", "0.3"]
    assert cli.main(options) == 1
    out, err = capsys.readouterr()
    assert "127.0.0.1:1: not reached" in err
    assert not out


@pytest.mark.parametrize("address", ["80x", "192.0.2.1:80"])
def test_a_wrong_address_is_refused_before_the_job_is_asked(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["console", "--servers", "127.0.0.1:1", "--timeout_s", "0.3", "--listen", address]
    assert cli.main(options) in (1, 2)
    error = capsys.readouterr().err
    assert address in error
    assert "not reached" not in error


def test_a_wrong_address_is_refused_before_a_job_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it has started')")
    options = ["launch", "--server_num", "1", "--worker_num", "1", "--console", "80x", str(script)]
    assert cli.main(options) == 2
    assert "launch: error: --console: expected [HOST:]PORT" in capsys.readouterr().err
