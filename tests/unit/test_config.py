"""Configurations: YAML with dotted keys, typed numbers, overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from trireme.config import Config
from trireme.errors import BadRequest
from trireme.run.settings import Settings


def write(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_keys_have_dots_and_lists_are_values(tmp_path):
    path = write(
        tmp_path, "runner:\n  epochs: 3\n  files: [a, b]\ntable_parameters:\n  e: {x: 1}\n"
    )
    config = Config.load(path)
    assert config.get("runner.epochs") == 3
    assert config.get("runner.files") == ["a", "b"]
    assert config.section("table_parameters") == {"e.x": 1}
    assert config.unread() == []


@pytest.mark.parametrize("text", ["5e-6", "5.e-6", "+5E-6", "5e-06"])
def test_a_number_without_a_point_is_a_number(tmp_path, text):
    assert Config.load(write(tmp_path, f"lr: {text}\n")).get("lr") == 5e-6


def test_text_that_looks_like_a_number_stays_text(tmp_path):
    config = Config.load(write(tmp_path, "a: e5\nb: '5e-6'\nc: 5e-6x\n"))
    assert [config.get(key) for key in "abc"] == ["e5", "5e-6", "5e-6x"]


def test_an_override_wins_and_is_yaml(tmp_path):
    path = write(tmp_path, "runner: {epochs: 3}\n")
    config = Config.load(path, ["runner.epochs=1", "runner.lr=1e-3", "runner.use_auc=true"])
    assert [config.get(f"runner.{k}") for k in ("epochs", "lr", "use_auc")] == [1, 1e-3, True]


def test_an_absent_or_empty_value_is_the_default(tmp_path):
    config = Config.load(write(tmp_path, "a:\n"))
    assert config.get("a", 1) == 1
    assert config.get("b", 2) == 2
    with pytest.raises(BadRequest, match=r"a value for b in .*config\.yaml, found none"):
        config.get("b")


def test_keys_that_nothing_reads_are_listed(tmp_path):
    config = Config.load(write(tmp_path, "a: 1\nb: 2\n"))
    config.get("a")
    assert config.unread() == ["b"]


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        ("a: [1", "", r"expected YAML in .*config\.yaml"),
        ("- a", "", "expected keys and values"),
        ("a: 2001-99-99", "", r"expected YAML in .*config\.yaml: month"),
        ("a: !!bool x", "", r"expected YAML in .*config\.yaml"),
        ("a: " + 1000 * "[", "", r"expected YAML in .*config\.yaml: maximum recursion"),
        ("a: &a\n  b: *a", "", r"expected at most 10,000 keys in .*, found more, as 'a.b"),
        ("a: 1", "b", "expected an override key=value, found 'b'"),
        ("a: {b: 1}", "a=5", r"values below a in .*config\.yaml, as in 'a: {key: value}', found 5"),
        ("a: {b: {c: 1}}", "a=[5]", r"values below a in .*, found \[5\]"),
        ("a: {b: 1}", "a={}", r"values below a in .*, found {}"),
        ("a: {b: 1}", "a.b.c=5", r"values below a\.b in .*, found 1"),
        ("a.b: 1\na: 5", "", r"values below a in .*, found 5"),
        ("a: 1", "b=[", "expected YAML as the value of b"),
    ],
)
def test_files_that_are_no_configuration_are_refused(tmp_path, text, override, message):
    with pytest.raises(BadRequest, match=message):
        Config.load(write(tmp_path, text), [override] if override else [])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BadRequest, match=r"cannot read '.*none\.yaml'"):
        Config.load(tmp_path / "none.yaml")


def test_a_key_that_is_given_twice_is_warned_of(tmp_path, caplog):
    text = "base: &b {x: 1}\nrunner:\n  epochs: 1\n  <<: *b\n  x: 3\n  epochs: 2\n"
    path = write(tmp_path, text)
    config = Config.load(path)
    assert (config.get("runner.epochs"), config.get("runner.x")) == (2, 3)
    [record] = caplog.records
    expected = f"once in {path}, found 'epochs' in lines 3 and 6: the last one counts"
    assert expected in record.getMessage()


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("runner: 5", "runner.epochs", "expected keys and values below runner in .*, found 5"),
        ("runner: [1]", "runner.epochs", r"below runner in .*c\.yaml, .*, found \[1\]"),
        ("a: {b: x}", "a.b.c.d", "below a.b in .*found 'x'"),
        (
            "runner: {epochs: {a: 1}}",
            "runner.epochs",
            "value for runner.epochs in .*runner.epochs.a",
        ),
    ],
)
def test_a_section_in_place_of_a_value_and_the_reverse_are_refused(
    text: str, key: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    config = Config.load(tmp_path / "c.yaml")
    with pytest.raises(BadRequest, match=message):
        config.get(key, None)
    if "below" in message:
        for read in (config.section, config.has_section):
            with pytest.raises(BadRequest, match=message):
                read(key.rpartition(".")[0])


def test_a_list_of_runners_is_named_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("runner:\n- name: train\n  phases: [phase1]\n")
    with pytest.raises(BadRequest, match=r"c\.yaml, .*found a list of runners, as PaddleRec had"):
        Config.load(tmp_path / "c.yaml")


def test_an_empty_section_has_no_keys(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("runner:\nhyper_parameters: {}\n")
    config = Config.load(tmp_path / "c.yaml")
    assert config.get("runner.epochs", 3) == 3
    assert config.section("runner") == config.section("hyper_parameters") == {}


def test_an_override_fills_an_empty_section(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("a: {b: {}}\n")
    config = Config.load(tmp_path / "c.yaml", ["a.b.c=1"])
    assert config.section("a") == {"b.c": 1}


def test_an_empty_section_in_place_of_a_value_is_not_a_default(tmp_path: Path) -> None:
    """It reached nobody, and the default was taken."""
    (tmp_path / "c.yaml").write_text("runner: {epochs: {}}\nempty: {}\ntable_parameters: {}\n")
    config = Config.load(tmp_path / "c.yaml")
    with pytest.raises(BadRequest, match=r"runner\.epochs: expected an integer >= 1, found {}"):
        Settings.read(config)
    assert not config.has_section("table_parameters.embedding")
    assert config.get("table_parameters.embedding.table_class", "x") == "x"
    assert "empty" in config.unread()
    assert "table_parameters" not in config.unread()


@pytest.mark.parametrize("text", ["a: {b: 1}\na.b: 2\n", "a.b: 1\na: {b: 2}\n"])
def test_a_key_in_two_spellings_is_warned_of(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    config = Config.load(tmp_path / "c.yaml")
    [message] = caplog.messages
    assert f"expected each key once in {tmp_path / 'c.yaml'}, found 'a.b' in several" in message
    assert message.endswith("the last one counts")
    assert config.get("a.b") == 2


def test_an_override_that_is_there_twice_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "c.yaml").write_text("a: 1")
    config = Config.load(tmp_path / "c.yaml", ["a=2", "b=2", "a=3"])
    assert (config["a"], config["b"]) == (3, 2)
    [message] = caplog.messages
    assert message == "Config: expected each override once, found 'a' again: the last counts"
