"""Data at fsspec locations: an S3 server on loopback, local://, and their errors."""

from __future__ import annotations

import gzip
import sys
from random import Random

import fsspec
import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.criteo_text import Example, examples_of, random_line, read_text
from tests.integration.planted_model import Linear, Named, trainer_for
from tests.jobs import Job
from tests.s3_server import put, s3_server
from trireme.data import QueueDataset, criteo
from trireme.errors import BadRequest, DataError
from trireme.fleet.fs_client import fs_client_options
from trireme.train import Dump
from trireme.train.dump import DumpFile

RANDOM = Random(11)
TEXTS = [b"\n".join(random_line(RANDOM) for _ in range(n)) for n in (300, 1, 40, 555, 7)]
EXPECTED = [example for data in TEXTS for example in read_text(data)]


@pytest.fixture(scope="module")
def s3():
    with s3_server() as options:
        for number, data in enumerate(TEXTS, 8):
            put(options, f"plain/part-{number}", data)
            put(options, f"gzip/part-{number}.gz", gzip.compress(data))
        put(options, "odd/empty", b"")
        yield options


def make(s3, paths="s3://bucket/plain/part-*", **options) -> QueueDataset:
    options = {"schema": criteo(), "batch_size": 64, "storage_options": s3} | options
    return QueueDataset(paths, **options)


def flat(batches) -> list[Example]:
    return [example for batch in batches for example in examples_of(batch)]


@pytest.mark.parametrize("pattern", ["plain/part-*", "gzip/*.gz"])
@pytest.mark.parametrize("num_streams", [1, 3])
def test_s3_reads_like_local_files(s3, pattern, num_streams):
    dataset = make(s3, f"s3://bucket/{pattern}", threads=3)
    shares = [list(dataset.stream(index, num_streams)) for index in range(num_streams)]
    assert flat(batch for share in shares for batch in share) == EXPECTED
    for index, share in enumerate(shares):
        middle = len(share) // 2
        rest = dataset.stream(index, num_streams, start=share[middle].position)
        assert flat(rest) == flat(share[middle + 1 :])


def test_local_locations_are_local_files(tmp_path):
    (tmp_path / "part-1").write_bytes(TEXTS[0])
    for protocol in ("local://", "file://"):
        dataset = QueueDataset(f"{protocol}{tmp_path}/part-*", schema=criteo(), batch_size=64)
        assert dataset.files[0].is_local
        assert flat(dataset) == read_text(TEXTS[0])


def test_local_and_remote_files_in_one_list(s3, tmp_path):
    (tmp_path / "part-1").write_bytes(TEXTS[0])
    dataset = make(s3, [tmp_path / "part-1", "s3://bucket/plain/part-11"])
    assert flat(dataset) == read_text(TEXTS[0]) + read_text(TEXTS[3])


class PerWorker(IterableDataset):
    def __init__(self, dataset: QueueDataset) -> None:
        self.dataset = dataset

    def __iter__(self):
        worker = get_worker_info()
        return self.dataset.stream(worker.id, worker.num_workers)


def test_forked_workers_of_a_data_loader_read_s3(s3):
    batches = list(DataLoader(PerWorker(make(s3)), batch_size=None, num_workers=2))
    batches.sort(key=lambda batch: batch.stream)
    assert flat(batches) == EXPECTED


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ("s3://bucket/plain/none", "found nothing at 's3://bucket/plain/none'"),
        ("s3://nowhere/plain/part-8", "found nothing at 's3://nowhere/plain/part-8'"),
        ("s3://bucket/plain/none-*", "found none that match 's3://bucket/plain/none-"),
        ("s3://bucket/plain", "found the directory 's3://bucket/plain'"),
        ("s3://bucket/odd/empty", "found the empty file 's3://bucket/odd/empty'"),
    ],
)
def test_missing_files_are_named(s3, paths, message):
    with pytest.raises(DataError, match=message):
        make(s3, paths)


def test_an_object_that_changes_is_an_error(s3):
    put(s3, "changing/part-1", TEXTS[0])
    put(s3, "changing/part-2.gz", gzip.compress(TEXTS[0]))
    for name in ("part-1", "part-2.gz"):
        dataset = make(s3, f"s3://bucket/changing/{name}")
        put(s3, f"changing/{name}", b"short")
        with pytest.raises(DataError, match=f"changing/{name}"):
            list(dataset)


