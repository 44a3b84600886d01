"""The site of `make docs`: it builds without warnings, names everything, and works offline."""

import importlib
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from tests.repo import tree

MODULES = [
    "trireme",
    *(
        f"trireme.{name}"
        for name in (
            *("data", "errors", "fleet", "inference", "initializer", "interchange", "metrics"),
            *("models", "nn", "optim", "policy"),
        )
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without the outputs of notebooks: tests/users runs them."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs/site"]
    built = subprocess.run(
        [*command, "-D", "nb_execution_mode=off", ".", str(folder)],
        cwd=tree.ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.timeout(400)
def test_the_site_loads_nothing_from_another_host(site: Path) -> None:
    pages = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert site / "index.html" in pages
    assert site / "docs/consistency.html" in pages
    wrong = [
        f"{page.relative_to(site)}: {address}"
        for page in pages
        for address in loads(page.read_text())
    ]
    assert not wrong, "\n".join(wrong)


def loads(text: str) -> list[str]:
    """Addresses on other hosts that a browser loads from by itself."""
    tags = re.findall(
        r"<(?:script|link|img|iframe|source|object|embed)\b[^>]*?\b(?:src|href|data)="
        r'"((?:https?:)?//[^"]*)"',
        text,
    )
    styles = re.findall(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]*)""", text)
    return tags + styles


@pytest.mark.parametrize(
    "text",
    [
        '<script async src="https://cdn.example/require.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/css">',
        "@import 'https://fonts.example/css';",
        "src: url(https://fonts.example/a.woff2)",
    ],
)
def test_an_address_on_another_host_is_found(text: str) -> None:
    assert len(loads(f"<p>{text}</p>")) == 1
    assert not loads('<a href="https://example.org">x</a><img src="_images/a.svg">')


@pytest.mark.timeout(400)
@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(site: Path, module: str) -> None:
    documented = [resolve(name) for name in inventory(site)]
    missing = [
        name
        for name, value in public(module).items()
        if not any(value is other for other in documented)
    ]
    assert not missing, f"{module}: name in docs/reference, or write its docstring: {missing}"


def inventory(site: Path) -> list[str]:
    """What Sphinx lists for other projects: the documented names of Python."""
    data = (site / "objects.inv").read_bytes()
    lines = zlib.decompress(data.split(b"\n", 4)[4]).decode().splitlines()
    kinds = ("py:class", "py:function", "py:exception", "py:data", "py:module")
    return [line.split()[0] for line in lines if line.split()[1] in kinds]


def resolve(name: str) -> object:
    module, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), last)
    except (AttributeError, ImportError, ValueError):
        return importlib.import_module(name)


def public(name: str) -> dict[str, object]:
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            each
            for each, value in vars(module).items()
            if not each.startswith("_") and getattr(value, "__module__", None) == name
        ]
    return {each: getattr(module, each) for each in names}
