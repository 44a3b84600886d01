"""Servers are killed at random moments and restarted: no acknowledged push is lost, none is applied
twice, and sync training keeps its exact bits.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

import trireme as tr
from tests.integration import test_sync
from tests.integration.durable_servers import SERVER, DurableServers
from tests.jobs import Job, in_threads
from tests.long import pick
from tests.programs import Template
from tests.seeds import SEED
from tests.tables import T_ROWS
from trireme import _core
from trireme.checkpoint.worker_side import save as save_module
from trireme.checkpoint.worker_side.load import load_checkpoint
from trireme.checkpoint.worker_side.publication import Draft, open_draft
from trireme.checkpoint.worker_side.save import save_checkpoint
from trireme.errors import Corruption, DeadlineExceeded, ResourceExhausted, SchemaMismatch
from trireme.job.cluster import Cluster
from trireme.optim import values_of_group
from trireme.server.log.segment import SegmentReader
from trireme.storage.document import Document
from trireme.storage.storage import Storage
from trireme.worker.gradients import PushHeader, TableGradient
from trireme.worker.passes import PassNote, begin_pass, leave

NUM_KEYS, DIM = 400, 2
NUM_PUSHES = {"process": pick(short=100, long=2000), "machine": pick(short=40, long=500)}
NUM_KILLS = pick(short=3, long=30)
TABLE = tr.Table("t", dim=DIM, optimizer=tr.optim.Count(), initializer=tr.initializer.Constant(0.0))
VALUES = values_of_group(TABLE.optimizer.group(), 1)


def some_keys(cluster: Cluster, seed: int) -> np.ndarray:
    keys = np.random.default_rng(seed).choice(NUM_KEYS, 60, replace=False).astype(np.uint64)
    return _core.unique(keys, cluster.pool)[0]


def push(cluster: Cluster, sequence: int, *, step: int = 0) -> np.ndarray:
    keys = some_keys(cluster, 10_000 * cluster.worker + sequence)
    gradient = TableGradient(keys, torch.zeros(len(keys), DIM), VALUES)
    cluster.client.push(
        PushHeader(sequence, step, [], examples=1), {T_ROWS: gradient}, staged=step > 0
    )
    return keys


def counts(cluster: Cluster) -> np.ndarray:
    """How often each key was pushed, as the servers have it."""
    keys = _core.unique(np.arange(NUM_KEYS, dtype=np.uint64), cluster.pool)[0]
    actual = np.zeros(NUM_KEYS)
    actual[keys.astype(np.int64)] = cluster.client.pull({T_ROWS: keys}).rows[T_ROWS].numpy()[:, 0]
    return actual


@contextmanager
def killing(servers: DurableServers, random: Random) -> Iterator[threading.Event]:
    """While the block runs, random servers are killed and restarted, now and then once more
    before they serve. The event is set after the last time.
    """
    is_over, is_done = threading.Event(), threading.Event()

    def run() -> None:
        while servers.num_kills < NUM_KILLS and not is_over.wait(random.uniform(0, 0.4)):
            server = random.randrange(len(servers.addresses))
            servers.kill(server)
            while random.random() < 0.3:
                program = servers.launch(server)
                if random.random() < 0.5:
                    program.wait_line("^trireme: server")
                servers.kill(server)
            servers.start(server)
        is_done.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield is_done
    finally:
        is_over.set()
        thread.join()
    print(f"{servers.num_kills} kills")


@pytest.mark.parametrize("durability", ["process", "machine"])
def test_every_push_counts_once_whenever_servers_are_killed(
    programs: Template, tmp_path: Path, durability: str
) -> None:
    print(f"seed {SEED}")
    random = Random(f"{SEED} {durability}")
    num_workers = 2
    with DurableServers(programs, 2, tmp_path, durability=durability) as servers:
        clusters = in_threads([lambda w=w: servers.join(w, num_workers) for w in (0, 1)])
        for cluster in clusters:
            cluster.client.create_table(TABLE.schema)
        expected = [np.zeros(NUM_KEYS) for _ in clusters]
        with killing(servers, random) as is_done:

            def work(cluster: Cluster) -> None:
                sequence = 0
                while sequence < NUM_PUSHES[durability] or not is_done.is_set():
                    sequence += 1
                    expected[cluster.worker][push(cluster, sequence).astype(np.int64)] += 1

            in_threads([lambda c=c: work(c) for c in clusters])
        assert np.array_equal(counts(clusters[0]), sum(expected))
        in_threads([cluster.close for cluster in clusters])
        for server in (0, 1):
            servers.program(server).wait_line("all workers have said goodbye")
            assert servers.program(server).finish() == 0
            assert [p.name for p in servers.state_dir(server).iterdir()] == ["lock"]


def test_sync_training_is_bit_equal_whenever_servers_are_killed(
    programs: Template, tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    rule = test_sync.RULES["adam"]
    with Job(2) as job:
        expected = job.run(2, lambda cluster: test_sync.train(cluster, rule, [cluster.worker]))[0]
    with DurableServers(programs, 2, tmp_path) as servers:
        clusters = in_threads([lambda w=w: servers.join(w, 2) for w in (0, 1)])
        with killing(servers, Random(f"{SEED} sync")):
            actual = in_threads(
                [lambda c=c: test_sync.train(c, rule, [c.worker]) for c in clusters]
            )[0]
        in_threads([cluster.close for cluster in clusters])
    for name, weights in expected.items():
        assert np.array_equal(actual[name], weights), name


def test_the_coordinator_is_killed_while_workers_meet(programs: Template, tmp_path: Path) -> None:
    """At a barrier, at the beginning of a pass and at its end; each worker gets the same answers as
    the others, once.
    """
    print(f"seed {SEED}")
    random = Random(f"{SEED} coordinator")
    num_workers, num_rounds = 2, pick(short=3, long=20)
    with DurableServers(programs, 1, tmp_path) as servers:
        clusters = in_threads([lambda w=w: servers.join(w, num_workers) for w in (0, 1)])
        for cluster in clusters:
            cluster.client.create_table(TABLE.schema)

        def work(cluster: Cluster) -> tuple[list[int], list[list[int]]]:
            steps, meetings, sequence, client = [], [], 0, cluster.client
            for number in range(num_rounds):
                steps.append(begin_pass(client, PassNote()).first_step)
                for step in range(steps[-1], steps[-1] + 2 + cluster.worker):
                    sequence += 1
                    push(cluster, sequence, step=step)
                    client.pull({}, staged=step)
                leave(client, step + 1)
                brought = {"round": number, "worker": cluster.worker}
                gathered = client.coordinator.gather(
                    brought, [np.arange(number)], purpose=f"{number}"
                )
                meetings.append([body["worker"] for body, _ in gathered])
                assert all(body["round"] == number for body, _ in gathered)
                assert all(len(arrays[0]) == number for _, arrays in gathered)
            return steps, meetings

        with killing(servers, random):
            results = in_threads([lambda c=c: work(c) for c in clusters])
        assert (
            results[0]
            == results[1]
            == ([1 + 3 * n for n in range(num_rounds)], [[0, 1]] * num_rounds)
        )
        total = np.zeros(NUM_KEYS)
        for worker, num_steps in ((0, 2), (1, 3)):
            for sequence in range(1, num_steps * num_rounds + 1):
                total[some_keys(clusters[worker], 10_000 * worker + sequence).astype(np.int64)] += 1
        assert counts(clusters[0]).sum() <= total.sum()  # a key of both counts once in a step
        in_threads([cluster.close for cluster in clusters])


def test_a_save_begins_anew_when_a_server_is_killed_amid_it(
    programs: Template, tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    with DurableServers(programs, 2, tmp_path) as servers:
        cluster = servers.join(0, 1)
        cluster.client.create_table(TABLE.schema)
        sequence, expected = 0, np.zeros(NUM_KEYS)
        with killing(servers, Random(f"{SEED} save")) as is_done:
            while not is_done.is_set():
                sequence += 1
                expected[push(cluster, sequence).astype(np.int64)] += 1
                path = tmp_path / str(sequence)
                save_checkpoint(cluster.client, path, extra={}, tensors={}, keep=1)
        cluster.close()
    with Job(1) as job, job.join(0, 1) as other:
        other.client.create_table(TABLE.schema)
        load_checkpoint(other.client, path)
        assert np.array_equal(counts(other), expected)


def test_a_save_begins_anew_where_a_killed_server_has_left_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that begins it had reached the killed one too, and is repeated."""
    drafts = list[Path]()

    @contextmanager
    def draft_with_leftovers(target: Storage) -> Iterator[Draft]:
        with open_draft(target) as draft:
            if not drafts:
                left = Path(draft.storage.name) / "tables" / "0" / "0000-4095.arrow"
                left.parent.mkdir(parents=True)
                left.write_bytes(b"half")
            drafts.append(Path(draft.storage.name))
            yield draft

    monkeypatch.setattr(save_module, "open_draft", draft_with_leftovers)
    with Job(1) as job, job.join(0, 1) as cluster:
        cluster.client.create_table(TABLE.schema)
        push(cluster, 1)
        save_checkpoint(cluster.client, tmp_path / "c", extra={}, tensors={})
        assert len(drafts) == 2
        load_checkpoint(cluster.client, tmp_path / "c")


