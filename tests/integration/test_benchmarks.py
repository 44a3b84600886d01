"""The benchmarks: the harness compares correctly, and every benchmark runs in smoke mode.

No time is asserted.
"""

import importlib
import json
from pathlib import Path

import pytest

from benchmarks import rivals
from benchmarks.__main__ import BENCHES, main
from benchmarks.harness import Absent, BenchError, Claim, Contest, Run, Settings, run_contest
from benchmarks.macro.attackers import KINDS
from benchmarks.macro.step import part_of, sampled
from benchmarks.macro.zoo_cases import CASES

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 280.0
RESULT_FIELDS = ("bench", "metric", "value", "unit", "vs", "ratio", "ratio_min", "ratio_max")

# What other scripts rely on.
REAL_CLAIMS = {
    ("ctr", "async_1x1_b512"): ("paddle", "paddle_tuned", "dense_bound"),
    ("ctr", "async_1x1_b4096"): ("paddle", "paddle_tuned", "dense_bound"),
    ("ctr", "embedded_b512"): ("dense_bound", "torch"),
    ("ctr", "embedded_b4096"): ("dense_bound", "torch"),
    ("ctr", "async_1x1_b512_onednn"): ("paddle", "paddle_tuned", "async_1x1_b512"),
    ("ctr", "async_1x1_b512_bf16"): ("paddle", "paddle_tuned", "async_1x1_b512"),
    ("ctr", "async_1x1_b4096_onednn"): ("paddle", "paddle_tuned", "async_1x1_b4096"),
    ("ctr", "async_1x1_b4096_bf16"): ("paddle", "paddle_tuned", "async_1x1_b4096"),
    ("ctr", "embedded_b512_onednn"): ("embedded_b512", "torch"),
    ("ctr", "embedded_b512_bf16"): ("embedded_b512", "torch"),
    ("ctr", "embedded_b4096_onednn"): ("embedded_b4096", "torch"),
    ("ctr", "embedded_b4096_bf16"): ("embedded_b4096", "torch"),
    ("ctr", "auc_b512"): ("torch",),
    ("ctr", "auc_b4096"): ("torch",),
    ("ctr", "auc_b512_onednn"): ("auc_b512", "torch"),
    ("ctr", "auc_b512_bf16"): ("auc_b512", "torch"),
    ("ctr", "auc_b4096_onednn"): ("auc_b4096", "torch"),
    ("ctr", "auc_b4096_bf16"): ("auc_b4096", "torch"),
    ("collective", "ranks2_b4096"): ("torchrec",),
    ("collective", "ranks2_b4096_onednn"): ("torchrec",),
    ("collective", "ranks1_b4096"): ("embedded",),
    ("pass", "ctr_b4096"): ("async",),
    ("pass", "begin_pass_rows_per_s"): ("memcpy",),
    ("pass", "end_pass_rows_per_s"): ("memcpy",),
    ("heter", "level1_1x1"): ("async",),
    ("heter", "cpu2_gpu1"): ("sum_of_parts",),
    ("startup", "run"): ("import_torch",),
    ("startup", "launch"): ("import_torch",),
    ("startup", "launch_m"): ("import_torch",),
    ("startup", "launch_spawn"): ("import_torch",),
    ("own_pushes", "own_b512"): ("blind", "threads"),
    ("own_pushes", "own_b4096"): ("blind", "threads"),
    ("own_pushes", "own_auc_b4096"): ("blind", "torch"),
    ("step", "cpu_ms_b512"): (),
    ("step", "cpu_ms_b4096"): (),
    ("step", "parts_b512"): ("mlp_b512",),
    ("step", "parts_b4096"): ("mlp_b4096",),
    ("service", "sum_dim8"): ("paddle",),
    ("service", "sum_dim16"): ("paddle",),
    ("service", "sum_dim64"): ("paddle",),
    ("feed", "parse_tsv"): ("pyarrow_csv",),
    ("feed", "parse_multislot"): ("pyarrow_csv",),
    ("feed", "feed_cpu_share"): (),
    ("feed", "inmemory_batches"): (),
    ("feed", "pipe_overhead"): ("script",),
    ("slot", "slot_dnn_1x1"): ("paddle",),
    ("slot", "slot_dnn_shows_1x1"): ("slot_dnn_1x1",),
    ("slot", "slot_dnn_model_1x1"): ("paddle",),
    ("fleet", "rows_sgd"): (),
    ("fleet", "rows_adagrad"): (),
    ("fleet", "rows_std_adagrad"): (),
    ("fleet", "rows_adam"): (),
    ("fleet", "rows_adagrad_v2"): (),
    ("fleet", "rows_shared_adam"): (),
    **{("zoo", case): ("torch",) for case in CASES},
    ("zoo", "deepfm_adult_async"): ("torch",),
    ("zoo", "din_history_async"): ("torch",),
    ("zoo", "two_tower_choice_async"): ("torch",),
    ("zoo", "word2vec_text_async"): ("torch",),
    **{
        ("modes", f"{mode}_auc_as_{workers}"): ("sync",)
        for mode in ("bounded", "async", "geo", "hybrid")
        for workers in (2, 8, 32)
    },
    ("geo", "word2vec_to_loss"): ("async",),
    ("checkpoint", "import_fleet"): (),
    ("checkpoint", "train_while_saving"): ("train",),
    ("checkpoint", "save_full"): ("disk",),
    ("checkpoint", "load_full"): ("disk",),
    ("checkpoint", "save_delta"): ("save_full",),
    ("durability", "process"): ("none",),
    ("durability", "machine"): ("none",),
    ("durability", "process_b512"): ("none_b512",),
    ("durability", "machine_b512"): ("none_b512",),
    ("durability", "recovery_s"): (),
    ("network", "async_1ms_1gbit"): ("loopback",),
    ("network", "async_1ms_1gbit_b512"): ("loopback_b512",),
    **{("scale", f"w{w}_s{s}"): () for s in (1, 10, 100) for w in (10, 100, 1000)},
    ("ssd", "rows_per_s"): ("rocksdb", "rocksdict"),
    ("ssd", "device_reads_ratio"): ("device",),
    ("ssd", "write_amplification"): (),
    ("ssd", "index_bytes_per_cold_row"): (),
    ("ssd", "recovery_s"): (),
    ("ssd", "ctr_10x"): ("memory",),
    **{("hostile", kind): () for kind in KINDS},
    ("security", "curve_dim9"): ("plain",),
    ("security", "curve_dim64"): ("plain",),
    ("security", "curve_dim9_b512"): ("plain_b512",),
    ("shared", "shared_ctr_b512"): ("connection_ctr_b512",),
    ("shared", "shared_own_b512"): ("connection_own_b512",),
    ("shared", "shared_ctr_b4096"): ("connection_ctr_b4096",),
    ("shared", "shared_sum_dim8"): ("connection_sum_dim8",),
    ("shared", "shared_sum_dim64"): ("connection_sum_dim64",),
    ("table", "overhead_bytes_per_row"): (),
    ("table", "grow"): (),
    ("table", "lookup"): ("gather",),
    ("table", "update_adagrad"): ("gather",),
    ("predictor", "lookup"): ("table",),
    ("predictor", "predict_onednn"): ("predict",),
    ("batch", "unique"): ("torch",),
    ("batch", "gather_dim9"): ("torch", "copy"),
    ("batch", "gather_dim16"): ("torch", "copy"),
    ("batch", "gather_dim64"): ("torch", "copy"),
    ("batch", "scatter_dim9"): ("torch",),
    ("batch", "scatter_dim16"): ("torch",),
    ("batch", "scatter_dim64"): ("torch",),
    ("batch", "lookup_dim9"): ("torch",),
    ("batch", "ragged_dim16"): ("torch",),
    ("place", "chosen"): ("best_measured",),
    ("placement", "stages64_types4"): (),
    ("placement", "stages64_types4_limits"): (),
    ("placement", "stages64_types4_passed"): (),
    ("placement", "stages64_types4_scarce"): (),
    ("gpu_step", "gpu_step_sgd"): ("fbgemm", "torch"),
    ("gpu_step", "gpu_step_adam"): ("fbgemm", "torch"),
    ("rpc", "pull_push"): ("tcp",),
    ("rpc", "echo"): ("tcp",),
    ("rpc", "pull_push_shared"): ("tcp",),
    ("rpc", "echo_shared"): ("tcp",),
    ("rpc", "round_trip"): (),
    ("rpc", "small_requests"): (),
}


