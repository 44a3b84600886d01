"""Damaged and hostile checkpoints: a typed error names the file and the difference, and the servers
stay unchanged.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import xxhash

from tests.integration.test_checkpoint import assert_equal, batches, everything, make_trainer
from tests.jobs import Job
from trireme.errors import BadRequest, Corruption, ResourceExhausted, SchemaMismatch, TriremeError
from trireme.job.cluster import Cluster
from trireme.train import Trainer

TABLE = "tables/0/0000-4095"


@pytest.fixture(scope="module")
def job() -> Iterator[tuple[Cluster, Trainer]]:
    with Job(1) as running, running.join(0, 1) as cluster:
        trainer = make_trainer(cluster)
        trainer.fit(batches(3))
        yield cluster, trainer


@pytest.fixture(scope="module")
def saved(job: tuple[Cluster, Trainer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "c"
    job[1].save(path)
    job[1].fit(batches(2, 9))  # so that loading it would change something
    return path


@pytest.fixture
def refused(
    job: tuple[Cluster, Trainer], saved: Path, tmp_path: Path
) -> Callable[[Callable[[Path], None]], TriremeError]:
    """Damages a copy, and returns the error that loading it raises."""
    cluster, trainer = job

    def refused(damage: Callable[[Path], None]) -> TriremeError:
        copy = tmp_path / "c"
        shutil.copytree(saved, copy)
        damage(copy)
        before, sequence = everything(cluster, trainer), trainer.optimizer.sequence
        with pytest.raises(TriremeError) as caught:
            trainer.load(copy)
        assert_equal(everything(cluster, trainer), before)
        assert trainer.optimizer.sequence == sequence
        shutil.rmtree(copy)
        return caught.value

    return refused


def files_of(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def test_the_corpus_has_every_kind_of_file(saved: Path) -> None:
    assert files_of(saved) == [
        "blocks/server-0-0.safetensors",
        "manifest.json",
        f"{TABLE}.arrow",
        f"{TABLE}.buckets.arrow",
        "worker.safetensors",
    ]


def test_each_file_cut_short_flipped_or_missing_is_named(saved: Path, refused: Any) -> None:
    for name in files_of(saved):
        size = (saved / name).stat().st_size

        def cut(path: Path, name: str = name, size: int = size) -> None:
            (path / name).write_bytes((path / name).read_bytes()[: size - 7])

        def flip(path: Path, name: str = name, size: int = size) -> None:
            data = bytearray((path / name).read_bytes())
            data[size // 2] ^= 1
            (path / name).write_bytes(data)

        def remove(path: Path, name: str = name) -> None:
            (path / name).unlink()

        is_manifest = name == "manifest.json"
        for damage, actual in [
            (cut, "expected XXH3" if is_manifest else f"expected {size} bytes, found {size - 7}"),
            (flip, "expected XXH3"),
            (remove, "found none"),
        ]:
            error = refused(damage)
            assert isinstance(error, BadRequest if is_manifest and damage is remove else Corruption)
            assert name in str(error)
            assert actual in str(error)


def test_no_flipped_byte_of_a_manifest_goes_unseen(saved: Path, refused: Any) -> None:
    size = (saved / "manifest.json").stat().st_size
    rng = np.random.default_rng(1)
    for at in [*range(0, 60, 7), *rng.integers(0, size, 20), size - 2, size - 1]:

        def flip(path: Path, at: int = int(at)) -> None:
            data = bytearray((path / "manifest.json").read_bytes())
            data[at] ^= 4
            (path / "manifest.json").write_bytes(data)

        assert isinstance(refused(flip), Corruption)


# ---- manifests that are well checksummed, and wrong ----


def rewrite(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change the values of a manifest, and give it the checksum that fits."""

    def damage(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())["manifest"]
        change(manifest)
        body = json.dumps(manifest).encode()
        head = f'{{"format": 3, "xxh3_128": "{xxhash.xxh3_128(body).hexdigest()}", "manifest":\n'
        (path / "manifest.json").write_bytes(head.encode() + body + b"\n}\n")

    return damage


