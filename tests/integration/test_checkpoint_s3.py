"""Checkpoints in an object store, which cannot rename: the manifest is written last."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import trireme as tr
from tests.integration.test_checkpoint import assert_equal, batches, everything, make_trainer
from tests.jobs import Job
from tests.s3_server import put, s3_server
from trireme.checkpoint.format.manifest import read_manifest
from trireme.checkpoint.worker_side import publication
from trireme.checkpoint.worker_side.verify import verify_checkpoint
from trireme.errors import BadRequest, Corruption
from trireme.job.cluster import Cluster
from trireme.job.embedded import embedded
from trireme.storage.storage import open_storage
from trireme.train.checkpointing.save import own_folder

Options = dict[str, Any]
ROOT = "s3://bucket"


@pytest.fixture(scope="module")
def s3() -> Iterator[Options]:
    with s3_server() as options:
        yield options


def names(s3: Options, folder: str) -> set[str]:
    """Of all objects in a folder of the bucket."""
    files = fsspec.filesystem("s3", **s3)
    files.invalidate_cache()
    return {name.removeprefix(f"bucket/{folder}/") for name in files.find(f"bucket/{folder}")}


def test_two_servers_save_to_s3_and_three_resume_from_it(s3: Options) -> None:
    path = f"{ROOT}/two/1"

    def work(cluster: Cluster) -> dict[str, Any]:
        trainer = make_trainer(cluster)
        trainer.fit(batches(6))
        trainer.save(path, storage_options=s3)
        at_save = everything(cluster, trainer)
        trainer.fit(batches(2, 1))
        trainer.save(f"{ROOT}/two/2", mode="delta", storage_options=s3)
        return {"at_save": at_save, "at_end": everything(cluster, trainer)}

    with Job(2) as job:
        [saved] = job.run(1, work)

    def go_on(cluster: Cluster) -> None:
        trainer = make_trainer(cluster)
        trainer.load(path, storage_options=s3)
        assert_equal(everything(cluster, trainer), saved["at_save"])
        trainer.load(f"{ROOT}/two/2", storage_options=s3)
        assert_equal(everything(cluster, trainer), saved["at_end"])

    with Job(3) as job:
        job.run(1, go_on)
    manifest, problems = verify_checkpoint(open_storage(path, s3))
    assert manifest is not None
    assert not problems
    assert {name.partition("/")[0] for name in names(s3, "two/1")} == {"manifest.json", manifest.id}


def test_a_fit_keeps_its_newest_in_s3_and_resumes(s3: Options) -> None:
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster)
        checkpoints = tr.Checkpoints(f"{ROOT}/fit", every_steps=2, keep=2, storage_options=s3)
        trainer.fit(batches(6), checkpoints=checkpoints)
        expected = everything(cluster, trainer)
    folders = {name.partition("/")[0] for name in names(s3, "fit")}
    assert len(folders) == 2
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster)
        actual = trainer.resume(f"{ROOT}/fit", storage_options=s3)
        assert actual == f"{ROOT}/fit/{max(folders, key=int)}"
        assert_equal(everything(cluster, trainer), expected)


def test_a_save_that_fails_shows_nothing(s3: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster)
        trainer.fit(batches(2))
        with monkeypatch.context() as patch:
            patch.setattr("trireme.checkpoint.server_side.save.write_tensors", full)
            with pytest.raises(Exception, match="No space left on device"):
                trainer.save(f"{ROOT}/failed/1", storage_options=s3)
        assert names(s3, "failed") == set()
        trainer.save(f"{ROOT}/failed/1", storage_options=s3)
        with pytest.raises(BadRequest, match=r"expected a new folder, found .*failed/1 with"):
            trainer.save(f"{ROOT}/failed/1", storage_options=s3)
        assert not verify_checkpoint(open_storage(f"{ROOT}/failed/1", s3))[1]


def test_a_store_that_lets_nobody_remove_objects_takes_checkpoints(
    s3: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As buckets of backups are set up: what a save needs not, nothing before it may need."""

    async def refuse(*_: object, **__: object) -> None:
        raise PermissionError("AccessDenied: s3:DeleteObject")

    monkeypatch.setattr(type(fsspec.filesystem("s3", **s3)), "_bulk_delete", refuse)
    with embedded(threads=1) as cluster:
        checkpoints = tr.Checkpoints(f"{ROOT}/kept", every_steps=2, keep=None, storage_options=s3)
        make_trainer(cluster).fit(batches(2), checkpoints=checkpoints)
    assert "1/manifest.json" in names(s3, "kept")


