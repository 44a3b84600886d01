"""Days and passes in a configuration, and the data they wait for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest

from trireme.config import Config
from trireme.errors import BadRequest, DeadlineExceeded
from trireme.job.embedded import embedded
from trireme.run.online_settings import OnlineSettings
from trireme.run.settings import Settings
from trireme.run.stream import passes_of, stream
from trireme.run.unused_keys import warn_of_unused_in_stream
from trireme.train.online.passes import Pass, PassLoader, next_day, seconds_of_day

TEXT = """\
runner:
  train_data_dir: data
  start_day: "20190730"
  end_day: 20190801
  split_interval: 360
  split_per_pass: 2
"""


def load(folder: Path, *overrides: str) -> tuple[Settings, OnlineSettings]:
    (folder / "config.yaml").write_text(TEXT)
    config = Config.load(folder / "config.yaml", overrides)
    return Settings.read(config), OnlineSettings.read(config)


def passes(folder: Path, *overrides: str) -> list[Pass]:
    settings, online = load(folder, *overrides)
    return list(passes_of(settings, online, lambda files: files or None))


def write(folder: Path, name: str, text: str = "x\n") -> None:
    path = folder / "data" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_passes_fill_the_days(tmp_path: Path) -> None:
    actual = passes(tmp_path)
    assert [(one.day, one.number, one.ends_day) for one in actual] == [
        (day, number, number == 2)
        for day in ("20190730", "20190731", "20190801")
        for number in (1, 2)
    ]
    begin = seconds_of_day("20190730")
    assert begin == 1564444800
    assert [one.seconds - begin for one in actual] == [n * 43200 for n in range(6)]
    assert next_day("20191231") == "20200101"


def test_defaults_are_paddlerecs(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("runner: {start_day: 20190720}")
    online = OnlineSettings.read(Config.load(tmp_path / "c.yaml"))
    assert (online.split_interval, online.split_per_pass, online.passes_per_day) == (5, 1, 288)
    assert (online.checkpoint_per_pass, online.save_delta_frequency) == (6, 6)
    assert online.splits(1) == ["0000"]
    assert online.splits(288) == ["2355"]
    assert online.end_day is None


def test_a_pass_is_ready_when_all_its_folders_are(tmp_path: Path) -> None:
    first = passes(tmp_path)[0]
    assert not first.is_ready()
    write(tmp_path, "20190730/0000/part-10")
    assert not first.is_ready()
    write(tmp_path, "20190730/0600/part-0")
    write(tmp_path, "20190730/0000/part-9")
    write(tmp_path, "20190730/0000/_SUCCESS")
    write(tmp_path, "20190730/0600/part-1", "")
    assert first.is_ready()
    files: Any = first.open()
    assert [str(Path(file).relative_to(tmp_path / "data")) for file in files] == [
        "20190730/0000/part-9", "20190730/0000/part-10", "20190730/0600/part-0",
    ]  # fmt: skip


def test_a_donefile_marks_data_as_complete_even_if_empty(tmp_path: Path) -> None:
    first = passes(tmp_path, "runner.data_donefile=data.done")[0]
    write(tmp_path, "20190730/0000/part-0")
    write(tmp_path, "20190730/0000/data.done", "")
    write(tmp_path, "20190730/0600/part-0")
    assert not first.is_ready()
    write(tmp_path, "20190730/0600/data.done", "1\n")
    assert first.is_ready()
    files: Any = first.open()
    assert [Path(file).name for file in files] == ["part-0", "part-0"]
    for split in ("0000", "0600"):
        write(tmp_path, f"20190731/{split}/data.done", "")
    empty = passes(tmp_path, "runner.data_donefile=data.done")[2]
    assert empty.is_ready()
    assert empty.open() is None


def test_data_may_be_elsewhere(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    first = passes(tmp_path, "runner.train_data_dir=memory://days")[0]
    assert not first.is_ready()
    for split in ("0000", "0600"):
        memory.pipe(f"/days/20190730/{split}/part-0", b"x\n")
    assert first.is_ready()
    files: Any = first.open()
    assert files == [f"memory:///days/20190730/{split}/part-0" for split in ("0000", "0600")]


def test_log_lines_name_what_is_waited_for(tmp_path: Path) -> None:
    first = passes(tmp_path, "runner.data_donefile=done")[0]
    folder = tmp_path / "data" / "20190730"
    assert str(first) == f"pass 20190730/1 ({folder}/0000 to 20190730/0600, each with done)"
    with embedded() as cluster, pytest.raises(DeadlineExceeded, match=r"pass 20190730/1 \(.*done"):
        PassLoader(cluster, 0.01, 0.02, None).open(first)


def test_preloading_that_is_impossible_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(TEXT + "  prefetch: True\n")
    with pytest.raises(BadRequest, match="prefetch: expected reader_type: InMemoryDataset with it"):
        stream(Config.load(tmp_path / "config.yaml"))


def test_keys_of_other_commands_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.yaml").write_text(TEXT)
    overrides = ["runner.epochs=3", "runner.infer_batch_size=9", "runner.use_inference=True"]
    overrides += ["runner.preload_thread_num=2", "runner.model_save_path=m"]
    config = Config.load(tmp_path / "config.yaml", overrides)
    Settings.read(config)
    OnlineSettings.read(config)
    warn_of_unused_in_stream(config)
    assert caplog.messages == [
        "runner.preload_thread_num: no effect: it belongs to prefetch: True",
        "runner.epochs: no effect: every pass is trained on once",
        "runner.infer_batch_size: no effect: every pass is evaluated before training, with"
        " the values of runner.train_*",
        "runner.use_inference: no effect: base and deltas are written as save_delta_frequency says",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("start_day=2019", "runner.start_day: expected a day as yyyymmdd, found 2019"),
        ("start_day=2019721", "runner.start_day: expected a day as yyyymmdd, found 2019721"),
        ("start_day=20190732", "runner.start_day: expected a day as yyyymmdd"),
        ("end_day=20190729", "runner.end_day: expected 20190730 or later, found 20190729"),
        ("split_interval=7", r"to fill a day of 1440, found 7 \* 2"),
        ("split_per_pass=0", "runner.split_per_pass: expected an integer >= 1, found 0"),
        ("checkpoint_per_pass=1.5", "runner.checkpoint_per_pass: expected an integer >= 1"),
        ("save_first_base=2", "runner.save_first_base: expected True or False, found 2"),
        ("days=yesterday", "runner.days: expected days as {20190720..20190722}, or one after"),
        ("pass_per_day=7", "runner.pass_per_day: expected passes that fill the 1440 minutes"),
        ("data_donefile=..", "runner.data_donefile: expected the name of a file, found '..'"),
        ("data_donefile=a/b", "runner.data_donefile: expected the name of a file, found 'a/b'"),
        ("data_sleep_second=0", "runner.data_sleep_second: expected seconds > 0, found 0"),
        ("train_data_dir=", "runner.train_data_dir: expected one folder of days, found none"),
    ],
)
def test_a_wrong_value_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        passes(tmp_path, f"runner.{override}")


def test_days_and_passes_per_day_are_another_way_to_say_them(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        'runner: {train_data_dir: [data], days: "{20191225..20191227}", pass_per_day: 24}\n'
    )
    config = Config.load(tmp_path / "config.yaml")
    online = OnlineSettings.read(config)
    assert (online.start_day, online.end_day) == ("20191225", "20191227")
    assert (online.passes_per_day, online.splits(2)) == (24, ["0100"])
    assert len(list(passes_of(Settings.read(config), online, lambda files: files))) == 72