def claims(settings):
    return {
        (name, claim.metric): claim.rivals
        for name, (module, _) in BENCHES.items()
        for contest in importlib.import_module(module).contests(settings)
        for claim in contest.claims
    }


def test_metrics_and_rivals_keep_their_names():
    assert claims(Settings(is_smoke=False)) == REAL_CLAIMS


def replay(order, name, values):
    """A contestant that answers these values, one per round."""

    def measure(number):
        order.append((name, number))
        return Run(values[number], hash="same")

    return measure


def test_contest_alternates_and_takes_ratios_within_rounds():
    order = []
    contest = Contest(
        {"ours": replay(order, "ours", [10, 40, 90]), "rival": replay(order, "rival", [5, 10, 30])},
        [Claim("speed", "ours", ("rival",), unit="rows/s")],
        num_rounds=3,
        num_warm_ups=1,
    )
    (result,) = run_contest("toy", contest)
    one_round = [("ours", 0), ("rival", 0)]
    assert order == [*one_round, *one_round, ("ours", 1), ("rival", 1), ("ours", 2), ("rival", 2)]
    assert {field: result[field] for field in RESULT_FIELDS} == {
        "bench": "toy",
        "metric": "speed",
        "value": 40,
        "unit": "rows/s",
        "vs": "rival",
        "ratio": 3,
        "ratio_min": 2,
        "ratio_max": 4,
    }
    assert (result["vs_value"], result["hash"], result["rounds"]) == (10, "same", 3)