def test_workers_that_left_are_not_waited_for_after_a_restart(
    programs: Template, tmp_path: Path
) -> None:
    with DurableServers(programs, 1, tmp_path) as servers:
        clusters = in_threads([lambda w=w: servers.join(w, 2) for w in (0, 1)])
        clusters[0].close()
        servers.kill(0)
        server = servers.start(0)
        clusters[1].close()
        server.wait_line("all workers have said goodbye")
        assert server.finish() == 0


@pytest.mark.parametrize("server", [0, 1])
def test_a_server_without_its_old_disk_is_refused(
    programs: Template, tmp_path: Path, server: int
) -> None:
    with DurableServers(programs, 2, tmp_path) as servers:
        cluster = servers.join(0, 1)
        cluster.client.create_table(TABLE.schema)
        push(cluster, 1)
        servers.kill(server)
        shutil.rmtree(servers.state_dir(server))
        servers.start(server)
        with pytest.raises(Corruption, match="load the newest checkpoint"):
            push(cluster, 2)
        with pytest.raises((Corruption, SchemaMismatch), match=r"newest checkpoint|--state_dir"):
            servers.join(0, 1)
        cluster.abandon()


def test_a_restarted_server_without_durability_is_refused(
    programs: Template, tmp_path: Path
) -> None:
    with DurableServers(programs, 2, tmp_path, durability="none") as servers:
        cluster = servers.join(0, 1)
        cluster.client.create_table(TABLE.schema)
        push(cluster, 1)
        servers.kill(1)
        servers.start(1)
        with pytest.raises(Corruption, match="--durability process keeps"):
            push(cluster, 2)
        cluster.abandon()


