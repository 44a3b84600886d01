"""What real processes serve over HTTP, and that docs/metrics.md lists all of it."""

from __future__ import annotations

import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.test_pages import run_blocks
from tests.programs import Program, Template
from tests.repo import tree
from trireme.job.embedded import embedded
from trireme.server.row_tier import make_row_tier

TRAINING_SCRIPT = str(Path(__file__).with_name("training_script.py"))
SERVER = ["-m", "trireme", "server", "--listen", "127.0.0.1:0", "--metrics", "0"]
AT = r"metrics at (\S+)/metrics"

Samples = Mapping[str, Mapping[tuple[str, ...], float]]


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def families(url: str) -> dict[str, Metric]:
    status, text = get(f"{url}/metrics")
    assert status == 200
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(family: Metric, *labels: str) -> dict[tuple[str, ...], float]:
    """Of samples of that name itself, by the values of these labels."""
    actual = {}
    for sample in family.samples:
        if sample.name in (family.name, f"{family.name}_total", f"{family.name}_count"):
            key = tuple(sample.labels[label] for label in labels)
            actual[key] = actual.get(key, 0) + sample.value
    return actual


def start_server(programs: Template, **env: str) -> tuple[Program, str, str]:
    """The server, where its metrics are, and its address."""
    server = programs.start("server", SERVER, {"TRIREME_TIMEOUT_S": "60", **env})
    return server, server.wait_line(AT)[1], server.wait_line(r"^listening on (\S+)")[1]


def worker(programs: Template, server: str, *arguments: str, num: int = 1, **env: str) -> Program:
    place = {"TRIREME_ROLE": "worker", "TRIREME_SERVERS": server, "TRIREME_INDEX": "0"}
    place |= {"TRIREME_NUM_WORKERS": str(num), "TRIREME_METRICS": "0", "TRIREME_THREADS": "1"}
    env = {"TRIREME_TIMEOUT_S": "60", **place, **env}
    return programs.start("worker 0", [TRAINING_SCRIPT, *arguments], env)


def wait_for_text(url: str, words: str) -> None:
    deadline = time.monotonic() + 60
    while words not in get(url)[1]:
        assert time.monotonic() < deadline, (url, words)


def wait_for_health(url: str, words: str) -> None:
    """Until /healthz says it: each question is a call with a deadline of its own, and the
    processes say nothing more that could be waited for.
    """
    wait_for_text(f"{url}/healthz", words)


