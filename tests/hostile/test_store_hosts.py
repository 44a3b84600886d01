"""A server connects to no host that a message names, unless its own configuration lists it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trireme as tr
from tests.jobs import InProcessServer
from trireme.errors import BadRequest
from trireme.job.connecting import connect
from trireme.server.store_hosts import check_hosts, parse_hosts

LISTED = parse_hosts("minio.example, 10.0.0.5:9000,[::1]:80")


@pytest.fixture
def inside() -> Iterator[socket.socket]:
    """A listener that only the server's machine reaches."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


def test_a_host_that_is_not_listed_is_never_called(inside: socket.socket, tmp_path: Path) -> None:
    host = f"127.0.0.1:{inside.getsockname()[1]}"
    server = InProcessServer(tmp_path, store_hosts=parse_hosts("minio.example"))
    options = {"endpoint_url": f"http://{host}", "key": "k", "secret": "s"}
    places: list[tuple[str, dict[str, Any]]] = [
        ("s3://bucket/x", options),
        ("s3://bucket/x", {"client_kwargs": options}),
        (f"webhdfs://{host}/x", {}),
    ]
    with server.rpc, connect([server.endpoint], worker=0, num_workers=1, timeout_s=30) as cluster:
        call = cluster.client.servers.everywhere
        cluster.client.create_table(tr.Table("t", dim=4).schema)
        call("import.begin", {"table": "t", "id": "x"})
        for place, stored in places:
            common = {"table": "t", "id": "x", "time": 0, "storage_options": stored}
            checkpoint = {"action": "settle", "job": "j", "path": place, "options": stored}
            for method, body in [
                ("import.parquet", {**common, "files": [place], "columns": {}}),
                ("export.parquet", {**common, "folder": place, "state": False}),
                ("checkpoint.start", checkpoint),
            ]:
                with pytest.raises(
                    BadRequest, match=r"among \['minio.example'\], found .*--store_"
                ):
                    call(method, body)
    with pytest.raises(BlockingIOError):
        inside.accept()


@pytest.mark.parametrize(
    ("location", "options"),
    [
        ("s3://b/k", {"endpoint_url": "http://minio.example:9000"}),
        ("s3://b/k", {"client_kwargs": {"endpoint_url": "https://MINIO.example"}}),
        ("s3://b/k", {"endpoint_url": b"http://10.0.0.5:9000/"}),
        ("s3://b/k", {"endpoint_url": "http://[::1]:80"}),
        ("s3://b/k", {"key": "k", "secret": "a/b+c=", "client_kwargs": {"region_name": "x"}}),
        ("webhdfs://user@minio.example:9870/a", {}),
        ("hdfs:///a", {}),
        ("abfs://c/k", {"account_name": "name1", "account_key": "a=="}),
    ],
)
def test_listed_hosts_and_public_services_may_be_named(location: str, options: Any) -> None:
    check_hosts(location, options, LISTED)


@pytest.mark.parametrize(
    ("location", "options"),
    [
        ("s3://b/k", {"endpoint_url": "http://10.0.0.5:9001"}),
        ("s3://b/k", {"endpoint_url": "http://10.0.0.5"}),
        ("s3://b/k", {"endpoint_url": "http://minio.example@evil"}),
        ("s3://b/k", {"endpoint_url": "http://evil\\@minio.example"}),
        ("s3://b/k", {"endpoint_url": "http://evil#minio.example"}),
        ("s3://b/k", {"endpoint_url": b"http://evil"}),
        ("s3://b/k", {"config_kwargs": {"proxies": {"http": "evil:80"}}}),
        ("oss://b/k", {"endpoint": "evil"}),
        ("hdfs://evil:9000/a", {}),
        ("hdfs:///a", {"host": "evil"}),
        ("webhdfs://minio.example@evil/a", {}),
        ("abfs://c/k", {"account_host": "evil"}),
        ("abfs://c/k", {"account_name": "evil.example/"}),
        ("abfs://c/k", {"connection_string": "AccountName=a;EndpointSuffix=evil"}),
        ("abfs://c/k", {"connection_string": "AccountName=a;BlobEndpoint=http://evil/x"}),
        ("gs://b/k", {"token": {"token_uri": "http://evil"}}),
    ],
)
def test_other_hosts_are_refused_however_they_are_named(location: str, options: Any) -> None:
    with pytest.raises(BadRequest, match="--store_hosts or TRIREME_STORE_HOSTS"):
        check_hosts(location, options, LISTED)
    check_hosts(location, options, None)


@pytest.mark.parametrize("text", ["http://minio.example", "a b", "a/b", "a:x"])
def test_a_list_of_anything_but_hosts_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="expected HOST or HOST:PORT"):
        parse_hosts(text)