def kill_all(servers: DurableServers) -> None:
    for server in range(len(servers.addresses)):
        servers.kill(server)


def restart_swapped(servers: DurableServers) -> None:
    """Exchange the state folders of two killed servers, and start them where they were."""
    first, second = servers.state_dir(0), servers.state_dir(1)
    first.rename(first.with_name("aside"))
    second.rename(first)
    first.with_name("aside").rename(second)
    for server in (0, 1):
        servers.start(server)


def test_swapped_state_folders_are_noticed_by_every_call_and_lose_nothing(
    programs: Template, tmp_path: Path
) -> None:
    with DurableServers(programs, 2, tmp_path) as servers:
        cluster = servers.join(0, 1)
        cluster.client.create_table(TABLE.schema)
        expected = np.zeros(NUM_KEYS)
        expected[push(cluster, 1).astype(np.int64)] += 1
        keys = {T_ROWS: some_keys(cluster, 0)}
        calls: dict[str, Callable[[], object]] = {
            "pull": lambda: cluster.client.pull(keys),
            "push": lambda: push(cluster, 2),
            "ps.streams": cluster.client.stream_position,
            "save": lambda: save_checkpoint(
                cluster.client, tmp_path / "saved", extra={}, tensors={}, keep=1
            ),
        }
        other = r"127\.0\.0\.1:\d+ .*found the state of 127\.0\.0\.1:\d+.*its own --state_dir"

        def fails(call: Callable[[], object]) -> None:
            with pytest.raises(Corruption, match=other):
                call()

        kill_all(servers)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(fails, calls["push"])
            restart_swapped(servers)
            waits.result()
        for call in calls.values():
            fails(call)
        with pytest.raises(SchemaMismatch, match="expected the coordinator at server 0"):
            servers.join(0, 1)
        kill_all(servers)
        state = ["--durability", "process", "--state_dir", str(servers.state_dir(0))]
        place = {"TRIREME_SERVERS": ",".join(servers.addresses), "TRIREME_INDEX": "0"}
        with programs.start("one that knows its place", [*SERVER, *state], place) as program:
            program.wait_line("expected the state of server 0 in .*, found that of server 1")
            assert program.finish() == 2
        restart_swapped(servers)
        assert np.array_equal(counts(cluster), expected)
        expected[push(cluster, 2).astype(np.int64)] += 1
        cluster.abandon()
        successor = servers.join(0, 1)
        assert np.array_equal(counts(successor), expected)
        successor.close()


def test_the_coordinator_of_another_job_is_refused(programs: Template, tmp_path: Path) -> None:
    with DurableServers(programs, 1, tmp_path) as servers:
        cluster = servers.join(0, 1)
        servers.kill(0)
        document = Document(servers.state_dir(0) / "coordinator", is_synced=False)
        document.write({**document.read(), "states": ["another"]})
        program = servers.launch(0)
        program.wait_line(
            "expected .*coordinator beside state another of server 0, found it beside"
        )
        assert program.finish() == 2
        cluster.abandon()