class Hdfs(MemoryFileSystem):
    """A store with folders, which stay when their files are removed."""

    protocol = "hdfs"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("hdfs://"))


def test_the_trial_before_a_fit_needs_a_place_of_its_own_and_leaves_none(
    s3: Options, tmp_path: Path
) -> None:
    """Whatever else lies there."""
    fsspec.register_implementation("hdfs", Hdfs, clobber=True)
    (tmp_path / "try").mkdir()
    put(s3, "free/try/manifest.json", b"{}")
    with embedded(threads=1) as cluster:
        for folder, options in ((tmp_path, None), (f"{ROOT}/free", s3), ("hdfs://runs", None)):
            with own_folder(cluster, folder, options):
                pass
    assert list(tmp_path.iterdir()) == [tmp_path / "try"]
    assert names(s3, "free") == {"try/manifest.json"}
    assert Hdfs().find("/", withdirs=True) == ["/runs"]


def test_of_two_saves_to_one_place_one_is_complete(
    s3: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is complete before the first reads back its manifest."""
    place = f"{ROOT}/race/1"
    with embedded(threads=1) as one, embedded(threads=1) as other:
        first, second = make_trainer(one), make_trainer(other)
        first.fit(batches(1))
        second.fit(batches(2))
        write, calls = publication.write_manifest, list[str]()

        def write_both(storage: Any, manifest: Any) -> None:
            calls.append(manifest["id"])
            write(storage, manifest)
            if len(calls) == 1:
                files = fsspec.filesystem("s3", **s3)
                files.rm("bucket/race/1/manifest.json")  # as if both had found none
                second.save(place, storage_options=s3)

        monkeypatch.setattr(publication, "write_manifest", write_both)
        with pytest.raises(BadRequest, match="saved there at the same time"):
            first.save(place, storage_options=s3)
    manifest, problems = verify_checkpoint(open_storage(place, s3))
    assert manifest is not None
    assert not problems
    assert calls[1:] == [manifest.id]
    assert not any(name.startswith(calls[0]) for name in names(s3, "race/1"))


def body_of(s3: Options, path: str) -> Any:
    """The content of a manifest, as `publish` takes it."""
    with fsspec.open(f"{path}/manifest.json", **s3) as file:
        return json.load(file)["manifest"]


@pytest.fixture(scope="module")
def saved(s3: Options) -> Any:
    """The content of the manifest of a small checkpoint."""
    with embedded(threads=1) as cluster:
        make_trainer(cluster).save(f"{ROOT}/model/1", storage_options=s3)
    return body_of(s3, f"{ROOT}/model/1")


def test_of_two_publications_to_one_place_the_second_fails(s3: Options, saved: Any) -> None:
    """Both drafts have found the place empty, and each reads its manifest before the next."""
    target = open_storage(f"{ROOT}/twice/1", s3)
    with publication.open_draft(target) as first, publication.open_draft(target) as second:
        publication.publish(first, target, saved | {"id": first.id})
        with pytest.raises(BadRequest, match="saved there at the same time"):
            publication.publish(second, target, saved | {"id": second.id})
    assert names(s3, "twice/1") == {"manifest.json", f"{first.id}/saving"}
    assert read_manifest(target).id == first.id


def test_a_failed_read_after_the_upload_removes_nothing(
    s3: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"{ROOT}/unread/1"
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster)
        trainer.fit(batches(1))
        expected = everything(cluster, trainer)

        def fail(_: object) -> None:
            raise BadRequest("cannot read: connection reset")

        with monkeypatch.context() as patch:
            patch.setattr(publication, "read_manifest", fail)
            with pytest.raises(BadRequest, match=r"reset; its files stay in .*trireme verify"):
                trainer.save(place, storage_options=s3)
        assert not verify_checkpoint(open_storage(place, s3))[1]
        trainer.fit(batches(1))
        trainer.load(place, storage_options=s3)
        assert_equal(everything(cluster, trainer), expected)


@pytest.mark.parametrize("is_uploaded", [True, False])
def test_an_upload_without_an_answer_is_looked_for(
    s3: Options, monkeypatch: pytest.MonkeyPatch, *, is_uploaded: bool
) -> None:
    place = f"{ROOT}/unanswered/{is_uploaded}"
    write = publication.write_manifest

    def upload(storage: Any, manifest: Any) -> None:
        if is_uploaded:
            write(storage, manifest)
        raise BadRequest("cannot write: connection reset")

    monkeypatch.setattr(publication, "write_manifest", upload)
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster)
        if is_uploaded:
            trainer.save(place, storage_options=s3)
            assert not verify_checkpoint(open_storage(place, s3))[1]
        else:  # it may still arrive: the files that it names stay
            with pytest.raises(BadRequest, match="connection reset; its files stay"):
                trainer.save(place, storage_options=s3)
            assert any(name.endswith(".arrow") for name in names(s3, f"unanswered/{is_uploaded}"))


def test_memory_is_no_store_of_servers() -> None:
    """Each process has a memory of its own."""
    with embedded(threads=1) as cluster, pytest.raises(BadRequest, match=r"found 'memory://x/1'"):
        make_trainer(cluster).save("memory://x/1")
    assert fsspec.filesystem("memory").find("x") == []  # others may have left files of their own


def test_old_files_of_a_killed_save_are_removed(s3: Options) -> None:
    def leave(id: str, hours: int) -> None:
        begun = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(hours=hours)
        marker = json.dumps({"begun_at": begun.isoformat()}).encode()
        put(s3, f"left/1/{id * 32}/saving", marker)
        put(s3, f"left/1/{id * 32}/tables/0/0000-4095.arrow", b"half")

    leave("a", 7)
    leave("b", 1)
    put(s3, "left/1/notes/mine", b"stays")
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster)
        with pytest.raises(BadRequest, match="not a complete checkpoint"):
            trainer.load(f"{ROOT}/left/1", storage_options=s3)
        trainer.fit(batches(1))
        trainer.save(f"{ROOT}/left/1", storage_options=s3)
    folders = {name.partition("/")[0] for name in names(s3, "left/1")}
    assert {"b" * 32, "notes", "manifest.json"} < folders
    assert "a" * 32 not in folders


def test_damaged_objects_are_named(s3: Options) -> None:
    place = f"{ROOT}/damaged/1"
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster)
        trainer.fit(batches(1))
        trainer.save(place, storage_options=s3)
        expected = everything(cluster, trainer)
        rows = next(name for name in names(s3, "damaged/1") if name.endswith("4095.arrow"))
        files = fsspec.filesystem("s3", **s3)
        data = files.cat(f"bucket/damaged/1/{rows}")
        for damaged in (data[:-1], data[:100] + bytes([data[100] ^ 1]) + data[101:], None):
            if damaged is None:
                files.rm(f"bucket/damaged/1/{rows}")
            else:
                put(s3, f"damaged/1/{rows}", damaged)
            with pytest.raises(Corruption, match=rows):
                trainer.load(place, storage_options=s3)
            assert_equal(everything(cluster, trainer), expected)


def test_passes_resume_from_s3(s3: Options) -> None:
    passes = [tr.Pass(day="20260101", number=n, open=lambda n=n: batches(2, n)) for n in (1, 2, 3)]
    place = tr.Publishing(
        path=f"{ROOT}/passes",
        checkpoint_per_pass=1,
        save_delta_frequency=9,
        storage_options=s3,
    )
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster)
        assert len(list(tr.train_passes(trainer, passes[:2], publishing=place))) == 2
        expected = everything(cluster, trainer)
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster)
        assert list(tr.train_passes(trainer, passes[:2], publishing=place)) == []
        assert_equal(everything(cluster, trainer), expected)
        [report] = tr.train_passes(trainer, passes, publishing=place)
        assert report.point.number == 3


def test_a_location_is_refused_by_name(tmp_path: Path) -> None:
    away = {
        "key": "k",
        "secret": "s",
        "endpoint_url": "http://127.0.0.1:9",
        "config_kwargs": {"connect_timeout": 1, "retries": {"max_attempts": 0}},
    }
    with embedded(threads=1) as cluster:
        trainer = make_trainer(cluster)
        with pytest.raises(BadRequest, match=r"cannot (read|list) s3://bucket/1.*127.0.0.1:9"):
            trainer.save("s3://bucket/1", storage_options=away)
        with pytest.raises(BadRequest, match="storage_options only with a location"):
            trainer.save(tmp_path / "1", storage_options={"key": "k"})
        with pytest.raises(BadRequest, match="nonesuch"):
            trainer.save("nonesuch://bucket/1")
        for around in ("simplecache::file://", "dir::file://", "simplecache::local://"):
            with pytest.raises(BadRequest, match="expected a plain path for local files"):
                trainer.save(f"{around}{tmp_path}/1")
        wraps = {"target_protocol": "file"}
        with pytest.raises(BadRequest, match="expected a plain path for local files"):
            trainer.save(f"filecache://{tmp_path}/1", storage_options=wraps)
    assert list(tmp_path.iterdir()) == []