def piece(manifest: dict[str, Any]) -> Any:
    return manifest["tables"]["t"]["pieces"][0]


def put(*names: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        at: Any = manifest
        for name in names[:-1]:
            at = at[name]
        at[names[-1]] = value

    return change


ROWS = ("tables", "t", "pieces", 0)


@pytest.mark.parametrize(
    "change",
    [
        put(*ROWS, "rows", "path", value="../../outside.arrow"),
        put(*ROWS, "rows", "path", value="/etc/passwd"),
        put(*ROWS, "rows", "path", value="a/./b"),
        put(*ROWS, "rows", "path", value=f"{TABLE}.buckets.arrow"),
        put(*ROWS, "rows", "path", value=7),
        put(*ROWS, "rows", "bytes", value=-1),
        put(*ROWS, "rows", "bytes", value=10**30),
        put(*ROWS, "rows", "bytes", value=1.5),
        put(*ROWS, "rows", "bytes", value=True),
        put(*ROWS, "rows", "xxh3_128", value="f" * 31),
        put(*ROWS, "rows", value=None),
        put(*ROWS, "high", value=4094),
        put(*ROWS, "low", value=1),
        put(*ROWS, "high", value=4096),
        put(*ROWS, "num_rows", value=3),
        put("tables", "t", "pieces", value=[]),
        put("tables", "t", "pieces", value=7),
        put("tables", "t", "schema", value={}),
        put("tables", "t", "schema", "dims", value=[float("inf")]),
        put("tables", "t", "schema", "dims", value=[10**12]),
        put("tables", "t", "schema", "name", value="u"),
        put("tables", value=[]),
        put("mode", value="everything"),
        put("mode", value="delta"),
        put("version", value=2**40),
        put("version", value="1"),
        put("chain", value={"x": -1}),
        put("id", value="0"),
        put("streams", value=[[0, 1]]),
        put("streams", value=[[0, 2**70, []]]),
        put("streams", value=[[0, 1, [0] * 100]]),
        put("blocks", 0, "blocks", 0, "spec", value=["w", 0, float("inf"), 0]),
        put("blocks", 0, "marks", 0, "applied", value=[[0, -1]]),
        put("blocks", 0, "blocks", 0, "marks", value=1),
        put("blocks", 0, "file", "path", value="blocks/../../x"),
        put("tensors", value=7),
        put("extra", value=None),
        lambda manifest: manifest.pop("blocks"),
        lambda manifest: manifest.clear(),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(refused: Any, change: Any) -> None:
    error = refused(rewrite(change))
    assert isinstance(error, Corruption), error
    assert "manifest.json" in str(error) or ".arrow" in str(error)


def test_manifests_of_other_formats_are_refused(refused: Any) -> None:
    def older(path: Path) -> None:
        (path / "manifest.json").write_text('{\n "format": 1,\n "tables": {}\n}')

    def newer(path: Path) -> None:
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text.replace('"format": 3', '"format": 4'))

    assert "expected format 3, found 1: written by an older version" in str(refused(older))
    assert "expected format 3, found 4: written by a newer version" in str(refused(newer))
    for text in ("", "{", "[" * 100_000, "7", '{"format": ' + "9" * 5000 + "}"):

        def broken(path: Path, text: str = text) -> None:
            (path / "manifest.json").write_text(text)

        assert isinstance(refused(broken), Corruption)


# ---- files that are well checksummed, and wrong ----


def rewrite_rows(
    change: Callable[[pa.Table], pa.Table], compression: str | None = None
) -> Callable[[Path], None]:
    """Change the rows of a file, and let the manifest say so."""

    def damage(path: Path) -> None:
        file = path / f"{TABLE}.arrow"
        rows = pa.ipc.open_file(pa.BufferReader(file.read_bytes())).read_all()
        changed = [change(pa.Table.from_batches([batch])) for batch in rows.to_batches()]
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_file(file, changed[0].schema, options=options) as writer:
            for batch in changed:
                writer.write_table(batch)
        data = file.read_bytes()
        digest = xxhash.xxh3_128(data).hexdigest()
        entry = {"path": f"{TABLE}.arrow", "bytes": len(data), "xxh3_128": digest}
        rewrite(put(*ROWS, "rows", value=entry))(path)

    return damage


def with_keys(rows: pa.Table, keys: np.ndarray) -> pa.Table:
    field = rows.schema.field("key")
    return rows.set_column(0, field, pa.array(keys))


def test_columns_that_differ_are_shown(refused: Any) -> None:
    error = refused(rewrite_rows(lambda rows: rows.drop_columns(["state"])))
    assert isinstance(error, SchemaMismatch)
    assert f"{TABLE}.arrow: expected columns" in str(error)
    error = refused(rewrite_rows(lambda rows: rows.rename_columns(["k", *rows.column_names[1:]])))
    assert isinstance(error, SchemaMismatch)


def test_rows_that_are_not_those_of_the_buckets_are_refused(refused: Any) -> None:
    fewer = refused(rewrite_rows(lambda rows: rows.slice(1)))
    assert isinstance(fewer, Corruption)
    assert f"{TABLE}.arrow" in str(fewer)
    reversed_keys = refused(
        rewrite_rows(lambda rows: with_keys(rows, rows["key"].to_numpy()[::-1].copy()))
    )
    assert "expected keys in the order of their buckets" in str(reversed_keys)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_rows_are_refused_before_they_are_read(refused: Any, compression: str) -> None:
    error = refused(rewrite_rows(lambda rows: rows, compression))
    assert isinstance(error, Corruption), error
    assert f"{TABLE}.arrow: expected buffers as they are, found compressed ones" in str(error)


def test_a_manifest_that_takes_more_than_a_server_may_hold_is_not_read(
    saved: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "c"
    shutil.copytree(saved, copy)
    rewrite(put("extra", value={"x": [[]] * 400_000}))(copy)
    with Job(1, "held_bytes_max=16MiB") as running, running.join(0, 1) as cluster:
        trainer = make_trainer(cluster)
        with pytest.raises(ResourceExhausted, match="held_bytes_max is 16777216"):
            trainer.load(copy)
        trainer.load(saved)


def test_rows_of_a_class_that_cannot_be_are_refused(refused: Any) -> None:
    def of_class_7(rows: pa.Table) -> pa.Table:
        sevens = pa.array(np.full(rows.num_rows, 7, np.uint8))
        return rows.set_column(1, rows.schema.field("row_class"), sevens)

    error = refused(rewrite_rows(of_class_7))
    assert isinstance(error, Corruption), error
    assert f"{TABLE}.arrow" in str(error)
    assert "expected a row class in [0, 1), found 7" in str(error)


def test_blocks_that_are_no_tensors_are_refused(refused: Any) -> None:
    def damage(path: Path) -> None:
        file = path / "blocks/server-0-0.safetensors"
        file.write_bytes(b"\xff" * 100)
        digest = xxhash.xxh3_128(b"\xff" * 100).hexdigest()
        entry = {"path": "blocks/server-0-0.safetensors", "bytes": 100, "xxh3_128": digest}
        rewrite(put("blocks", 0, "file", value=entry))(path)

    error = refused(damage)
    assert isinstance(error, Corruption)
    assert "blocks/server-0-0.safetensors: expected safetensors" in str(error)


def test_another_optimizer_or_width_is_refused_with_both_sides(saved: Path) -> None:
    with Job(1) as running, running.join(0, 1) as cluster:
        trainer = make_trainer(cluster, optimizer=torch.optim.SGD)
        with pytest.raises(SchemaMismatch, match="its optimizer is Adam, the model's is SGD"):
            trainer.load(saved)