def test_a_log_that_has_lost_pushes_of_a_living_worker_is_noticed(
    programs: Template, tmp_path: Path
) -> None:
    with DurableServers(programs, 2, tmp_path, log_bytes=1 << 30) as servers:
        cluster = servers.join(0, 1, timeout_s=4)
        cluster.client.create_table(TABLE.schema)
        for sequence in (1, 2, 3):
            push(cluster, sequence)
        [log] = servers.state_dir(1).glob("log-*")
        size = log.stat().st_size
        for sequence in (4, 5):
            push(cluster, sequence)
        servers.kill(1)
        with log.open("rb+") as file:  # as a machine leaves it that had not written the rest yet
            file.truncate(size)
        servers.start(1)
        with pytest.raises(DeadlineExceeded, match=r"4 next, found 6; .*newest checkpoint"):
            push(cluster, 6)
        cluster.abandon()


def test_a_deleted_segment_is_noticed(programs: Template, tmp_path: Path) -> None:
    """The only one, and the last one of two."""
    with DurableServers(programs, 1, tmp_path, log_bytes=1 << 30) as servers:
        cluster = servers.join(0, 1)
        cluster.client.create_table(TABLE.schema)
        expected = np.zeros(NUM_KEYS)
        for number in (1, 2):
            expected[push(cluster, number).astype(np.int64)] += 1
            servers.kill(0)
            segment = servers.state_dir(0) / f"log-{number:08d}"
            segment.rename(tmp_path / "deleted")
            program = servers.launch(0)
            program.wait_line(rf"expected segments up to {number} in .*; put {segment.name} back")
            assert program.finish() == 2
            (tmp_path / "deleted").rename(segment)
            servers.start(0)
        assert np.array_equal(counts(cluster), expected)
        cluster.close()


def test_a_flipped_bit_in_the_last_record_is_noticed(programs: Template, tmp_path: Path) -> None:
    """It is not taken for the end of a log that a power loss has left: it was acknowledged."""
    with DurableServers(programs, 1, tmp_path, durability="machine") as servers:
        cluster = servers.join(0, 1)
        cluster.client.create_table(TABLE.schema)
        push(cluster, 1)
        shrink = {"slices": 1, "slice": 0, "time": 1, "day_over": True}
        cluster.client.servers.everywhere("policy.shrink", shrink)
        servers.kill(0)
        segment = servers.state_dir(0) / "log-00000001"
        *_, (at, (method, *_)) = SegmentReader(segment).records()
        assert method == "policy.shrink"
        whole = segment.read_bytes()
        for flipped in (at + 3, at + 40, at + 100):
            segment.write_bytes(
                whole[:flipped] + bytes([whole[flipped] ^ 1]) + whole[flipped + 1 :]
            )
            program = servers.launch(0)
            program.wait_line(f"log-00000001: the record at offset {at} is damaged")
            assert program.finish() == 2
        segment.write_bytes(whole)
        servers.start(0)
        cluster.close()


def test_a_full_disk_refuses_pushes_and_spares_what_was_acknowledged(
    programs: Template, small_disk: Path
) -> None:
    with DurableServers(programs, 1, small_disk, log_bytes=1 << 30) as servers:
        other_file = small_disk / "other"
        other_file.write_bytes(bytes(300_000))
        cluster = servers.join(0, 1)
        cluster.client.create_table(TABLE.schema)
        expected, sequence = np.zeros(NUM_KEYS), 0
        with contextlib.suppress(ResourceExhausted):
            while True:
                sequence += 1
                expected[push(cluster, sequence).astype(np.int64)] += 1
        with pytest.raises(ResourceExhausted, match="log-00000001: No space left on device"):
            push(cluster, sequence)
        assert np.array_equal(counts(cluster), expected)
        servers.kill(0)
        other_file.unlink()
        servers.start(0)
        assert np.array_equal(counts(cluster), expected)
        assert cluster.client.stream_position().sequence == sequence - 1
        expected[push(cluster, sequence).astype(np.int64)] += 1
        assert np.array_equal(counts(cluster), expected)
        cluster.abandon()


def test_one_state_folder_serves_one_process(programs: Template, tmp_path: Path) -> None:
    with DurableServers(programs, 1, tmp_path) as servers:
        options = ["--durability", "process", "--state_dir", str(servers.state_dir(0))]
        with programs.start("second", [*SERVER, *options, "--listen", "127.0.0.1:0"], {}) as second:
            second.wait_line("found another process that uses it; give each server another")
            assert second.finish() == 2
