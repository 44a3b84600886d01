"""Data generators: MultiSlot text of examples, and their checks."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import trireme.fleet as fleet
from trireme.errors import BadRequest, DataError


class Words(fleet.MultiSlotDataGenerator):
    """An example per line: words as ints, their number as a float."""

    def generate_sample(self, line: str | None) -> Any:
        def examples() -> Iterator[Any]:
            words = [int(word) for word in (line or "7").split()]
            yield [("words", words), ("size", [float(len(words))])]
            yield None

        return examples


class Returns(fleet.MultiSlotDataGenerator):
    """Whatever it is made with, for every line."""

    def __init__(self, *examples: Any) -> None:
        self.examples = list(examples)

    def generate_sample(self, line: str | None) -> Any:
        return lambda: [self.examples.pop(0)]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Any, str], str]:
    def run_(generator: Any, text: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        generator.run_from_stdin()
        return capsys.readouterr().out

    return run_


def test_lines_become_multislot_text(run: Callable[[Any, str], str]) -> None:
    assert run(Words(), "3 4\n5\n") == "2 3 4 1 2.0\n1 5 1 1.0\n"
    assert run(Words(), "") == ""


def test_memory_is_one_call_without_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    Words().run_from_memory()
    assert capsys.readouterr().out == "1 7 1 1.0\n"


def test_examples_may_be_lists_tuples_or_zips_and_fields_change_from_int_to_float(
    run: Callable[[Any, str], str],
) -> None:
    generator = Returns([("a", [1])], (("a", [0.5]),), zip(["a"], [[-3]], strict=True))
    assert run(generator, "\n\n\n") == "1 1\n1 0.5\n1 -3\n"


def test_batches_go_through_generate_batch(run: Callable[[Any, str], str]) -> None:
    sizes = []

    class Padded(Words):
        def generate_batch(self, samples: Any) -> Any:
            sizes.append(len(samples))
            longest = max(len(sample[0][1]) for sample in samples)

            def examples() -> Iterator[Any]:
                for (name, words), size in samples:
                    yield [(name, words + [0] * (longest - len(words))), size]

            return examples

    generator = Padded()
    generator.set_batch(2)
    assert run(generator, "1\n2 3\n4\n") == "2 1 0 1 1.0\n2 2 3 1 2.0\n1 4 1 1.0\n"
    assert sizes == [2, 1]
    assert Padded().batch_size_ == 32
    with pytest.raises(
        BadRequest, match=r"Padded\.set_batch: expected batch_size as an integer >= 1, found 0"
    ):
        generator.set_batch(0)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([[("a", [1])], [("a", [1]), ("b", [1])]], "fields of the first example, a; found a, b"),
        ([[("a", [1])], [("b", [1])]], "fields of the first example, a; found b"),
        ([[("a", [])]], r"at least one value as 'a', found \[\]; pad what is empty"),
        ([[("a", 1)]], "expected a list with at least one value as 'a', found 1"),
        ([[("a", ["1"])]], "expected int or float as 'a', found '1' of type str"),
        ([[("a", [True])]], "expected int or float as 'a', found True of type bool"),
        ([[(1, [1])]], "expected a str as name, found 1"),
        ([{"a": [1]}], "expected a list of"),
    ],
)
def test_values_that_are_no_example_are_an_error_that_names_the_line(
    examples: list[Any], message: str, run: Callable[[Any, str], str]
) -> None:
    where = rf"Returns: line {len(examples)} of stdin: DataError: Returns: .*{message}"
    with pytest.raises(DataError, match=where):
        run(Returns(*examples), "x\n" * len(examples))


def test_an_error_of_the_readers_own_names_the_line_and_shows_it(
    run: Callable[[Any, str], str],
) -> None:
    message = r"Words: line 2 of stdin: ValueError: invalid literal.*; the line: '2 x\\n'"
    with pytest.raises(DataError, match=message) as raised:
        run(Words(), "1\n2 x\n")
    assert isinstance(raised.value.__cause__, ValueError)


def test_strings_are_written_as_they_are(run: Callable[[Any, str], str]) -> None:
    class Strings(fleet.MultiSlotStringDataGenerator):
        def generate_sample(self, line: str | None) -> Any:
            assert line is not None
            return lambda: [[("any", line.split()), ("name", ["18446744073709551615"])]]

    assert run(Strings(), "a b\n\nc\n") == (
        "2 a b 1 18446744073709551615\n0 1 18446744073709551615\n1 c 1 18446744073709551615\n"
    )


def test_a_generator_without_generate_sample_is_an_error(run: Callable[[Any, str], str]) -> None:
    class Empty(fleet.MultiSlotDataGenerator):
        pass

    with pytest.raises(DataError, match="NotImplementedError: Empty: expected a method"):
        run(Empty(), "x\n")
