"""The site that `make docs` builds: README.md, docs/, notebooks, a reference made from docstrings.

Its sources are the files of the repository as they are, so that one link works on both.
"""

import re
import shutil
import textwrap
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "First steps": [
        "examples/notebooks/ratings",
        "examples/notebooks/seeds",
        "examples/notebooks/serving",
        *("docs/data", "docs/loops", "docs/callbacks", "docs/notebooks", "docs/retrieval"),
        "docs/models",
    ],
    "Training": [
        *("docs/consistency", "docs/optimizers", "docs/rows", "docs/online", "docs/collective"),
        *("docs/heterogeneous", "docs/gpu", "docs/tiers"),
    ],
    "Operation": [
        *(
            "docs/production",
            "docs/failures",
            "docs/checkpoints",
            "docs/inference",
            "docs/interchange",
        ),
        *("docs/metrics", "docs/placement", "docs/security"),
    ],
    "Coming from": ["docs/torch", "docs/paddlerec"],
    "Reference": [
        *("docs/reference/training", "docs/reference/tables", "docs/reference/jobs"),
        *("docs/reference/data", "docs/reference/metrics", "docs/reference/models"),
        *("docs/reference/serving", "docs/reference/errors", "docs/reference/fleet"),
        *("docs/protocol", "docs/format/*", "CHANGELOG"),
    ],
    "Development": ["ARCHITECTURE", "CONTRIBUTING", "benchmarks/results/*"],
}
"""The parts of the sidebar."""

project = "Trireme"
author = "the authors of Trireme"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb"]
root_doc = "README"
include_patterns = [
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *("docs/**", "examples/notebooks/*", "benchmarks/results/*.md"),
]
# Folders that are not searched for pages: they hold most files there are.
exclude_patterns = [".*", "build", "core", "src", "tests"]
myst_heading_anchors = 4

# A docstring is plain text with code in single quotes, and Google's sections.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = ["Threads"]
python_maximum_signature_line_length = 80

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
# Widgets would be loaded from another host.
nb_ipywidgets_js: dict[str, dict[str, str]] = {}

html_theme = "furo"
html_title = "Trireme"
html_copy_source = False
html_show_sourcelink = False


def add_sidebar(app: Sphinx, page: str, source: list[str]) -> None:
    """Appends the list of all pages to README's text."""
    if page == root_doc:
        for part, pages in PAGES.items():
            listed = "\n".join(f"/{name}" for name in pages)
            options = f":hidden:\n:glob:\n:caption: {part}"
            source[0] += f"\n```{{toctree}}\n{options}\n\n{listed}\n```\n"


def plain_text(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Makes sections of paragraphs `name: text`, and quotes what reStructuredText would take for
    markup. A module's docstring is for readers of its source.
    """
    if what == "module":
        lines.clear()
    text = "\n".join(lines)
    if what == "class" and re.search(r"^Args:$", text, re.MULTILINE) is None:
        paragraphs = text.split("\n\n")
        paragraphs[1:] = [
            "Args:\n" + textwrap.indent(each, "    ")
            if re.match(r"[a-z]\w*(, \w+)*: ", each)
            else each
            for each in paragraphs[1:]
        ]
        lines[:] = "\n\n".join(paragraphs).splitlines()
    for number, line in enumerate(lines):
        parts = re.split("(`[^`]*`)", line)
        parts[::2] = [re.sub(r"([*|])|(?<=\w)_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
        lines[number] = "".join(parts)


def write_index(app: Sphinx, error: Exception | None) -> None:
    """README's page is the site's first."""
    if error is None and app.builder.format == "html":
        shutil.copyfile(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_sidebar)
    app.connect(
        "autodoc-process-docstring", plain_text, priority=100
    )  # before the sections are cut
    app.connect("build-finished", write_index)