def test_scores_are_compared_by_their_means_and_the_error_of_these():
    contest = Contest(
        {"ours": replay([], "ours", [1, 2, 6]), "rival": replay([], "rival", [2, 2, 2])},
        [Claim("score", "ours", ("rival",))],
        num_rounds=3,
        statistic="mean",
    )
    (result,) = run_contest("toy", contest)
    assert (result["value"], result["vs_value"], result["difference"]) == (3, 2, 1)
    assert result["standard_error"] == pytest.approx((7 / 3) ** 0.5, rel=1e-5)


def test_contest_reports_a_value_without_ratio_when_the_rival_is_absent(capsys):
    def absent(_):
        raise Absent("not installed here")

    contest = Contest(
        {"ours": replay([], "ours", [10]), "rival": absent},
        [Claim("speed", "ours", ("rival",))],
        num_rounds=1,
    )
    (result,) = run_contest("toy", contest)
    assert (result["value"], result["vs"], result["ratio"]) == (10, None, None)
    assert "toy: rival skipped: not installed here" in capsys.readouterr().err


def test_contest_fails_when_rounds_compute_different_results():
    contest = Contest(
        {"ours": lambda number: Run(1.0, hash=str(number))}, [Claim("speed", "ours")], num_rounds=2
    )
    with pytest.raises(BenchError, match="one result in every round"):
        run_contest("toy", contest)


