"""What `trireme top` shows of two known snapshots."""

from __future__ import annotations

import io

from rich.console import Console

from trireme.top.job_snapshot import Labels, ServerSamples, Snapshot
from trireme.top.view import view


def samples_of(endpoint: str, **numbers: float | list[tuple[Labels, float]]) -> ServerSamples:
    """Names without their prefix; a number alone has no labels."""
    samples = {}
    for name, value in numbers.items():
        full_name = name if name.startswith("process_") else f"trireme_{name}"
        samples[full_name] = value if isinstance(value, list) else [({}, value)]
    return ServerSamples(endpoint, samples)


def shown(before: Snapshot, now: Snapshot) -> dict[str, list[str]]:
    """The lines by their first word."""
    file = io.StringIO()
    Console(file=file, width=240).print(view(before, now))
    lines = [line.split() for line in file.getvalue().splitlines()]
    return {words[0]: words[1:] for words in lines if words}


def busy(endpoint: str, n: int) -> ServerSamples:
    """A server after n pulls and pushes of 10 ms and 30 ms."""
    seconds = [({"method": "ps.pull"}, 0.01 * n), ({"method": "ps.push"}, 0.03 * n)]
    counts = [({"method": "ps.pull"}, float(n)), ({"method": "ps.push"}, float(n))]
    queues = {"queued": 3.0, "running": 2.0, "deferred": 1.0}
    return samples_of(
        endpoint,
        uptime_seconds=3723,
        table_rows=[({"table": "ads"}, 12_000.0), ({"table": "users"}, 7.0)],
        table_bytes=[({"table": "ads"}, 3 * 2.0**20), ({"table": "users"}, 512.0)],
        table_pulled_keys_total=[({"table": "ads"}, 1000.0 * n)],
        table_missing_keys_total=[({"table": "ads"}, 250.0 * n)],
        table_pushed_keys_total=[({"table": "ads"}, 900.0 * n)],
        process_resident_memory_bytes=2.0**30,
        pulls_total=n,
        pushes_total=[({"stream": "0"}, float(n))],
        examples_total=[({"stream": "0"}, 64.0 * n)],
        server_request_seconds_sum=seconds,
        server_request_seconds_count=counts,
        server_received_bytes_total=2048 * n,
        server_sent_bytes_total=1024 * n,
        server_queue_requests=[({"state": s}, q) for s, q in queues.items()],
        server_requests_total=[({"method": "ps.pull", "code": "RESOURCE_EXHAUSTED"}, float(n))],
        checkpoint_age_seconds=[({"mode": "full"}, 90.0), ({"mode": "delta"}, 5.0)],
        worker_silence_seconds=[({"worker": "0"}, 1.5)],
        worker_reported=[({"worker": "0", "what": "retries"}, 4.0)],
        push_staleness_bucket=[
            ({"le": "0.0"}, 90.0),
            ({"le": "1.0"}, 98.0),
            ({"le": "+Inf"}, 100.0),
        ],
        push_staleness_count=100,
        push_staleness_sum=30,
    )


def test_rates_and_times_are_of_the_interval() -> None:
    lines = shown(Snapshot(10.0, [busy("a:1", 100)]), Snapshot(12.0, [busy("a:1", 140)]))
    assert lines["a:1"] == [
        "1:02:03", "12.0k", "3.0", "MiB", "1.0", "GiB", "20", "20", "10.00", "30.00", "40.0", "KiB",
        "20.0", "KiB", "3", "2", "1", "20", "5.0", "s", "-", "-", "0.30",
    ]  # fmt: skip
    assert lines["ads"] == ["12.0k", "3.0", "MiB", "20.0k", "25.0%", "18.0k"]
    assert lines["users"] == ["7", "512", "B", "0", "-", "0"]
    assert lines["0"] == ["1.5", "s", "140", "8960", "1280", "4", "-", "-", "-"]
    words = " ".join(lines["staleness"])
    assert words == "(pushes between pull and push): mean 0.30, median <= 0, 99% > 1"


