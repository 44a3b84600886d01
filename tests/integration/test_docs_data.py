"""The Python of docs/data.md runs, from top to bottom."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from random import Random

from tests.criteo_text import random_line
from tests.programs import Template
from tests.repo import tree
from tests.s3_server import put, s3_server

STRICT = "import warnings\nwarnings.simplefilter('error')"


def test_every_snippet_runs(tmp_path: Path, programs: Template) -> None:
    page = (tree.ROOT / "docs/data.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == page.count("```python")
    random = Random(1)
    with s3_server() as options:
        lines = b"\n".join(random_line(random) for _ in range(3))
        put(options, "clicks/part-0.gz", gzip.compress(lines))
        environment = {
            "AWS_ACCESS_KEY_ID": options["key"],
            "AWS_SECRET_ACCESS_KEY": options["secret"],
            "AWS_ENDPOINT_URL": options["endpoint_url"],
        }
        (tmp_path / "page.py").write_text("\n".join([STRICT, *blocks]))
        programs.run(tmp_path, ["page.py"], environment)
