"""Facts written twice agree, and references lead to something that exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import draw, draw_heterogeneous, draw_timelines
from tests.repo import tree
from trireme import errors


def test_error_names_are_equal_in_cpp_python_and_the_protocol() -> None:
    python = {cls.code: cls.name for cls in errors.CLASSES}
    header = (tree.ROOT / "core/base/error.h").read_text()
    cpp = {
        int(code): re.sub(r"(?<!^)(?=[A-Z])", "_", spelled).upper()
        for spelled, code in re.findall(r"^  k(\w+) = (\d+),", header, re.MULTILINE)
    }
    assert cpp == python
    protocol = (tree.ROOT / "docs/protocol.md").read_text()
    rows = re.findall(r"^\|\s*(\d+)\s*\|\s*`?([A-Z_]+)`?\s*\|", protocol, re.MULTILINE)
    assert {int(code): name for code, name in rows} == python


def test_every_error_is_a_named_class_of_the_tree_at_the_top_of_its_file() -> None:
    assert errors.__doc__ is not None
    for cls in errors.CLASSES:
        assert re.search(rf"- {cls.__name__}\b", errors.__doc__), cls
        assert cls.__doc__


def test_readme_shows_two_examples() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (tree.ROOT / "README.md").read_text(), re.DOTALL)
    scripts = [(tree.ROOT / "examples" / name).read_text() for name in ("ratings.py", "train.py")]
    assert blocks == scripts
    assert len(scripts[1].splitlines()) <= 30


def test_pictures_are_drawn_from_the_results() -> None:
    assert draw.PICTURE.read_text() == draw.draw()
    assert draw.TIER_PICTURE.read_text() == draw.draw_tiers()


def test_the_picture_of_heterogeneous_jobs_is_that_of_its_script() -> None:
    assert draw_heterogeneous.PICTURE.read_text() == draw_heterogeneous.draw()


def test_every_link_of_a_page_leads_somewhere() -> None:
    wrong = [
        f"{tree.name(page)}: {target}"
        for page in tree.files(".md")
        for target in targets(page)
        if not target.exists()
    ]
    assert not wrong, "\n".join(wrong)


def targets(page: Path) -> list[Path]:
    """The files that a page links to, or names in quotes by a path from the root."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    named = re.findall(r"`((?:src|core|bind|tests|examples|benchmarks|docs)/[\w./-]+)`", text)
    local = [page.parent / link for link in links if "://" not in link]
    return [*local, *(tree.ROOT / name for name in named)]


def test_pinned_versions_cover_every_dependency() -> None:
    """Also what dependencies need themselves, but for the libraries of torch's builds for CUDA."""
    project = (tree.ROOT / "pyproject.toml").read_text()
    lists = re.findall(r"^(?!classifiers)[\w-]+ = \[\n((?:  [\"#].*\n)+)\]", project, re.MULTILINE)
    assert len(lists) >= 8
    named = {name for text in lists for name in re.findall(r'^  "([\w-]+)', text, re.MULTILINE)}
    pins = re.findall(r"^([\w-]+)==", (tree.ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pins[0] == "torch"
    wanted = {canonicalize_name(name) for name in named} - {"trireme-ps"}
    assert {"faiss-cpu", "nanobind", "torch", "triton"} < wanted
    needed: set[str] = set()
    while wanted:
        needed |= wanted
        wanted = {other for name in wanted for other in _needed_by(name)} - needed
    missing = sorted(needed - set(map(canonicalize_name, pins)))
    assert [name for name in missing if not name.startswith(("cuda-", "nvidia-"))] == []


def _needed_by(name: str) -> Iterator[str]:
    """What an installed distribution asks for on this machine, without its extras."""
    try:
        texts = metadata.requires(name) or ()
    except metadata.PackageNotFoundError:  # of another platform
        return
    for requirement in map(Requirement, texts):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)


def test_every_line_of_failures_names_a_test_that_exists() -> None:
    page = (tree.ROOT / "docs/failures.md").read_text()
    tests = "\n".join(path.read_text() for path in tree.files(".py", under="tests"))
    rows = re.findall(r"^\| (?!Event|---)[^|]+\|[^|]+\|[^|]+\|([^|]+)\|$", page, re.MULTILINE)
    assert len(rows) > 5
    for row in rows:
        names = re.findall(r"`(test_\w+)`", row)
        assert names, row
        for name in names:
            assert f"def {name}(" in tests, name


def test_the_pictures_of_time_are_those_of_their_script() -> None:
    for name, picture in draw_timelines.PICTURES.items():
        assert (tree.ROOT / "docs" / name).read_text() == picture()


def test_every_picture_has_a_title_and_text_that_can_be_read() -> None:
    pictures = tree.files(".svg", under="docs")
    assert len(pictures) >= 6
    for picture in pictures:
        text = picture.read_text()
        assert re.search(r"<title>[^<]{20,}</title>", text), picture
        colours = set(re.findall(r'<text[^>]*fill="(#\w{6})"', text))
        behind = {"#ffffff"}  # of bars, text is beside them
        if picture not in (draw.PICTURE, draw.TIER_PICTURE):
            behind |= set(re.findall(r'<rect[^>]*fill="(#\w{6})"', text))
        for colour in colours:
            for other in behind:
                assert contrast(colour, other) >= 4.5, (picture, colour, other)


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2.1, from 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