def test_a_server_that_started_again_counts_from_zero() -> None:
    lines = shown(Snapshot(10.0, [busy("a:1", 100)]), Snapshot(12.0, [busy("a:1", 40)]))
    assert lines["a:1"][6:10] == ["20", "20", "10.00", "30.00"]


def test_a_server_without_an_answer_is_shown_and_the_others_are_summed() -> None:
    gone = ServerSamples("b:2", {}, "server.metrics at b:2: not reached")
    before = Snapshot(0.0, [busy("a:1", 0), gone])
    lines = shown(before, Snapshot(1.0, [busy("a:1", 1), gone]))
    assert lines["b:2"] == ["no", "answer"]
    assert " ".join(lines["no"]) == "answer: server.metrics at b:2: not reached"
    assert "2 servers (1 without an answer), 1 workers, 12.0k rows" in " ".join(lines["trireme"])


def test_what_a_server_counted_before_it_was_silent_is_no_rate() -> None:
    gone = ServerSamples("a:1", {}, "server.metrics at a:1: no answer")
    before = Snapshot(0.0, [gone, busy("b:2", 1000)])
    lines = shown(before, Snapshot(2.0, [busy("a:1", 1000), busy("b:2", 1040)]))
    assert lines["a:1"][6:10] == ["0", "0", "-", "-"]
    assert lines["b:2"][6:10] == ["20", "20", "10.00", "30.00"]
    assert lines["ads"][-3:] == ["20.0k", "25.0%", "18.0k"]
    assert lines["0"][4] == "1280"  # examples per second, as b:2 has counted them


def test_a_job_that_has_not_begun_has_nothing_to_show() -> None:
    lines = shown(Snapshot(0.0, [samples_of("a:1")]), Snapshot(1.0, [samples_of("a:1")]))
    assert lines["staleness:"] == ["no", "push", "yet"]
    assert lines["a:1"][-1] == "-"


def test_tables_with_rows_on_ssd_have_lines_of_their_own() -> None:
    def tiered(n: int) -> ServerSamples:
        numbers = {
            "table_rows": 10_000.0,
            "table_ssd_rows": 9000.0,
            "table_ssd_rows_kept": 12_000.0,
            "table_memory_limit_bytes": 2.0**20,
            "table_ssd_bytes": 2.0**26,
            "table_hits_total": 80.0 * n,
            "table_misses_total": 20.0 * n,
            "table_ssd_reads_total": 15.0 * n,
            "table_ssd_fetched_rows_total": 5.0 * n,
            "table_ssd_evicted_rows_total": 10.0 * n,
            "table_ssd_cleaned_rows_total": 6.0 * n,
        }
        labeled = {name: [({"table": "ads"}, value)] for name, value in numbers.items()}
        plain = samples_of("a:1", uptime_seconds=1.0, pulls_total=float(n))
        return ServerSamples("a:1", {**plain.samples, **samples_of("a:1", **labeled).samples})

    file = io.StringIO()
    before, now = Snapshot(10.0, [tiered(100)]), Snapshot(12.0, [tiered(140)])
    Console(file=file, width=220).print(view(before, now))
    [line] = [line for line in file.getvalue().splitlines() if "75.0%" in line]
    assert line.split() == [
        "ads", "1000", "9000", "1.0", "MiB", "64.0", "MiB", "75.0%", "80.0%", "300", "15", "100",
        "200", "1.60x",
    ]  # fmt: skip


def labeled(batches: float, computed_s: float, *, reachable: float = 2.0) -> ServerSamples:
    """Two workers, which use two compute workers alike."""
    numbers = {
        "compute_workers": 2.0,
        "reachable": reachable,
        "credits": 4.0,
        "in_flight": 3.0,
        "batches": batches,
        "failovers": 1.0,
        "computed_s": computed_s,
    }
    samples: list[tuple[Labels, float]] = [
        ({"worker": worker, "label": "gpu", "what": what}, value)
        for worker in ("0", "1")
        for what, value in numbers.items()
    ]
    return samples_of("a:1", uptime_seconds=1.0, worker_label=samples)


