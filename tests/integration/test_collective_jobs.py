"""Jobs without servers in real processes: under `trireme launch`, and as torchrun starts them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.integration.test_modes import SCRIPT, examples
from tests.programs import Program, Template
from trireme.commands import cli

MODE = json.dumps({"mode": "collective"})
LENGTHS = (0, 120, 90)
COUNTING_SCRIPT = str(Path(__file__).with_name("collective_script.py"))


def check(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["trained"] == examples(LENGTHS)
        assert result["auc"] > 0.95
        assert result["weights"] == results[0]["weights"]


def result_of(output: str) -> dict[str, Any]:
    [line] = [line for line in output.splitlines() if line.startswith("RESULT")]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT"))
    return result


def test_launched_workers_hold_the_rows_and_end_well_with_uneven_data(
    tmp_path: Path, programs: Template
) -> None:
    lengths = ",".join(map(str, LENGTHS))
    command = ["-m", "trireme", "launch", "--server_num", "0", "--worker_num", "3"]
    programs.run(tmp_path, [*command, SCRIPT, MODE, lengths])
    logs = [tmp_path / "log" / f"workerlog.{worker}" for worker in range(3)]
    assert sorted((tmp_path / "log").iterdir()) == logs
    check([result_of(log.read_text()) for log in logs])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--streams", "4"], "expected servers with --streams"),
        (["--durability", "process"], "expected servers with --durability"),
        (["--workers", "127.0.0.1:6000,127.0.0.1:6000"], "different addresses in --workers"),
    ],
)
def test_what_workers_without_servers_cannot_do_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", "--server_num", "0", "--worker_num", "2", *options, SCRIPT]) == 2
    assert words in capsys.readouterr().err


@contextmanager
def torchrun_ranks(
    num: int, arguments: list[str], programs: Template, **env: str
) -> Iterator[list[Program]]:
    """The workers that torchrun would start; this process has the store, as its agent does."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": str(num)}
    with ExitStack() as end:
        yield [
            end.enter_context(
                programs.start(
                    f"rank {rank}",
                    arguments,
                    {**env, "RANK": str(rank), "LOCAL_WORLD_SIZE": str(num)},
                )
            )
            for rank in range(num)
        ]


@pytest.mark.parametrize("num", [1, 3])
def test_ranks_of_torchrun_without_servers_find_each_other(num: int, programs: Template) -> None:
    lengths = LENGTHS if num == 3 else LENGTHS[1:2]
    arguments = [SCRIPT, MODE, ",".join(map(str, lengths))]
    with torchrun_ranks(num, arguments, programs) as ranks:
        results = [json.loads(rank.wait_line("RESULT (.*)")[1]) for rank in ranks]
        assert [rank.finish() for rank in ranks] == [0] * num
    assert {result["trained"] for result in results} == {examples(lengths)}
    assert len({result["weights"] for result in results}) == 1


def test_a_model_in_ddp_and_a_plain_loop_train_to_the_same_bits_also_with_uneven_data(
    tmp_path: Path, programs: Template
) -> None:
    weights = set()
    for deed in ("ddp", "loop", "none"):
        folder = tmp_path / deed
        arguments = [COUNTING_SCRIPT, str(folder), "0", deed]
        with torchrun_ranks(3, arguments, programs, TRIREME_ROOT=str(tmp_path)) as ranks:
            weights |= {rank.wait_line("WEIGHT (.*)")[1] for rank in ranks}
            assert [rank.finish() for rank in ranks] == [0] * 3
    assert len(weights) == 1
