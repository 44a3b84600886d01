"""Programs, executors and optimizers under Fleet's names: what works, what each refusal says."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import trireme as tr
from trireme import fleet
from trireme.errors import Absent, BadRequest, NotReady
from trireme.fleet import paddle, static
from trireme.fleet.absent import ABSENT
from trireme.job.default import set_default
from trireme.job.embedded import embedded

pytestmark = pytest.mark.usefixtures("fleet_job")

# The public names of paddle.distributed.fleet in the versions 2.0 to 2.6.
NAMES = """
BoxPSDataset CommunicateTopology DatasetBase DistributedStrategy FileInstantDataset Fleet
HybridCommunicateGroup InMemoryDataset MultiSlotDataGenerator MultiSlotStringDataGenerator
PaddleCloudRoleMaker QueueDataset Role UserDefinedRoleMaker UtilBase all_reduce auto
barrier_worker check_memory_usage check_save_pre_patch_done clear_grad collective_perf
data_generator dataset distributed_model distributed_optimizer distributed_scaler get_fl_client
get_hybrid_communicate_group get_log_level_code get_log_level_name get_lr init init_coordinator
init_server init_worker is_coordinator is_first_worker is_server is_worker load_inference_model
load_model load_one_table local_device_ids local_rank make_fl_strategy metrics minimize node_num
nranks print_table_stat rank rank_in_node recompute recompute_hybrid recompute_sequential
run_server save save_cache_model save_cache_table save_dense_params save_inference_model
save_one_table save_persistables server_endpoints server_index server_num set_date set_log_level
set_lr set_state_dict shrink state_dict step stop_worker util utils worker_endpoints
worker_index worker_num world_device_ids world_size
"""
FEED = {"a": np.array([1, 7, 9]), "label": np.array([1, 0, 1], np.float32)}
BATCH = {name: torch.from_numpy(value) for name, value in FEED.items()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = tr.Table("emb", dim=2, optimizer=tr.optim.SGD(lr=0.5))
        self.emb = tr.nn.EmbeddingBag(table, features=["a"])
        self.fc = nn.Linear(2, 1)

    def forward(self, batch: Any) -> Any:
        return self.fc(self.emb(batch).flatten(1)).squeeze(1)


def sync() -> fleet.DistributedStrategy:
    return fleet.StrategyFactory.create_sync_strategy()


def minimized(model: nn.Module, **options: Any) -> fleet.Loss:
    loss = fleet.Loss(model, nn.functional.mse_loss, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fleet.distributed_optimizer(optimizer, sync()).minimize(loss)
    return loss


@pytest.mark.parametrize("name", NAMES.split())
def test_every_name_of_fleet_works_or_says_what_to_write(name: str) -> None:
    if name in ABSENT:
        with pytest.raises(BadRequest, match=rf"fleet\.{name}: it has no counterpart here: \w+"):
            getattr(fleet, name)
    else:
        assert name in fleet.__all__  # a submodule that something else has loaded is there, too
        assert getattr(fleet, name) is not None


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("trireme.fleet", "recompute", "torch.utils.checkpoint"),
        ("trireme.fleet.paddle", "concat", "torch.cat"),
        ("trireme.fleet.paddle", "sin", "torch.sin"),
        ("trireme.fleet.static", "InputSpec", "static.data"),
    ],
)
def test_an_import_of_a_name_that_is_absent_says_what_to_write(
    module: str, name: str, instead: str
) -> None:
    """Python drops the text of an AttributeError there."""
    imported = compile(f"from {module} import {name}", "script.py", "exec")
    with pytest.raises(ImportError, match=rf"{name}: it has no counterpart here: .*{instead}"):
        FunctionType(imported, {"__name__": "__main__"})()
    assert not hasattr(importlib.import_module(module), name)


def test_an_executor_steps_as_a_loop_does_and_evaluates_without_training() -> None:
    model = Model()
    loss = minimized(model)
    exe = static.Executor(static.CPUPlace())
    assert exe.run(static.default_startup_program()) == []
    program = static.default_main_program()
    losses = [exe.run(feed=FEED, fetch_list=[loss])[0].item() for _ in range(3)]
    test = program.clone(for_test=True)
    before, output = exe.run(test, feed=FEED, fetch_list=[loss, "output"])
    assert exe.run(test, feed=FEED, fetch_list=["loss"])[0] == before
    assert output.shape == (3,)
    (tensor,) = exe.run(test, feed=FEED, fetch_list=["output"], return_numpy=False)
    assert isinstance(tensor, torch.Tensor)

    with embedded(threads=1) as cluster:
        set_default(cluster)
        torch.manual_seed(0)
        twin = Model()
        optimizer = tr.DistributedOptimizer(
            torch.optim.SGD(twin.parameters(), lr=0.1), twin, strategy=tr.Strategy("sync")
        )
        expected = []
        for _ in range(3):
            optimizer.zero_grad()
            value = nn.functional.mse_loss(twin(BATCH), BATCH["label"])
            value.backward()
            optimizer.step()
            expected.append(value.item())
    assert losses == expected
    assert losses[2] < losses[0]


def test_metrics_are_fetched_of_all_batches_so_far() -> None:
    auc = tr.metrics.AUC()
    minimized(Model(), metrics=[auc])
    exe = static.Executor()
    values = [exe.run(feed=FEED, fetch_list=[auc])[0].item() for _ in range(2)]
    assert all(0 <= value <= 1 for value in values)


def test_an_executor_ignores_no_argument_silently() -> None:
    loss = minimized(Model())
    exe, data = static.Executor(static.CPUPlace()), [BATCH]
    program = static.default_main_program()
    refused: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: exe.run(feed=FEED, scope=object()),
            r"scope=None or global_scope\(\), found object",
        ),
        (lambda: exe.run(object(), feed=FEED), "program of minimize .*found object"),
        (lambda: exe.run(program), "expected feed"),
        (lambda: exe.run(static.default_startup_program(), feed=FEED), "with a main program"),
        (lambda: exe.run(feed=FEED, fetch_list=["click"]), "nothing of that name for 'click'"),
        (lambda: exe.run(feed=FEED, fetch_list=[object()]), "expected names.*found object"),
        (lambda: exe.run(feed=FEED, fetch_list="loss"), "fetch_list: expected a list"),
        (lambda: exe.train_from_dataset(program), "expected a dataset, found none"),
        (lambda: exe.train_from_dataset(program, data, thread=4), "thread=0, found 4"),
        (lambda: exe.train_from_dataset(program, data, fetch_handler=1), "fetch_handler=None"),
        (lambda: exe.train_from_dataset(program, data, object()), "scope=None"),
        (lambda: exe.train_from_dataset(program.clone(True), data), "a clone for test"),
        (lambda: exe.infer_from_dataset(program, data, fetch_handler=1), "fetch_handler=None"),
        (
            lambda: static.Executor(static.CUDAPlace(0)).run(feed=FEED),
            "where CUDAPlace.*found it on cpu",
        ),
        (lambda: static.Executor("cpu"), "expected place as CPUPlace.*found 'cpu'"),
        (lambda: static.global_scope().find_var("w"), "get_parameter"),
        (lambda: program.global_block(), "named_modules"),
        (lambda: static.program_guard(program), "write the network as a"),
        (lambda: static.Program(), "write the network as a"),
        (lambda: static.data("x", [None, 1], "bool"), "found 'bool'"),
        (lambda: static.nn, "layers are those of torch.nn"),
        (lambda: paddle.optimizer, "torch.optim"),
        (lambda: paddle.fluid.layers, "torch.nn"),
        (lambda: fleet.minimize(1.0), "found float"),
        (lambda: fleet.minimize(loss, parameter_list=[1]), "parameter_list=None"),
    ]
    for call, words in refused:
        with pytest.raises(BadRequest, match=words):
            call()
    figures = exe.train_from_dataset(program, data, static.global_scope(), fetch_list=[loss])
    assert figures["examples"] == 3
    assert exe.infer_from_dataset(None, data)["loss"] < figures["loss"]


def test_a_program_is_missing_before_minimize_and_after_the_job() -> None:
    with pytest.raises(NotReady, match="expected a program, found none"):
        static.default_main_program()
    with pytest.raises(NotReady, match=r"distributed_optimizer\(optimizer\) first"):
        fleet.step()
    minimized(Model())
    static.Executor().run(static.default_startup_program())
    fleet.init()
    with pytest.raises(NotReady, match="expected a program"):
        static.default_main_program()


@pytest.mark.parametrize("model_comes", ["before", "after"])
def test_a_loop_with_a_distributed_model_steps_and_sets_its_rate(model_comes: str) -> None:
    model = Model()
    if model_comes == "before":
        assert fleet.distributed_model(model) is model
    torch_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fleet.distributed_optimizer(torch_optimizer, sync())
    if model_comes == "after":
        with pytest.raises(NotReady, match="expected to know the model"):
            optimizer.step()
        fleet.distributed_model(model)
    losses = []
    for _ in range(3):
        loss = nn.functional.mse_loss(model(BATCH), BATCH["label"])
        loss.backward()
        optimizer.minimize(loss)
        optimizer.clear_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    with pytest.raises(BadRequest, match=r"call loss\.backward\(\) before"):
        fleet.step()
    fleet.set_lr(0.02)
    assert fleet.get_lr() == optimizer.get_lr() == 0.02
    state = fleet.state_dict()
    assert state["num_steps"] == 3
    fleet.set_lr(0.5)
    fleet.set_state_dict(state)
    assert fleet.get_lr() == 0.02
    with pytest.raises(BadRequest, match="its attribute `distributed`"):
        tr.Trainer(model, optimizer, loss=nn.functional.mse_loss)  # type: ignore[arg-type]
    trainer = tr.Trainer(model, optimizer.distributed, loss=nn.functional.mse_loss)
    assert trainer.optimizer is optimizer.distributed
    assert trainer.fit([BATCH])["loss"] < losses[2]


def test_a_trainer_over_a_distributed_optimizer_takes_no_settings_of_its_own() -> None:
    model = Model()
    made = tr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loss = nn.functional.mse_loss
    with pytest.raises(BadRequest, match="found strategy, clip_norm beside it"):
        tr.Trainer(model, made, loss=loss, strategy=tr.Strategy("sync"), clip_norm=1.0)
    with pytest.raises(BadRequest, match="of this model, found that of another one, a Model"):
        tr.Trainer(Model(), made, loss=loss)
    assert tr.Trainer(model, made, loss=loss).optimizer is made


def test_inputs_by_name_are_the_label_and_the_features_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "part").write_text("1 1 2 7 8 2 0.5 1.5\n")
    dataset = fleet.DatasetFactory().create_dataset("InMemoryDataset")
    dataset.set_use_var(["label", "a", static.data("d", [-1, 2])])
    dataset.set_filelist([str(tmp_path / "part")])
    with pytest.raises(
        BadRequest, match=r"expected 'label' to be the label, shows or clicks \(none\) or"
    ):
        _ = dataset.schema
    minimized(Model())
    fields = [tr.data.Label("label"), tr.data.Sparse("a"), tr.data.Dense("d", 2)]
    assert dataset.schema.fields == tuple(fields)
    dataset.set_use_var([static.data("label", [None, 1], "int64"), "a", "d"])
    with pytest.raises(BadRequest, match=r"expected 'd' .*feature \(a\) .*Dense\('d', width\)"):
        _ = dataset.schema
    dataset.set_use_var(fields)
    for call, value in {"set_batch_size": 5, "set_thread": 2, "set_pipe_command": "cat"}.items():
        getattr(dataset, call)(value)
    dataset.set_parse_ins_id(True)
    dataset.set_parse_content(True)
    dataset.set_hdfs_config("", "")
    assert [field.name for field in dataset.schema.fields[:2]] == ["ins_id", "content"]
    with pytest.raises(BadRequest, match="found 'FileInstantDataset'"):
        fleet.DatasetFactory().create_dataset("FileInstantDataset")


def test_one_table_and_the_dense_parameters_are_saved_by_themselves(tmp_path: Path) -> None:
    model = Model()
    minimized(model)
    exe = static.Executor()
    exe.run(feed=FEED)
    (before,) = exe.run(static.default_main_program().clone(True), feed=FEED, fetch_list=["loss"])
    assert fleet.save_one_table(0, str(tmp_path / "table")) == 3
    fleet.save_dense_params(exe, str(tmp_path / "dense"), static.global_scope())
    exe.run(feed=FEED)
    assert fleet.load_one_table("emb", str(tmp_path / "table")) == 3
    weights = load_file(tmp_path / "dense" / "dense.safetensors")
    assert list(weights) == ["fc.bias", "fc.weight"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        after = nn.functional.mse_loss(model.eval()(BATCH), BATCH["label"])
    assert after == before
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: fleet.save_one_table(1, "x"), r"a table of the model \(0 'emb'\), found 1"),
        (lambda: fleet.save_one_table(0, "x", mode=1), "expected mode 0, found 1"),
        (lambda: fleet.save_dense_params(exe, "x", var_names=["w"]), "fc.bias.*found w"),
        (lambda: fleet.save_dense_params(exe, "x", scope=1), "global_scope.*found int"),
        (lambda: fleet.save_persistables(1, "x"), "executor=None or static.Executor, found int"),
        (lambda: fleet.save_persistables(exe, "x", main_program=1), "main_program=None, found int"),
        (lambda: fleet.set_date(0, "2019"), "like '20190720', found '2019'"),
        (lambda: fleet.set_date(0, "2019111"), "like '20190720', found '2019111'"),
    ]
    for call, words in refused:
        with pytest.raises(BadRequest, match=words):
            call()
    fleet.set_date(0, "20190720")
    optimizer = fleet.calls.job.trained()  # type: ignore[attr-defined]
    assert optimizer.data_time.seconds() == 1563580800


def test_an_inference_model_has_the_columns_and_outputs_that_are_named(tmp_path: Path) -> None:
    model = Model()
    minimized(model)
    exe = static.Executor()
    with pytest.raises(NotReady, match="give batch="):
        fleet.save_inference_model(exe, str(tmp_path / "x"), ["a"], ["output"])
    exe.train_from_dataset(dataset=[BATCH])
    with pytest.raises(BadRequest, match="columns a, label, found b"):
        fleet.save_inference_model(exe, str(tmp_path / "x"), ["a", "b"], ["output"])
    with pytest.raises(BadRequest, match=r"outputs of the model, output, .*found ctr"):
        fleet.save_inference_model(exe, str(tmp_path / "x"), ["a"], ["ctr"])
    model.train()
    model.fc.eval()  # a part that is frozen stays so
    fleet.save(str(tmp_path / "inference"), feed=["a"], fetch=["output"])
    assert (model.training, model.fc.training) == (True, False)
    predictor = fleet.load_inference_model(str(tmp_path / "inference"))
    expected = exe.run(static.default_main_program().clone(True), feed=FEED, fetch_list=["output"])[
        0
    ]
    np.testing.assert_allclose(
        predictor.predict({"a": BATCH["a"]}).outputs["output"], expected, atol=1e-6
    )
    fleet.save(str(tmp_path / "ckpt"))
    assert (tmp_path / "ckpt" / "manifest.json").is_file()


def test_a_process_alone_answers_who_is_in_the_job() -> None:
    assert (fleet.rank(), fleet.nranks(), fleet.world_size()) == (0, 1, 1)
    assert (fleet.node_num(), fleet.local_rank(), fleet.is_coordinator()) == (1, 0, False)
    assert (fleet.worker_endpoints(), fleet.server_endpoints(to_string=True)) == ([], "")
    assert fleet.all_reduce(3).item() == 3
    with pytest.raises(BadRequest, match="expected a server, this is a embedded"):
        fleet.server_index()
    fleet.set_log_level("WARNING")
    assert (fleet.get_log_level_code(), fleet.get_log_level_name()) == (30, "WARNING")
    with pytest.raises(BadRequest, match="found 'LOUD'"):
        fleet.set_log_level("LOUD")


def test_files_are_dealt_before_init_worker_too() -> None:
    fleet.stop_worker()
    fleet.init()
    assert fleet.util.get_file_shard(["part-0", "part-1"]) == ["part-0", "part-1"]


def test_endpoints_are_those_of_the_role(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = ["a:1", "b:2"]
    maker = fleet.UserDefinedRoleMaker(
        current_id=1, role=fleet.Role.SERVER, worker_num=2, server_endpoints=servers
    )
    fleet.init(maker)
    assert (fleet.server_index(), fleet.server_endpoints()) == (1, servers)
    with pytest.raises(BadRequest, match="listen nowhere"):
        fleet.worker_endpoints()
    places = ["a:1", "a:2", "b:1"]
    fleet.init(fleet.UserDefinedRoleMaker(True, True, current_id=0, worker_endpoints=places), True)
    assert fleet.worker_endpoints(to_string=True) == "a:1,a:2,b:1"
    assert (fleet.node_num(), fleet.server_endpoints()) == (2, [])
    with pytest.raises(BadRequest, match="expected LOCAL_RANK"):
        fleet.local_rank()
    fleet.init()


def test_strategies_of_the_factory_are_the_modes() -> None:
    factory = fleet.StrategyFactory
    assert factory.create_sync_strategy().strategy() == tr.Strategy("sync")
    assert factory.create_async_strategy().strategy() == tr.Strategy("async")
    assert factory.create_geo_strategy(7).strategy() == tr.Strategy("geo", k=7)
    with pytest.raises(BadRequest, match="create_half_async_strategy: there are no threads"):
        factory.create_half_async_strategy()
    fleet.init(is_collective=True, strategy=factory.create_sync_strategy())
    model = fleet.distributed_model(Model())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer.distributed.strategy == tr.Strategy("collective")


def test_other_names_of_paddle_say_what_to_write() -> None:
    refused: list[tuple[Any, str]] = [
        (lambda: paddle.reshape, r"paddle\.reshape: .* torch\.reshape$"),
        (lambda: paddle.concat, r"torch\.cat$"),
        (lambda: paddle.seed, r"torch\.manual_seed .*Table\(seed=\)"),
        (lambda: paddle.transpose, r"torch\.permute"),
        (lambda: paddle.metric, r"trireme\.metrics\.AUC"),
        (lambda: paddle.distributed.init_parallel_env, r"fleet\.init\(is_collective=True\)"),
        (lambda: paddle.distributed.spawn, "trireme launch"),
        (lambda: paddle.distributed.launch, "trireme launch"),
        (lambda: paddle.distributed.ParallelEnv, r"fleet\.worker_index"),
        (lambda: paddle.fluid.transpiler, "split_method"),
        (lambda: paddle.fluid.io, "fleet.save_persistables"),
        (lambda: static.ctr_metric_bundle, r"fleet\.ctr_metric_bundle\(\)"),
    ]
    for name, words in refused:
        with pytest.raises(BadRequest, match=words):
            name()
    assert not hasattr(paddle, "no_such_name")
    assert not hasattr(paddle.distributed, "no_such_name")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (paddle, "seed"),
        (paddle, "reshape"),
        (paddle.distributed, "spawn"),
        (paddle.fluid, "layers"),
        (paddle.fluid.core, "nn"),
        (static, "InputSpec"),
        (static, "device_guard"),
        (paddle.fluid, "Program"),
        (fleet, "Fleet"),
        (fleet, "main_program"),
        (fleet, "utils"),
        (fleet.PSGPU(), "set_mode"),
    ],
)
def test_a_script_may_ask_whether_there_is_a_name(module: Any, name: str) -> None:
    assert not hasattr(module, name)
    assert getattr(module, name, None) is None
    with pytest.raises(Absent, match=r"counterpart|no place here") as caught:
        getattr(module, name)
    assert isinstance(caught.value, BadRequest)


def test_the_rank_is_that_of_the_job_or_before_it_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paddle.job, "_own_role", None)
    place = {
        "TRAINING_ROLE": "TRAINER",
        "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:6000",
        "PADDLE_TRAINERS_NUM": "3",
        "PADDLE_TRAINER_ID": "2",
    }
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert (paddle.distributed.get_rank(), paddle.distributed.get_world_size()) == (2, 3)
    for name in place:
        monkeypatch.delenv(name)
    assert (paddle.distributed.get_rank(), paddle.distributed.get_world_size()) == (0, 1)
    fleet.init()
    assert (paddle.distributed.get_rank(), paddle.distributed.get_world_size()) == (0, 1)


def test_tensors_of_reader_classes_are_torchs() -> None:
    assert paddle.to_tensor([1, 2]).tolist() == [1, 2]
    assert paddle.to_tensor(np.array([[0.5]])).dtype == torch.float64


def test_a_change_of_what_a_strategy_returned_is_refused_and_not_lost() -> None:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync_configs = {"k_steps": 0}
    configs: Any = strategy.a_sync_configs
    changes: list[Callable[[], Any]] = [
        lambda: configs.__setitem__("k_steps", 400),
        lambda: configs.update(k_steps=400),
        lambda: configs.setdefault("use_ps_gpu", True),
        lambda: configs.pop("k_steps"),
    ]
    for change in changes:
        with pytest.raises(BadRequest, match="expected a_sync_configs to be set as a whole"):
            change()
    assert strategy.a_sync_configs == {"k_steps": 0}
    strategy.a_sync_configs = {**strategy.a_sync_configs, "k_steps": 400}
    assert strategy.strategy() == tr.Strategy("geo", k=400)
    for wrong in (None, [], 3, "k_steps"):
        with pytest.raises(BadRequest, match="expected a_sync_configs as a dict"):
            strategy.a_sync_configs = wrong  # type: ignore[assignment]


@pytest.mark.parametrize("steps", [0, -1, 2.5, "3", None])
def test_a_geo_strategy_is_never_another_mode(steps: Any) -> None:
    with pytest.raises(BadRequest, match=r"StrategyFactory: expected update_frequency as an int"):
        fleet.StrategyFactory.create_geo_strategy(steps)


@pytest.mark.parametrize("method", [1, [1], None, "RoundRobin", Model])
def test_a_split_method_is_a_class_of_fleet_or_a_function(method: Any) -> None:
    config = fleet.DistributeTranspilerConfig()
    with pytest.raises(BadRequest, match="split_method as RoundRobin, HashName or a function"):
        config.split_method = method
    config.split_method = lambda name, number, servers: (len(name) + number) % servers
    assert config.blocks().owners(["fc.bias", "fc.weight", "fc.weight"], 2) == [1, 1, 0]


def test_arguments_of_another_type_are_refused_where_they_are_given(tmp_path: Path) -> None:
    model = Model()
    minimized(model)
    torch_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = fleet.distributed_optimizer
    wrong: Any
    for wrong in ({}, {"a_sync": 1}, 3, "sync", tr.Strategy("sync"), fleet.DistributedStrategy):
        with pytest.raises(BadRequest, match=r"expected strategy as a fleet\.DistributedStrategy"):
            made(torch_optimizer, wrong)
        with pytest.raises(BadRequest, match=r"expected strategy as a fleet\.DistributedStrategy"):
            fleet.init(strategy=wrong)
    for wrong in (1.0, "x", fleet.ClipGradByValue):
        with pytest.raises(BadRequest, match=r"grad_clip as fleet\.ClipGradByGlobalNorm\(10\.0\)"):
            made(torch_optimizer, grad_clip=wrong)
    for wrong in (3, True, "worker"):
        with pytest.raises(BadRequest, match="expected role_maker as a role maker, found"):
            fleet.init(wrong)
    wrong = "no"
    with pytest.raises(BadRequest, match="expected is_collective as True or False, found 'no'"):
        fleet.init(is_collective=wrong)
    for wrong in ("x", None, True, -1, float("nan"), float("inf")):
        with pytest.raises(BadRequest, match="set_lr: expected value as a finite number >= 0"):
            fleet.set_lr(wrong)
    for wrong in ({}, 3, None):
        with pytest.raises(BadRequest, match="set_state_dict: expected value as what state_dict"):
            fleet.set_state_dict(wrong)
    for wrong in (None, "", 3, "a\0b"):
        calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
            *((fleet.save_persistables, (None,)), (fleet.save_inference_model, (None,))),
            *((fleet.save_dense_params, (None,)), (fleet.save_one_table, (0,))),
            *((fleet.load_one_table, (0,)), (fleet.load_model, ())),
            (fleet.load_inference_model, ()),
        ]
        for call, before in calls:
            with pytest.raises(BadRequest, match=r"expected (path|dirname)=FOLDER, found"):
                call(*before, wrong)
    for wrong in (None, 1.5, True):
        with pytest.raises(BadRequest, match="expected table_id as a name or a place, found"):
            fleet.save_one_table(wrong, str(tmp_path / "x"))
    exe, dataset = static.Executor(), [BATCH]
    for name, wrong in (("print_period", "x"), ("print_period", 1.5), ("debug", "x")):
        with pytest.raises(BadRequest, match=f"fleet: expected {name} as "):
            exe.train_from_dataset(None, dataset, **{name: wrong})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"role": "SERVER"}, r"role as Role\.WORKER or Role\.SERVER, found 'SERVER'"),
        ({"role": 5}, r"role as Role\.WORKER or Role\.SERVER, found 5"),
        ({"current_id": "0"}, "current_id as an integer, found '0'"),
        ({"init_gloo": "yes"}, "init_gloo as True or False, found 'yes'"),
        ({"worker_num": "2"}, "worker_num as an integer, found '2'"),
        ({"server_endpoints": "a:1"}, "server_endpoints as a list of .*, found 'a:1'"),
        ({"worker_endpoints": ["c:1"]}, r"worker_num of worker_endpoints \['c:1'\], found 2"),
        (
            {"is_collective": True, "server_endpoints": (), "worker_endpoints": ["c:1", "c:2"]},
            "workers alone with is_collective, found a server",
        ),
    ],
)
def test_a_role_maker_takes_no_other_role_for_a_worker(
    arguments: dict[str, Any], words: str
) -> None:
    stated = {"current_id": 0, "role": 2, "worker_num": 2, "server_endpoints": ["a:1", "b:1"]}
    assert fleet.UserDefinedRoleMaker(**stated).role.role == "server"  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=rf"UserDefinedRoleMaker: expected {words}"):
        fleet.UserDefinedRoleMaker(**{**stated, **arguments})