def test_rival_script_is_run_with_its_options_and_its_last_json_line_is_read(tmp_path):
    (tmp_path / "torch_ctr.py").write_text(
        "import json, sys\n"
        "print('some chatter')\n"
        "print(json.dumps({'ex_s_with_opt': 123.0, 'argv': sys.argv[1:]}))\n"
    )
    run = rivals.dense_bound(Settings(is_smoke=False, rivals=str(tmp_path)), batch=64)
    assert run.value == 123.0
    assert run.detail["argv"] == ["--what=dense", "--batch=64", "--threads=2"]


def test_rival_that_fails_is_an_error_with_its_last_lines(tmp_path):
    (tmp_path / "torch_ctr.py").write_text("raise SystemExit('no such thing')")
    with pytest.raises(BenchError, match="no such thing"):
        rivals.dense_bound(Settings(is_smoke=False, rivals=str(tmp_path)), batch=64)


def test_rival_that_is_not_here_says_how_to_get_it(tmp_path):
    settings = Settings(is_smoke=False, rivals=str(tmp_path), paddle_python="/nowhere/python")
    with pytest.raises(Absent, match="--rivals FOLDER"):
        rivals.dense_bound(settings, batch=64)
    (tmp_path / "paddle_ctr.py").touch()
    with pytest.raises(Absent, match="make paddle"):
        rivals.paddle(settings, net="ctr", batch=64, dim=8, num_files=1)


def test_unknown_benchmark_is_refused_with_the_known_names(capsys):
    with pytest.raises(SystemExit):
        main(["rcp"])
    assert f"expected NAME out of {', '.join(BENCHES)}, found rcp" in capsys.readouterr().err


@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize("bench", sorted(BENCHES))
def test_benchmark_runs_in_smoke_mode(bench, tmp_path, programs, monkeypatch):
    monkeypatch.chdir(ROOT)
    json_path = tmp_path / "results.json"
    arguments = ["-m", "benchmarks", bench, "--smoke", "--json", str(json_path)]
    arguments += ["--rivals", str(tmp_path / "none")]
    with programs.start(bench, arguments, {}, is_quick=True) as program:
        assert program.finish(TIMEOUT_S) == 0
        printed = program.output.splitlines()
    lines = json_path.read_text().splitlines()
    assert [line for line in printed if line in lines] == lines
    header, *results = map(json.loads, lines)
    assert (header["bench"], header["mode"]) == ("header", "smoke")
    expected = {
        metric for name, metric in claims(Settings(is_smoke=True, rivals="")) if name == bench
    }
    assert {result["metric"] for result in results} == expected
    for result in results:
        assert set(RESULT_FIELDS) <= set(result)
        assert result["value"] > 0
        if bench == "zoo" and not result["metric"].endswith("_async"):
            assert result["ratio"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ("7 1.5:  7f2a sgemm_kernel_0 (/x/libtorch_cpu.so)", "matrix product"),
        ("7 1.5:  7f2a [unknown] (//anon)", "matrix product"),
        ("7 1.5:  7f2a at::native::(anonymous namespace)::add (/x/libtorch_cpu.so)", "torch, else"),
        ("7 1.5:  7f2a trireme::Index::find (/x/_core.cpython-311-x86_64-linux-gnu.so)", "core"),
        ("7 1.5:  7f2a __memmove_avx (/lib/libc.so.6)", "copies"),
        ("7 1.5:  7f2a _int_malloc (/lib/libc.so.6)", "allocation"),
        ("7 1.5:  ffff8 _copy_to_iter ([kernel.kallsyms])", "kernel"),
        ("7 1.5:  7f2a _PyEval_EvalFrameDefault (/usr/bin/python3.12)", "interpreter"),
        ("7 1.5:  7f2a png_read (/usr/lib/libpng.so)", "other"),
    ],
)
def test_samples_of_a_step_are_counted_by_their_library(sample: str, expected: str) -> None:
    [(process, symbol, library)] = list(sampled([sample, "", "garbage"]))
    assert process == 7
    assert part_of(symbol, library) == expected
