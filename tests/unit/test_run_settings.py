"""Settings of the runner: read, refused, or warned about."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from trireme.config import Config
from trireme.errors import BadRequest
from trireme.run.settings import Settings
from trireme.run.unused_keys import warn_of_unused
from trireme.strategy import Strategy


def config(folder: Path, *overrides: str) -> Config:
    path = folder / "config.yaml"
    path.write_text("runner: {train_data_dir: data}\n")
    return Config.load(path, overrides)


def test_paths_start_at_the_folder_of_the_file(tmp_path: Path) -> None:
    settings = Settings.read(
        config(
            tmp_path,
            "runner.model_save_path=out",
            "runner.model_init_path=/elsewhere/3",
            "runner.test_data_dir=s3://bucket/test",
            "runner.train_reader_path=reader",
        )
    )
    assert settings.train.paths == (str(tmp_path / "data"),)
    assert settings.infer.paths == ("s3://bucket/test",)
    assert settings.train.reader == settings.infer.reader == tmp_path / "reader.py"
    assert (settings.save_path, settings.load_path) == (tmp_path / "out", tmp_path / "out")
    assert settings.warm_path == Path("/elsewhere/3")
    with pytest.raises(BadRequest, match=r"below one folder, found .*/out, /elsewhere/3, .*--root"):
        settings.model_root()
    assert settings.model_root("/") == Path("/")
    with pytest.raises(BadRequest, match="expected models below --root /elsewhere, found"):
        settings.model_root("/elsewhere")
    near = Settings.read(config(tmp_path, "runner.model_save_path=a/out"))
    assert near.model_root() == tmp_path / "a" / "out"
    assert Settings.read(config(tmp_path)).model_root() == tmp_path


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "QueueDataset"),
        (["runner.reader_type=QueueDataset"], "QueueDataset"),
        (["runner.reader_type=InMemoryDataset"], "InMemoryDataset"),
        (["runner.reader_type=InmemoryDataset"], "InMemoryDataset"),
        (["runner.reader_type=RecDataset"], "DataLoader"),
        (["runner.train_reader_path=r"], "DataLoader"),
        (["runner.train_reader_path=r", "runner.pipe_command=cat"], "QueueDataset"),
    ],
)
def test_reader_types_in_every_spelling(
    tmp_path: Path, overrides: list[str], expected: str
) -> None:
    assert Settings.read(config(tmp_path, *overrides)).reader_type == expected


def test_inference_settings_default_to_those_of_training(tmp_path: Path) -> None:
    settings = Settings.read(
        config(tmp_path, "runner.train_batch_size=7", "runner.thread_num=3", "runner.epochs=4")
    )
    assert (settings.infer.batch_size, settings.infer.threads) == (7, 3)
    assert list(settings.infer_epochs) == [0, 1, 2, 3]
    some = ["runner.infer_start_epoch=2", "runner.infer_end_epoch=3"]
    assert list(Settings.read(config(tmp_path, *some)).infer_epochs) == [2]
    none = ["runner.infer_start_epoch=2", "runner.infer_end_epoch=2"]
    with pytest.raises(BadRequest, match=r"runner\.infer_end_epoch: expected an integer >= 3"):
        Settings.read(config(tmp_path, *none))


def test_the_mode_is_the_runners_or_the_optimizers(tmp_path: Path) -> None:
    optimizer = "hyper_parameters.optimizer.strategy=sync"
    assert Settings.read(config(tmp_path)).strategy == Strategy("async")
    assert Settings.read(config(tmp_path, optimizer)).strategy == Strategy("sync")
    both = config(tmp_path, optimizer, "runner.sync_mode=async")
    assert Settings.read(both).strategy == Strategy("async")
    bounded = config(tmp_path, "runner.sync_mode=bounded", "runner.staleness=4")
    assert Settings.read(bounded).strategy == Strategy("bounded", staleness=4)
    for keys in (["runner.use_fleet=True", optimizer], ["runner.sync_mode=collective"]):
        assert Settings.read(config(tmp_path, *keys)).strategy == Strategy("collective")
    needed = ["runner.use_gpu=True", "runner.reader_type=InmemoryDataset"]
    for keys in (["runner.sync_mode=gpubox"], ["runner.sync_mode=gpubox", "runner.use_fleet=True"]):
        gpubox = Settings.read(config(tmp_path, *needed, *keys))
        assert (gpubox.strategy, gpubox.in_passes) == (Strategy("sync"), True)
    assert not Settings.read(config(tmp_path, *needed)).in_passes
    heter = Settings.read(config(tmp_path, "runner.sync_mode=heter"))
    assert (heter.strategy, heter.wants_compute_workers) == (Strategy("async"), True)
    assert not Settings.read(bounded).wants_compute_workers
    geo = config(tmp_path, "runner.sync_mode=geo", "runner.geo_step=400")
    assert Settings.read(geo).strategy == Strategy("geo", k=400)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("runner.sync_mode=geo", r"runner\.geo_step: expected an integer with sync_mode geo"),
        ("runner.sync_mode=half", "found 'half'"),
        ("runner.sync_mode=bounded", r"runner\.staleness: expected an integer"),
        ("runner.use_auc=maybe", "True or False, found 'maybe'; -o runner.use_auc=False overrides"),
        ("runner.use_gpu=2", "expected True or False, found 2"),
        ("runner.train_data_dir=[a, 3]", r"a path or a list of paths, found \['a', 3\]"),
        ("runner.epochs=0", r"runner\.epochs: expected an integer >= 1, found 0"),
        ("runner.train_batch_size=1e30", r"train_batch_size: expected an integer >= 1, found 1e"),
        (f"runner.train_batch_size={10**20}", r"batch_size: expected an integer <= 2147483647"),
        ("runner.thread_num=1000000", r"thread_num: expected an integer <= 1024, found 1000000"),
        (f"runner.seed={2**63}", r"runner\.seed: expected an integer <= 9223372036854775807"),
        ("runner.epochs=1.5", "found 1.5"),
        ("runner.thread_num=True", "found True"),
        ("runner.reader_type=Queue", "expected one of QueueDataset, .*found 'Queue'"),
        ("runner.reader_type=[a]", r"expected one of QueueDataset, .*found \['a'\]"),
        ("runner.sync_mode=[a]", r"sync_mode: expected one of .*found \['a'\]"),
        ("hyper_parameters.optimizer.strategy=[a]", r"expected one of .*found \['a'\]"),
        ("runner.pipe_command=[a]", "expected text"),
        ('runner.model_save_path="a\\0b"', r"model_save_path: expected text, found 'a\\x00b'"),
        ('runner.train_data_dir="a\\0b"', r"train_data_dir: expected a path .*, found 'a\\x00b'"),
        ("runner.model_save_path=s3://b/m", "a folder that all servers and worker 0 share"),
    ],
)  # fmt: skip
def test_contradictory_settings_are_refused_by_name(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        Settings.read(config(tmp_path, override))


def test_alone_async_is_sync_unless_the_command_line_asks_for_it(tmp_path: Path) -> None:
    in_file = config(tmp_path)
    (tmp_path / "config.yaml").write_text("runner: {sync_mode: async, use_gpu: 0, use_auc: 1}\n")
    in_file = Config.load(tmp_path / "config.yaml")
    settings = Settings.read(in_file)
    assert (settings.use_gpu, settings.use_auc) == (False, True)
    assert settings.strategy == Strategy("async")
    assert settings.alone().strategy == Strategy("sync")
    asked = Settings.read(Config.load(tmp_path / "config.yaml", ["runner.sync_mode=async"]))
    assert asked.alone().strategy == Strategy("async")
    bounded = ["runner.sync_mode=bounded", "runner.staleness=2"]
    assert Settings.read(config(tmp_path, *bounded)).alone().strategy.mode == "bounded"


def test_a_part_may_have_several_places_and_a_dump_folder_of_its_own(tmp_path: Path) -> None:
    several = ["runner.train_data_dir=[a, s3://b/c]", "runner.need_train_dump=1"]
    several += ["runner.train_dump_fields_dir=dumped", "runner.dump_fields=[click]"]
    settings = Settings.read(config(tmp_path, *several))
    assert settings.train.paths == (str(tmp_path / "a"), "s3://b/c")
    assert settings.train_dump is not None
    assert settings.train_dump.path == str(tmp_path / "dumped")
    with pytest.raises(
        BadRequest, match=r"dump_fields_path or infer_dump_fields_dir, .* -o runner"
    ):
        Settings.read(config(tmp_path, *several, "runner.need_infer_dump=True"))


def test_use_fleet_is_collective_and_refuses_other_modes(tmp_path: Path) -> None:
    with pytest.raises(
        BadRequest, match=r"sync_mode: expected collective, gpubox or no key.*'async'"
    ):
        Settings.read(config(tmp_path, "runner.use_fleet=True", "runner.sync_mode=async"))


def test_two_places_to_start_from_are_refused(tmp_path: Path) -> None:
    both = ["runner.warmup_model_path=a", "runner.model_init_path=b"]
    with pytest.raises(BadRequest, match="expected one place"):
        Settings.read(config(tmp_path, *both))
    assert Settings.read(config(tmp_path, both[0], "runner.model_init_path=a")).warm_path


def test_keys_without_an_effect_are_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    actual = config(
        tmp_path,
        "runner.epoch=3",
        "runner.start_day=20190720",
        "runner.need_infer_dump=False",
        "runner.geo_step=400",
        "other=1",
        "epochs=1",
        "hyper_parameters.epochs=1",
    )
    Settings.read(actual)
    with caplog.at_level(logging.WARNING):
        warn_of_unused(actual)
    assert caplog.messages == [
        "epochs: no effect: nothing reads it; did you mean runner.epochs?",
        "hyper_parameters.epochs: no effect: nothing reads it; did you mean runner.epochs?",
        "other: no effect: nothing reads it",
        "runner.epoch: no effect: nothing reads it; did you mean runner.epochs?",
        "runner.geo_step: no effect: it belongs to sync_mode geo",
        "runner.start_day: no effect: it belongs to `trireme stream`; `trireme run` reads all"
        " files, in natural order",
    ]


def test_a_reader_type_of_inference_is_told_the_key_that_has_an_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    actual = config(tmp_path, "runner.infer_reader_type=DataLoader")
    Settings.read(actual)
    with caplog.at_level(logging.WARNING):
        warn_of_unused(actual)
    (message,) = caplog.messages
    assert "no effect: runner.reader_type is that of training and inference" in message


def test_what_the_readers_read_and_what_has_a_reason_is_not_called_unread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "reader.py").write_text('x = config.get("runner.word_dict")\n')
    keys = ["runner.train_reader_path=reader", "runner.word_dict=d", "runner.auc_num=2"]
    keys += ["runner.use_xpu=True", "hyper_parameters.item_count=3", "runner.word_dic=d"]
    actual = config(tmp_path, *keys)
    Settings.read(actual)
    with caplog.at_level(logging.WARNING):
        warn_of_unused(actual)
    assert caplog.messages == [
        "hyper_parameters.item_count: no effect: tables are on the servers, if there are any, and"
        " have no fixed size",
        "runner.auc_num: no effect: every metric of the model is printed",
        "runner.use_xpu: no effect: there are no kernels for XPUs: the CPU computes, or use_gpu",
        "runner.word_dic: no effect: nothing reads it",
    ]


@pytest.mark.parametrize(
    ("keys", "useless"),
    [
        (["train_reader_path=r", "parse_ins_id=1", "thread_num=4"], ["parse_ins_id", "thread_num"]),
        (["reader_type=DataLoader", "pipe_command=cat", "parse_content=0"], ["pipe_command"]),
        (["train_reader_path=r", "pipe_command=python r.py"], []),
        (["train_reader_path=r", "pipe_command=cat"], ["train_reader_path"]),
        (["dump_fields=[a]", "dump_fields_path=d"], ["dump_fields", "dump_fields_path"]),
        (["dump_fields=[a]", "dump_fields_path=d", "need_dump=False"], []),
    ],
)
def test_keys_that_others_make_useless_are_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keys: list[str], useless: list[str]
) -> None:
    actual = config(tmp_path, *(f"runner.{key}" for key in keys))
    Settings.read(actual)
    with caplog.at_level(logging.WARNING):
        warn_of_unused(actual)
    assert [message.partition(": no effect: ")[0] for message in caplog.messages] == [
        f"runner.{key}" for key in useless
    ]


def test_parameters_of_a_table_that_the_model_does_not_read_are_told_where_they_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = "table_parameters.rows.table_class"
    actual = config(tmp_path, f"{key}=SSDSparseTable")
    Settings.read(actual)
    with caplog.at_level(logging.WARNING):
        warn_of_unused(actual)
        actual.get("table_parameters.row.table_class", None)  # as a model does whose table is this
        warn_of_unused(actual)
    first, second = caplog.messages
    assert first.startswith(f"{key}: no effect: nothing reads it; a model.py of your own")
    assert "ssd=True" in first
    assert second.endswith("did you mean table_parameters.row.table_class?")
