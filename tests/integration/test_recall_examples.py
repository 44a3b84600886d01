"""examples/two_tower.py and examples/word2vec.py, through the real launcher with two workers."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from tests.integration.processes import Processes
from tests.programs import Template

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCH = ["-m", "trireme", "launch", "--server_num", "1", "--worker_num", "2"]
WAIT_S = 100.0


def result_of(programs: Template, folder: Path, script: str, *arguments: str) -> dict[str, object]:
    with Processes(folder) as processes:
        processes.start(
            "launch", [programs.python, *LAUNCH, str(EXAMPLES / script), *arguments], {}
        )
        processes.finish(WAIT_S)
    last = (folder / "log" / "workerlog.0").read_text().splitlines()[-1]
    assert last.startswith("RESULT ")
    result = json.loads(last.removeprefix("RESULT "))
    assert result.pop("workers") == 2
    return result


def test_two_towers_write_an_index_that_finds_what_users_choose(
    tmp_path: Path, programs: Template
) -> None:
    index = tmp_path / "index"
    small = ["--choices", "10000", "--users", "50", "--epochs", "2", "--mode", "sync"]
    result = result_of(programs, tmp_path, "two_tower.py", str(index), *small)
    parts = [path.read_text().splitlines() for path in sorted(index.iterdir())]
    assert [len(lines) for lines in parts] == [200, 200]
    assert [line.split("\t")[0] for lines in parts for line in lines] == [
        str(item) for item in range(1, 401)
    ]
    assert result["items"] == 400
    assert result["recall"] > 5 * result["by_chance"]


def test_word2vec_finds_the_words_of_a_topic(tmp_path: Path, programs: Template) -> None:
    random = Random(3)
    text = tmp_path / "text"
    paragraphs = [
        " ".join(random.choice("bcdf") + random.choice("ghkl") + topic for _ in range(40))
        for topic in random.choices("ao", k=3000)
    ]
    text.write_text("\n\n".join(paragraphs))
    options = ["--words", "bga,clo", "--epochs", "5", "--dim", "8", "--mode", "sync"]
    result = result_of(programs, tmp_path, "word2vec.py", str(text), *options)
    assert result["words"] == 32
    for word, others in result["near"].items():
        assert {other[-1] for other in others} == {word[-1]}