def documented() -> dict[str, dict[str, tuple[str, set[str]]]]:
    """Per process (S, W, H, C, E) type and labels of each metric, as the page says."""
    page = (tree.ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(trireme_\w+)` \| (\w+) \|(.*?)\| ([SWHCE ]+) \|", page, re.MULTILINE)
    assert len(rows) > 25
    return {
        letter: {
            name: (kind, set(re.findall(r"`(\w+)`", labels)))
            for name, kind, labels, processes in rows
            if letter in processes.split()
        }
        for letter in "SWHCE"
    }


def scraped(url: str) -> dict[str, tuple[str, set[str]]]:
    actual = {}
    for name, family in families(url).items():
        if name.startswith("process_"):
            continue
        full = f"{name}_total" if family.type == "counter" else name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        actual[full] = (family.type, labels)
        assert family.documentation.endswith("."), name
    return actual


def test_the_page_lists_the_metrics_of_servers_and_workers(
    programs: Template, tmp_path: Path
) -> None:
    tier = {"TRIREME_MEMORY": "64MiB", "TRIREME_SSD_DIR": str(tmp_path)}
    server, server_url, address = start_server(programs, **tier)
    with server, worker(programs, address) as training:
        worker_url = training.wait_line(AT)[1]
        training.wait_line(r"^batch 9$")
        wait_for_text(f"{server_url}/metrics", "trireme_worker_reported{")
        pages = documented()
        # Labels are absent where nothing has happened: no checkpoint was made, there are no compute
        # workers, and a loop without a Trainer shows no figures.
        unlabeled = {
            "trireme_checkpoint_age_seconds": {"mode"},
            "trireme_worker_label": {"worker", "label", "what"},
            "trireme_worker_reported_figure": {"worker", "figure"},
            "trireme_worker_figure": {"figure"},
        }
        for page, url in (("S", server_url), ("W", worker_url)):
            expected, actual = dict(pages[page]), scraped(url)
            for name in unlabeled.keys() & expected.keys():
                kind, labels = expected.pop(name)
                assert labels == unlabeled[name]
                assert actual.pop(name) == (kind, set())
            assert actual == expected
        assert get(f"{server_url}/healthz") == (200, "ok\n")
        assert get(f"{worker_url}/healthz") == (200, "ok\n")
        _check_numbers(families(server_url), families(worker_url))


def _check_numbers(server: Mapping[str, Metric], worker: Mapping[str, Metric]) -> None:
    """Training continues while one number is read after the other, so only what cannot be overtaken
    is compared.
    """
    requests = values(server["trireme_server_requests"], "method", "code")
    assert requests["ps.pull", "OK"] > 0
    assert values(server["trireme_server_request_seconds"], "method")["ps.push",] > 0
    assert values(server["trireme_pushes"], "stream")["0",] > 0
    assert values(server["trireme_push_staleness"])[()] > 0
    [(table, rows)] = values(server["trireme_table_rows"], "table").items()
    assert rows > 0
    assert values(server["trireme_table_bytes"], "table")[table] > 8 * rows
    pulled = values(server["trireme_table_pulled_keys"], "table")[table]
    assert pulled > 0
    assert values(server["trireme_table_missing_keys"], "table")[table] > 0
    assert values(server["trireme_server_connections"])[()] >= 3
    assert values(worker["trireme_worker_sent_bytes"])[()] > 1000
    assert values(worker["trireme_worker_steps"])[()] > 0
    assert values(worker["trireme_worker_calls"], "method")["ps.pull",] > 0
    assert sum(values(worker["trireme_worker_retries"], "method").values()) == 0


def test_an_embedded_process_tells_both_sides(tmp_path: Path) -> None:
    with embedded(metrics="0", tier=make_row_tier("64MiB", str(tmp_path))) as cluster:
        url = cluster.metrics.url
        assert url is not None
        actual = scraped(url)
        pages = documented()["E"]
        assert set(actual) == set(pages)
        assert all(kind == actual[name][0] for name, (kind, _) in pages.items())
        assert get(f"{url}/healthz") == (200, "ok\n")
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=60)


def test_a_waiting_worker_names_the_absent_servers(programs: Template) -> None:
    server, server_url, address = start_server(programs)
    with server:
        server.signal(signal.SIGSTOP)
        with worker(programs, address) as training:
            url = training.wait_line(AT)[1]
            wait_for_health(url, f"waiting for servers {address}")
            assert get(f"{url}/healthz")[0] == 503
            server.signal(signal.SIGCONT)
            training.wait_line(r"^batch 9$")
            wait_for_health(url, "ok\n")
            server.signal(signal.SIGSTOP)
            training.wait_line("waiting for .*no answer for 3 s")
            wait_for_health(url, f"waiting for {address}")
            server.signal(signal.SIGCONT)
            wait_for_health(url, "ok\n")
    del server_url


def test_a_waiting_worker_names_the_worker_it_waits_for(programs: Template) -> None:
    server, server_url, address = start_server(programs)
    with server, worker(programs, address, "--mode", "sync", num=2) as training:
        url = training.wait_line(AT)[1]
        training.wait_line("waiting for .*coord.gather")
        wait_for_health(url, "(coord.gather): no answer")
        assert get(f"{server_url}/healthz") == (200, "ok\n")


def test_the_page_of_metrics(programs: Template, tmp_path: Path) -> None:
    output = run_blocks(programs, "metrics.md", tmp_path)
    assert len(re.findall(AT, output)) >= 2


def test_a_server_that_keeps_a_log_tells_how_much_of_it_a_recovery_would_replay(
    programs: Template, tmp_path: Path
) -> None:
    env = {"TRIREME_DURABILITY": "process", "TRIREME_STATE_DIR": str(tmp_path / "state")}
    server, url, address = start_server(programs, **env)
    with server, worker(programs, address, "--batches", "30") as training:
        training.wait_line(AT)
        training.wait_line(r"^batch 9$")
        actual = families(url)
        assert values(actual["trireme_log_bytes"])[()] > 0
        assert values(actual["trireme_log_age_seconds"])[()] > 0
        assert training.finish() == 0
