"""The console's look at rows: distributions and single rows of a job that trains."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
import torch

from tests.chromium import chromium
from tests.integration.test_console import LEAST_CONTRAST, WIDER
from tests.integration.test_table_view import DIM, MOVIES, Model, ssd_dir, trained
from tests.jobs import Job
from trireme.console.distributions import sample
from trireme.console.feed import Feed
from trireme.console.row_look import TEXT_MAX, Rows
from trireme.console.web import Console
from trireme.job.embedded import embedded
from trireme.protocol.block_messages import map_to_wire
from trireme.protocol.routing import BucketMap
from trireme.rpc import Reply, Request, RpcClient, Server
from trireme.server.looking import SAMPLE_ROWS, Looking
from trireme.server.row_tier import make_row_tier
from trireme.server.state import ServerState

__all__ = ["ssd_dir"]  # a fixture
TOKEN = "a-token-of-the-tests"


@contextmanager
def looking(servers: list[str]) -> Iterator[Rows]:
    rows = Rows(RpcClient(name="rows"), servers, timeout_s=60.0)
    try:
        yield rows
    finally:
        rows.close()


def check_row(rows: Rows, model: Model) -> None:
    content = rows.find("t", "movie=movie 7")
    batch = {"movie": ["movie 7"], "user": torch.tensor([7])}
    weights = model.eval().rows(batch)[0, 0].tolist()
    assert content["weights"] == weights
    assert (content["show"], content["click"], content["time"]) == (7.0, 0.0, 0)
    assert (content["rule"], len(content["state"])) == ("adagrad", DIM)
    assert min(content["state"]) > 0
    by_key = rows.find("t", content["key"])  # which the lookup has brought into memory
    assert {**by_key, "row": "", "place": ""} == {**content, "row": "", "place": ""}
    assert rows.find("t", "user=7")["show"] == 7.0
    assert rows.find("t", "user=999")["place"] == "none"
    assert rows.find("t", "7")["place"] == "none", "features have keys of their own"


def test_a_row_is_found_on_its_server_by_the_value_that_training_took() -> None:
    with Job(2) as job:
        job.run(1, trained)
        with looking(job.endpoints) as rows:
            places = {rows.find("t", f"movie={movie}")["server"] for movie in MOVIES[:50]}
            assert places == set(job.endpoints)
            assert rows.find("t", "movie=movie 7")["place"] == "memory"


@contextmanager
def served(state: ServerState) -> Iterator[str]:
    def on_map(_: Request) -> Reply:
        head, arrays = map_to_wire(BucketMap.even((server.endpoint,)))
        return Reply({"map": head}, arrays)

    handlers = {**Looking(state).handlers(), "coord.map": on_map}
    with Server("127.0.0.1:0", handlers, name="server 0") as server:
        yield server.endpoint


def test_a_row_on_ssd_is_read_there_and_stays_there(ssd_dir: Path) -> None:
    with embedded(tier=make_row_tier("7MiB", str(ssd_dir))) as cluster:
        model = trained(cluster)
        assert cluster.server is not None
        table = cluster.server.tables["t"].rows
        with served(cluster.server) as endpoint, looking([endpoint]) as rows:
            places = {movie: rows.find("t", f"movie={movie}")["place"] for movie in MOVIES}
            assert set(places.values()) == {"memory", "ssd"}
            before = table.tier
            again = {movie: rows.find("t", f"movie={movie}")["place"] for movie in MOVIES}
            assert again == places
            assert before is not None
            assert table.tier is not None
            assert table.tier["rows"] == before["rows"]
            check_row(rows, model)
            with RpcClient(name="sampler") as client:
                [content] = sample(client, [endpoint], ["t"], 60.0)
            assert content.num_on_ssd == before["rows"]
            assert content.num_sampled == content.num_in_memory == 600 - before["rows"]
            assert sum(content.bars[0].rows) == pytest.approx(content.num_in_memory)


def test_distributions_are_of_all_rows_of_a_small_table() -> None:
    with Job(2) as job:
        job.run(1, trained)
        with RpcClient(name="sampler") as client:
            [content, none] = sample(client, job.endpoints, ["t", "no such"], 60.0)
            [partial] = sample(client, [job.endpoints[0], "127.0.0.1:1"], ["t"], 3.0)
    assert (content.num_silent, none.num_silent, partial.num_silent) == (0, 2, 1)
    assert 0 < partial.num_in_memory < 600
    assert (content.num_in_memory, content.num_on_ssd, content.num_sampled) == (600, 0, 600)
    shows, changes = content.bars
    assert (shows.kind, changes.kind) == ("show", "version")
    exact = np.histogram(np.arange(300), [*shows.from_, np.inf])[0]
    assert shows.rows == pytest.approx((2 * exact).tolist())
    assert sum(changes.rows) == pytest.approx(600)
    assert (none.num_sampled, none.bars) == (0, [])


def test_a_sample_of_a_large_table_is_bounded_and_stands_for_all_rows() -> None:
    num, days = 200_000, 10

    def fill(cluster: Any) -> None:
        model = Model(dim=1)
        cluster.client.create_table(model.table.schema)
        for server in job.servers:
            rows = server.state.tables["t"].rows
            wide = np.zeros((num, rows.row_bytes), np.uint8)
            statistics = wide[:, -32:].view(STATISTICS)[:, 0]
            statistics["show"] = np.where(np.arange(num) % 4 == 0, 100.0, 1.0)
            statistics["time"] = 86_400 * (1 + np.arange(num) % days)
            keys = np.arange(num, dtype=np.uint64)
            rows.write_wide(keys, np.zeros(num, np.uint8), wide, server.state.pool)

    with Job(1) as job:
        job.run(1, fill)
        with RpcClient(name="sampler") as client:
            [content] = sample(client, job.endpoints, ["t"], 60.0)
    assert content.num_in_memory == num
    assert SAMPLE_ROWS // 2 < content.num_sampled < 2 * SAMPLE_ROWS
    shows, ages = content.bars
    assert ages.kind == "age_s"
    assert [sum(shows.rows), sum(ages.rows)] == pytest.approx([num, num])
    assert shows.rows[1] / num == pytest.approx(0.75, abs=0.05)
    assert dict(zip(shows.from_, shows.rows, strict=True))[64.0] / num == pytest.approx(
        0.25, abs=0.05
    )
    assert dict(zip(ages.from_, ages.rows, strict=True))[86_400.0] / num == pytest.approx(
        0.1, abs=0.05
    )


STATISTICS = np.dtype(
    [("version", "<u4"), ("time", "<u4"), ("show", "<f8"), ("click", "<f8"), ("rest", "<f4", 2)]
)


@contextmanager
def console(servers: list[str]) -> Iterator[Console]:
    feed = Feed(RpcClient(name="console"), servers, interval_s=0.2, timeout_s=60.0)
    with looking(servers) as rows:
        page = Console("127.0.0.1:0", feed, rows, TOKEN)
        feed.start()
        page.start()
        try:
            yield page
        finally:
            feed.stop()
            page.stop()


def ask(page: Console, **query: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(page.url.removeprefix("http://"), timeout=60)
    cookie = {"Cookie": f"trireme_console={TOKEN}"}
    connection.request("GET", f"/row?{urlencode(query)}", headers=cookie)
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    return answer.status, content


def test_hostile_wishes_get_a_typed_error() -> None:
    with Job(1) as job:
        job.run(1, trained)
        with console(job.endpoints) as page:
            for row in (
                "",
                "x",
                "=",
                "movie=",
                str(2**64),
                f"user={2**70}x\0",
                "a" * (TEXT_MAX + 1),
            ):
                status, content = ask(page, table="t", row=row)
                assert (status, content["type"]) == (400, "BadRequest"), row
            for table in ("<script>alert(1)</script>", "../../etc/passwd", "t' or 1=1"):
                status, content = ask(page, table=table, row="1")
                assert (status, content["type"]) == (404, "UnknownTable")
            assert ask(page, table="t\n", row="1")[0] == 400
            assert ask(page)[0] == 400
            status, content = ask(page, table="t", row="movie=<img src=x onerror=alert(1)>")
            assert (status, content["place"]) == (200, "none")
            assert ask(page, table="t", row="movie=movie 3")[1]["show"] == 3.0


UNNAMED = """[...document.querySelectorAll("input, button, [role=region], svg[role=img]")]
  .filter((part) => !(part.labels?.length || part.ariaLabel || part.textContent.trim()
    || document.getElementById(part.getAttribute("aria-labelledby")))).length"""


def look(row: str) -> str:
    """Types a row into the form, and sends it."""
    return f"""document.getElementById("look-row").value = {json.dumps(row)};
      document.querySelector("#look button").click()"""


def test_distributions_and_rows_in_a_browser(tmp_path: Path) -> None:
    with Job(2) as job:
        job.run(1, trained)
        with console(job.endpoints) as page, chromium(tmp_path / "profile") as browser:
            for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light")):
                browser.open(page.link, width=width, height=900, scheme=scheme)
                assert (
                    browser.wait_for("document.querySelectorAll('#distributions .bars').length")
                    == 2
                )
                assert browser.evaluate("document.getElementById('look-table').value") == "t"
                browser.evaluate(look("movie=movie 7"))
                text = browser.wait_for("document.querySelector('#row dl')?.textContent")
                assert "movie=movie 7" in text
                assert "in memory" in text
                assert not browser.evaluate(WIDER), f"the page is wider than {width} points"
                assert browser.evaluate(LEAST_CONTRAST) >= 4.5, f"{scheme}: too little contrast"
                assert browser.evaluate(UNNAMED) == 0
                browser.screenshot(tmp_path / f"{width}_{scheme}.png")
            hostile = "movie=<img src=x onerror=document.title='hit'>"
            browser.evaluate(look(hostile))
            browser.wait_for(
                f"document.querySelector('#row dd')?.textContent === {json.dumps(hostile)}"
            )
            browser.evaluate(look("x"))
            assert "64-bit number" in browser.wait_for(
                "document.querySelector('#row .error')?.textContent"
            )
            assert browser.evaluate("document.title") == "Trireme console"
            assert [error for error in browser.errors if "400" not in error] == []


def test_rows_are_sampled_only_while_somebody_looks() -> None:
    asked: list[str] = []
    with Job(1) as job:
        job.run(1, trained)
        [server] = job.servers
        answer = server.rpc._handlers["ps.sample"]

        def counted(request: Request) -> Any:
            asked.append(request.method)
            return answer(request)

        server.rpc._handlers["ps.sample"] = counted
        feed = Feed(RpcClient(name="console"), job.endpoints, interval_s=0.02, timeout_s=60.0)
        feed.start()
        try:
            number = 0
            while number < 5:
                number = (feed.after(number, 60.0) or (0, "", ""))[0]
            assert asked == []
            with feed.watched():
                for _ in range(5):
                    number, _, text = feed.after(number, 60.0) or (0, "", "")
            assert len(asked) == 1, "once in ten seconds"
            assert json.loads(text)["distributions"][0]["num_sampled"] == 600
        finally:
            feed.stop()