def test_an_object_of_the_same_size_in_its_place_is_an_error(s3):
    put(s3, "odd/replaced", TEXTS[0])
    before = make(s3, "s3://bucket/odd/replaced")
    put(s3, "odd/replaced", TEXTS[0][::-1])
    with pytest.raises(DataError, match=r"cannot read s3://bucket/odd/replaced: .* has changed"):
        list(before)
    after = make(s3, "s3://bucket/odd/replaced")
    assert "ETag" in before.cut
    assert before.cut != after.cut  # at another worker, or after a restart


def test_added_rows_are_listed(s3):
    put(s3, "growing/part-1", TEXTS[0])
    assert len(make(s3, "s3://bucket/growing/*").files) == 1
    put(s3, "growing/part-2", TEXTS[0])
    assert len(make(s3, "s3://bucket/growing/*").files) == 2


def test_a_server_that_cannot_be_reached_is_named():
    options = {
        "key": "k",
        "secret": "s",
        "endpoint_url": "http://127.0.0.1:9",
        "config_kwargs": {"connect_timeout": 1, "retries": {"max_attempts": 0}},
    }
    with pytest.raises(DataError, match=r"cannot read 's3://bucket/part-1': .*127.0.0.1:9"):
        make(options, "s3://bucket/part-1")


def test_a_password_is_not_shown(s3):
    dataset = make(s3)
    assert "secret" not in repr(dataset.files[0])


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(BadRequest, match=r"reads s3://, found none; pip install trireme-ps\[s3\]"):
        QueueDataset("s3://bucket/x", schema=criteo(), batch_size=1)
    with pytest.raises(BadRequest, match=r"cannot read 'nfs3://x'.*nfs3"):
        QueueDataset("nfs3://x", schema=criteo(), batch_size=1)


def test_hdfs_without_its_library_is_an_error_that_names_it(monkeypatch):
    def refuse(location: str, **options: object) -> None:
        raise OSError("Unable to load libjvm " + "dlopen failed: " * 1000)

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(DataError, match=r"Unable to load libjvm.*; HDFS needs JAVA_HOME") as raised:
        QueueDataset("hdfs://host:9000/x-*", schema=criteo(), batch_size=1)
    assert len(str(raised.value)) < 700


def test_storage_options_without_effect_are_refused(tmp_path):
    (tmp_path / "part-1").write_bytes(TEXTS[0])
    with pytest.raises(BadRequest, match=r"storage_options only with locations .*found key"):
        make({"key": "k"}, tmp_path / "part-1")


def test_paddlerecs_file_system_becomes_storage_options():
    assert fs_client_options() == ("", {})
    assert fs_client_options("hdfs://host:9000/", "me") == ("hdfs://host:9000", {"user": "me"})
    for arguments, message in [
        (("afs://host",), r"fs_client\.uri: expected hdfs://HOST:PORT .*found 'afs://host'"),
        (("hdfs://h", "me", "secret"), r"fs_client\.passwd: expected none, .*remove the key"),
        (("hdfs://h", "", "", "bin/hadoop"), r"hadoop_bin: expected none.*remove 'bin/hadoop'"),
        (("", "me"), "expected uri beside user, found none"),
    ]:
        with pytest.raises(BadRequest, match=message) as raised:
            fs_client_options(*arguments)
        assert "secret" not in str(raised.value)


def test_dumps_go_to_s3_and_leave_nothing_else(s3):
    path = "s3://bucket/dumps/1"
    dump = Dump(path=path, fields=["output"], storage_options=s3)
    with Job(1) as job:
        job.run(2, lambda cluster: trainer_for(cluster).evaluate(Named(101), dump=dump))
        files = fsspec.filesystem("s3", **s3)
        files.invalidate_cache()
        parts = sorted(files.ls(path, detail=False))
        assert [part.rpartition("/")[2] for part in parts] == ["part-00000", "part-00001"]
        lines = b"".join(files.cat(part) for part in parts).decode().splitlines()
        assert [line.split("\t")[0] for line in lines] == Named(101).ids
    with pytest.raises(BadRequest, match="found part-00000 in s3"):
        DumpFile(dump, Named(1), Linear(), 0)