def test_a_line_for_each_label_says_who_waits_for_whom() -> None:
    begin, busy = labeled(100.0, 1.0), labeled(140.0, 2.8)
    lines = shown(Snapshot(10.0, [begin]), Snapshot(12.0, [busy]))
    assert lines["label"][0] == "compute"
    assert lines["gpu"] == ["2", "8", "6", "40", "45.00", "90.0%", "2", "workers"]
    idle = labeled(140.0, 1.4, reachable=1.0)
    lines = shown(Snapshot(10.0, [begin]), Snapshot(12.0, [idle]))
    assert lines["gpu"] == ["1", "of", "2", "8", "6", "40", "10.00", "20.0%", "2", "gpu"]


def test_labels_are_shown_when_the_first_server_has_started_again() -> None:
    begin, busy = labeled(100.0, 1.0), labeled(140.0, 2.8)
    before = Snapshot(10.0, [begin, ServerSamples("b:2", begin.samples)])
    now = Snapshot(12.0, [samples_of("a:1"), ServerSamples("b:2", busy.samples)])
    assert shown(before, now)["gpu"] == ["2", "8", "6", "40", "45.00", "90.0%", "2", "workers"]
    alone = Snapshot(10.0, [samples_of("a:1")]), Snapshot(12.0, [labeled(140.0, 45.0)])
    assert shown(*alone)["gpu"] == ["2", "8", "6", "0", "-", "0.0%", "2", "gpu"]


def test_the_lines_of_labels_fit_a_narrow_terminal() -> None:
    file = io.StringIO()
    before, now = labeled(100.0, 1.0), labeled(123_456.0, 2.8, reachable=1.0)
    Console(file=file, width=80).print(view(Snapshot(10.0, [before]), Snapshot(12.0, [now])))
    lines = file.getvalue().splitlines()
    [title] = [line for line in lines if line.startswith("label")]
    [line] = [line for line in lines if line.startswith("gpu")]
    assert title.split()[-2:] == ["failovers", "waiting"]
    assert "123.4k" in line
    assert len(line) <= 80


def test_many_long_names_are_readable_in_eighty_columns() -> None:
    """Each number is there, under its title, and every name can be told from the others."""
    names = [f"embedding_of_the_user_{n}_in_the_last_thirty_days" for n in range(30)]
    tables = {"table_rows": 12_345_678.0, "table_bytes": 3.5e9, "table_pulled_keys_total": 9e9}
    samples = {what: [({"table": t}, value) for t in names] for what, value in tables.items()}

    def server(n: int) -> ServerSamples:
        endpoint = f"a-server-{n}.of-a-long-name.in.a.cluster.example:60000"
        merged = {**busy(endpoint, 123_456).samples, **samples_of(endpoint, **samples).samples}
        waits = ["step 8 waits for streams [3]"] if n == 2 else []
        return ServerSamples(endpoint, merged, waits=waits)

    now = Snapshot(12.0, [server(n) for n in range(20)])
    before = Snapshot(10.0, [busy(one.endpoint, 100) for one in now.servers])
    for rows_max in (None, 8):
        file = io.StringIO()
        Console(file=file, width=80).print(view(before, now, rows_max))
        text = file.getvalue()
        lines = text.splitlines()
        assert max(map(len, lines)) <= 80
        titles = " ".join(line for line in lines if line.startswith(("server", "table")))
        for title in ("push ms", "deferred", "saved ago", "log age", "staleness", "pushed keys/s"):
            assert title in titles
        assert "waits: step 8 waits for streams [3]" in lines
        whole = "".join(line.split()[0] for line in lines if line.strip())
        assert sum(name in whole for name in names) == (rows_max or 30)
        assert ("... and 22 more" in lines) == (rows_max is not None)
        assert sum(line.startswith("a-server-7") for line in lines) >= 2, "part under part"
